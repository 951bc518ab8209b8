"""`teachllm quantize`: a smaller checkpoint of a model, or a table of what each way to one costs."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from teachllm.config import EngineConfig
from teachllm_cli.bench_output import OutputJson, check_folder, number, progress_bar, write_json
from teachllm_cli.errors import one_line_errors
from teachllm_cli.terminal import answers, notes

if TYPE_CHECKING:
    from teachllm.bench.quantization_loss import Compared
    from teachllm.quantization.algorithms.recipe import Recipe

_METHODS = "int8, fp8, rtn (round to nearest), gptq, awq, autoround"


def quantize(
    model: Annotated[str, typer.Option("--model", "-m", help="Folder or hub id; not quantized yet.")] = "teachlm",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{_METHODS}. With --compare give it several times, or leave it out for all that have so many --bits."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write, empty or new. With --compare one for each method below it.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Quantize in several ways, and measure what each loses and wins.")
    ] = False,
    bits: Annotated[int | None, typer.Option(help="Bits per weight, 4 or 8. Default: 4; int8 and fp8 have 8.")] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Inputs that share a scale; -1: all. Default: 128, or what divides. Not of int8 and fp8."),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="Whether 0.0 is the middle of the range. Default: all but awq."),
    ] = None,
    desc_act: Annotated[
        bool, typer.Option("--desc-act", help="gptq rounds inputs with large activations first.")
    ] = False,
    smoothquant: Annotated[
        bool, typer.Option("--smoothquant", help="int8 moves outliers of activations to weights.")
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="For gptq, awq, autoround, smoothquant. Default: conversations about inference, which teachllm has."
        ),
    ] = None,
    num_samples: Annotated[int | None, typer.Option(help="Rows of that text. Default: 128.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a row. Default: 256.")] = None,
    num_iters: Annotated[int | None, typer.Option(help="Steps of autoround for each block. Default: 200.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="With --compare: text to measure on. Default: answers, which teachllm has.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="With --compare: draw the table to this HTML file.")] = None,
    output_json: OutputJson = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... Default: a GPU if there is one.")] = None,
    for_other_engines: Annotated[
        bool, typer.Option("--for-other-engines", help="Write it, too, if this engine does not run it.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Write a quantized checkpoint in a format that transformers and other engines load, and for many models this one.

    With --compare: size, perplexity, KL divergence to the original and tokens/s of each method, in one table.
    """
    with one_line_errors(debug=debug):
        if compare and for_other_engines:
            raise ValueError("--for-other-engines has no effect with --compare, which measures what this engine runs")
        if not compare:
            for flag, value in (("--text", text), ("--plot", plot), ("--output-json", output_json)):
                if value is not None:
                    raise ValueError(f"{flag} has no effect without --compare")
            if method is None or len(method) != 1:
                raise ValueError(f"--method: choose one of {_METHODS}; or --compare for a table of all")
            if out is None:
                raise ValueError("--out: give the folder to write")
        check_folder("--plot", plot)
        check_folder("--output-json", output_json)
        from teachllm.quantization.algorithms.recipe import Recipe, several

        given: dict[str, Any] = {"bits": bits, "group_size": group_size, "is_symmetric": symmetric}
        given |= {"desc_act": desc_act, "smoothquant": smoothquant, "calibration": calibration}
        given |= {"num_samples": num_samples, "seq_len": seq_len, "num_iters": num_iters}
        given = {name: value for name, value in given.items() if value is not None}
        if compare:
            recipes, found = _compare(several(method, given), model, out, text, plot is not None, _usable(device))
            _show(found, recipes, model)
            write_json(output_json, {"model": model, "found": [asdict(each) for each in found]})
            if plot is not None:
                from teachllm.bench.quantization_loss_plot import write_plot

                write_plot(found, plot, f"{model}, quantized")
                notes().print(f"The table as a picture: {plot}", markup=False, soft_wrap=True)
        else:
            assert method is not None and out is not None
            _make(Recipe(method=method[0], **given), model, out, _usable(device), for_other_engines)


def _usable(device: str | None) -> str:
    """Raises ValueError: this machine has no such device."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.empty(0, device=device).device.type in ("cpu", "cuda")
    except (RuntimeError, AssertionError):  # of a name, of a build
        found = False
    if not found:
        raise ValueError(f"--device {device}: PyTorch finds no such device here: set cpu, or leave it out")
    return device


def _make(recipe: Recipe, model: str, out: Path, device: str, for_other_engines: bool) -> None:
    from teachllm.quantization.algorithms.quantize import quantize_model

    with _quiet(), progress_bar(recipe.method) as progress:
        made = quantize_model(model, out, recipe, progress, device, for_other_engines)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    notes().print(f"{made.name} of {model}, {number(size / 1e6)} MB: {out}", markup=False, soft_wrap=True)
    if (how := _how_to_try(out)) is not None:
        notes().print(f"Try it: {how}", markup=False, soft_wrap=True)


def _how_to_try(out: Path) -> str | None:
    """Return a command that runs a checkpoint; None: this engine does not."""
    from teachllm.engine.info import describe_model
    from teachllm.engine.text.tokenizer import Tokenizer

    try:
        describe_model(EngineConfig(model=str(out)))
        chats = Tokenizer.load(str(out)).has_chat_template
    except ValueError:
        return None
    folder = shlex.quote(str(out))
    if chats:
        return f"teachllm chat --model {folder}"
    return f"teachllm generate --model {folder} --prompt 'Once upon a time'"


def _compare(
    recipes: Sequence[Recipe], model: str, out: Path | None, text: Path | None, will_plot: bool, device: str
) -> tuple[list[Recipe], list[Compared]]:
    from teachllm.bench import quantization_loss
    from teachllm.bench import quantization_loss_plot as picture
    from teachllm.quantization.algorithms.quantize import check
    from teachllm.quantization.algorithms.write import check_empty, make_folder

    if will_plot:  # all that can be refused is, before the long work
        picture.check_plotly()
    with _quiet():
        documents = quantization_loss.read(text, model)
        fitted = check(model, recipes, for_other_engines=None)
        if out is not None:
            for recipe in fitted:
                check_empty(out / recipe.name)
            make_folder(out)
        return fitted, quantization_loss.compare(_made(fitted, model, out, device), documents, device=device)


def _made(recipes: Sequence[Recipe], model: str, out: Path | None, device: str) -> Iterator[tuple[str, str | Path]]:
    """(name, checkpoint): the original, and each that is made of it. Without `out` it is gone when the next comes."""
    from teachllm.bench.quantization_loss import ORIGINAL
    from teachllm.quantization.algorithms.quantize import quantize_model

    with progress_bar(f"measuring {ORIGINAL}"):
        yield ORIGINAL, model
    for recipe in recipes:
        with contextlib.ExitStack() as stack:
            parent = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="teachllm-")))
            folder = parent / recipe.name
            with progress_bar(recipe.name) as progress:
                quantize_model(model, folder, recipe, progress, device)
            with progress_bar(f"measuring {recipe.name}"):
                yield recipe.name, folder


def _show(found: Sequence[Compared], recipes: Sequence[Recipe], model: str) -> None:
    """In 80 columns, whatever the model's size."""
    from rich.table import Table
    from rich.text import Text

    original, others = found[0], found[1:]
    unit, size = ("GB", 1e9) if original.num_bytes >= 1e10 else ("MB", 1e6)
    table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False)
    table.add_column("", overflow="fold")
    for column in (unit, "%", "perplexity", "increase", "KL", "tok/s"):
        table.add_column(column, justify="right", no_wrap=True)
    speed = number(original.tokens_per_s)
    table.add_row(original.name, number(original.num_bytes / size), "", _perplexity(original), "", "", speed)
    for recipe, each in zip(recipes, others, strict=True):
        table.add_row(
            recipe.kind,
            number(each.num_bytes / size),
            f"{each.num_bytes / original.num_bytes:.0%}",
            _perplexity(each),
            f"{each.perplexity / original.perplexity - 1:+.2%}" + _plus_minus(each.standard_error),
            f"{each.kl_divergence:.2g}",
            number(each.tokens_per_s),
        )
    console = answers()
    console.print(Text(_heading(recipes, model), style="bold"))
    console.print(table)
    console.print(
        "Size of the tensors, and as a part of the original's; perplexity of a text that no calibration has seen, its "
        "increase and the standard error of that, from answer to answer; KL divergence of next-token probabilities "
        "from the original's, in nats per token: what log perplexity would increase by on endless text of the "
        "original's own; tokens per second of eight requests that decode together, in this engine.",
        style="dim",
        markup=False,
    )


def _perplexity(each: Compared) -> str:
    return f"{each.perplexity:#.5g}".rstrip(".")


def _plus_minus(standard_error: float | None) -> str:
    return "" if standard_error is None else f" ±{standard_error:.2%}"


def _heading(recipes: Sequence[Recipe], model: str) -> str:
    """The model, and what all that have groups share."""
    from teachllm.quantization.algorithms.recipe import EIGHT_BIT

    grid = next((recipe.grid for recipe in recipes if recipe.method not in EIGHT_BIT), None)
    if grid is None:
        return model
    groups = "a scale for each output" if grid.group_size == -1 else f"groups of {grid.group_size}"
    beside = "; int8 and fp8 by output" if any(recipe.method in EIGHT_BIT for recipe in recipes) else ""
    return f"{model}, {grid.bits} bits, {groups}{beside}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers draws bars of its own while a model loads, even where they are not shown, and reports on it."""
    from transformers.utils import logging

    was_on, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_on:
            logging.enable_progress_bar()
