"""`teachllm bench`: how fast a model runs here, and how fast anything could run it here.

The flags are spelled as `vllm bench` spells them, so that a command line moves between the two unchanged.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from teachllm.config import EngineConfig
from teachllm_cli import engine as engine_door
from teachllm_cli.engine_options import engine_command
from teachllm_cli.terminal import answers, notes

if TYPE_CHECKING:
    from teachllm import LLM
    from teachllm.bench.figures import Figure
    from teachllm.bench.step_profile import StepProfile
    from teachllm.roofline import Ceilings

bench = typer.Typer(
    name="bench", no_args_is_help=True, help="Measure latency or throughput beside this machine's ceilings."
)

_KERNELS_SHOWN = 4  # of each group
_TRACE = Path("profile-trace.json")

OutputJson = Annotated[Path | None, typer.Option(help="Write the results to this file.")]


@bench.command()
@engine_command
def latency(
    engine: EngineConfig,
    input_len: Annotated[int, typer.Option(help="Prompt tokens of a request.")] = 32,
    output_len: Annotated[int, typer.Option(help="Output tokens of a request.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Requests that arrive together.")] = 8,
    num_iters_warmup: Annotated[int, typer.Option(help="Iterations that do not count.")] = 10,
    num_iters: Annotated[int, typer.Option(help="Iterations that count; medians are shown.")] = 30,
    output_json: OutputJson = None,
    profile: Annotated[bool, typer.Option("--profile", help="Then show where a decode step goes.")] = False,
    profile_trace: Annotated[
        Path | None, typer.Option(help=f"With --profile: its file for Perfetto. Default: {_TRACE}.")
    ] = None,
) -> None:
    """Time one batch of equal requests with random prompts, from its arrival to its last token."""
    from teachllm.bench.latency import LatencyOptions, run_latency, run_profile

    options = LatencyOptions(input_len, output_len, batch_size, num_iters_warmup, num_iters)
    with _measured(engine, output_json) as (llm, ceilings), _bar("iterations") as progress:
        result = run_latency(llm, options, ceilings, progress)
        trace = profile_trace or (_TRACE if profile else None)
        steps = run_profile(llm, options, ceilings, trace) if trace else None
    title = f"{engine.model}: {batch_size} x ({input_len} tokens in, {output_len} out)"
    _report(title, result.figures, ceilings, result.json, output_json)
    if steps is not None:
        _report_profile(steps)
        notes().print(f"The same steps for https://ui.perfetto.dev: {trace}", markup=False, soft_wrap=True)


@bench.command()
@engine_command
def throughput(
    engine: EngineConfig,
    num_prompts: Annotated[int, typer.Option(help="Requests, all at once.")] = 1000,
    input_len: Annotated[int, typer.Option(help="Prompt tokens of a request.")] = 1024,
    output_len: Annotated[int, typer.Option(help="Output tokens of a request.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(help="Draw each length uniformly from length x (1 - r) to length x (1 + r).")
    ] = 0.0,
    num_warmups: Annotated[
        int | None, typer.Option(help="Requests that run before and do not count. Default: as many as --num-prompts.")
    ] = None,
    output_json: OutputJson = None,
) -> None:
    """Count the tokens a second of many requests with random prompts."""
    from teachllm.bench.throughput import ThroughputOptions, run_throughput

    options = ThroughputOptions(num_prompts, input_len, output_len, random_range_ratio, num_warmups)
    with _measured(engine, output_json) as (llm, ceilings), _bar("requests") as progress:
        result = run_throughput(llm, options, ceilings, progress)
    tokens = f"{result.num_prompt_tokens:,} tokens in, {result.num_output_tokens:,} out"
    title = f"{engine.model}: {num_prompts} requests, {tokens}, {result.elapsed_s:.2f} s"
    _report(title, result.figures, ceilings, result.json, output_json)


@contextlib.contextmanager
def _measured(engine: EngineConfig, output_json: Path | None) -> Iterator[tuple[LLM, Ceilings]]:
    """The model, and the ceilings of where it runs: measured first, since an engine takes what memory there is."""
    if output_json is not None and not output_json.absolute().parent.is_dir():
        raise ValueError(f"--output-json {output_json}: there is no folder {output_json.absolute().parent}")
    from teachllm.bench.ceilings import ceilings_of

    ceilings = ceilings_of(engine)
    llm = engine_door.make_llm(replace(engine, skip_tokenizer_init=True))
    with contextlib.closing(llm):
        yield llm, ceilings


@contextlib.contextmanager
def _bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, gone at the end; nothing where stderr is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = notes()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(unit, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _report(
    title: str, figures: Sequence[Figure], ceilings: Ceilings, found: dict[str, Any], output_json: Path | None
) -> None:
    if output_json is not None:
        output_json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 2))
    table.add_column("figure")
    for column in ("measured", "at the ceilings", "of them"):
        table.add_column(column, justify="right")
    for figure in figures:
        amounts = (f"{_number(value)} {figure.unit}" for value in (figure.value, figure.limit))
        table.add_row(figure.name, *amounts, f"{figure.of_ceiling:.1%}")
    console = answers()
    console.print(Text(title, style="bold"))
    console.print(table)
    console.print(
        f"Ceilings measured on {ceilings.device}: reads {ceilings.read_bandwidth / 1e9:,.0f} GB/s, "
        f"copies {ceilings.copy_bandwidth / 1e9:,.0f} GB/s; in {ceilings.dtype} matrix products "
        f"{ceilings.gemm_flops / 1e12:,.2f} TFLOP/s, attention {ceilings.attention_flops / 1e12:,.2f} TFLOP/s",
        style="dim",
        markup=False,
    )


def _report_profile(steps: StepProfile) -> None:
    """A step's groups beside their floors, then its longest kernels."""
    from rich.table import Table
    from rich.text import Text

    console = answers()
    console.print(Text(f"A decode step, mean of {steps.num_steps}: {_number(steps.wall_ms)} ms", style="bold"))
    table = Table(box=None, padding=(0, 1, 0, 2))
    table.add_column("where it goes")
    for column in ("ms", "of the step", "at the ceilings", "calls"):
        table.add_column(column, justify="right")

    def add(name: str, ms: float, floor_ms: float | None = None, calls: float | None = None, style: str = "") -> None:
        floor = "" if floor_ms is None else f"{_number(floor_ms)} ms"
        number = "" if calls is None else f"{calls:.4g}"
        table.add_row(Text(name), _number(ms), f"{ms / steps.wall_ms:.1%}", floor, number, style=style)

    for group, ms in steps.groups().items():
        add(group, ms, steps.floor_ms.get(group))
        for row in [row for row in steps.rows if row.group == group][:_KERNELS_SHOWN]:
            add(f"  {row.name.removeprefix('void ')[:40]}", row.ms, calls=row.calls, style="dim")
    add("gaps between kernels", steps.gaps_ms)
    add("(host at work meanwhile)", steps.host_ms, style="dim")
    console.print(table)


def _number(value: float) -> str:
    """Three digits at least: 12,345, 123.4, 1.234, 0.1234."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
