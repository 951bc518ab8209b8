"""Lesson 11, quantization: teachlm with rounded weights, what rounding costs it, and what is judged."""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from teachllm.models.checkpoint import EMBEDDED_MODEL, find_folder
from teachllm.quantization import rounding
from teachllm.quantization.algorithms import compare
from teachllm.quantization.algorithms.recipe import Recipe
from teachllm.quantization.algorithms.write import Made, write_checkpoint
from teachllm.quantization.quantized_weights import GroupedWeight
from teachllm_lessons.exercise import Exercise, Wrong, require
from teachllm_lessons.faults import ROOT
from teachllm_lessons.palette import BAD, BAR, INK, LINE, OTHER_BAR, color
from teachllm_lessons.picture import Picture, axes, short
from teachllm_lessons.watch import Watch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # in a notebook tqdm misses a widget, which nobody needs here
    import tqdm.auto  # noqa: F401

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # quantized values, scales, zeros
Quantize = Callable[[torch.Tensor, int, int], Parts]

WHOLE, ROW = 0, -1  # in place of a group's size
EVERY = 42  # documents of the held-out text, of which one is scored
QUESTION = "Explain paged attention to me."


def own(weight: torch.Tensor, bits: int, group_size: int) -> Parts:
    """The engine's own rounding, each group with a zero of its own."""
    found = rounding.grouped(weight, bits, group_size, is_symmetric=False, scale_dtype=torch.float32)
    return found.qweight, found.scales, found.with_zeros()


def dequantize(parts: Parts, bits: int) -> torch.Tensor:
    """Return the dequantized weight, [out, in] float32, as the engine computes it."""
    values, scales, zeros = parts
    return GroupedWeight(values, scales.float(), zeros.to(torch.int32), bits).dequantize(torch.float32)


# -- teachlm, rounded ----------------------------------------------------------------------------------------------


@cache
def weights() -> dict[str, torch.Tensor]:
    """All of teachlm's tensors, float32, as they are stored."""
    from safetensors.torch import load_file

    return {name: each.float() for name, each in load_file(find_folder(EMBEDDED_MODEL) / "model.safetensors").items()}


def is_projection(name: str) -> bool:
    """Whether a tensor is what quantizers round: a layer's matrix, not a norm or the embedding."""
    return ".layers." in name and weights()[name].dim() == 2


@cache
def _home() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="teachllm-lesson-11-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def rounded(bits: int, group_size: int, quantize: Quantize = own) -> str:
    """Write a copy of teachlm whose projections are quantized and dequantized again, with any number of bits.

    Args:
        group_size: of inputs that share a scale; `ROW`: all of an output's; `WHOLE`: all of the weight.

    Returns:
        its folder.
    """
    from safetensors.torch import save_file

    out = Path(tempfile.mkdtemp(dir=_home()))
    tensors = dict(weights())
    for name in filter(is_projection, weights()):
        weight = tensors[name]
        rows = weight.reshape(1, -1) if group_size == WHOLE else weight
        width = rows.shape[1] if group_size in (WHOLE, ROW) else group_size
        tensors[name] = dequantize(quantize(rows, bits, width), bits).reshape(weight.shape)
    for file in find_folder(EMBEDDED_MODEL).glob("*.json"):
        shutil.copyfile(file, out / file.name)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return str(out)


def packed(bits: int, group_size: int, quantize: Quantize = own) -> str:
    """Write a checkpoint of teachlm with quantized weights, 8 or 4 bits each, as compressed-tensors packs them."""
    recipe = Recipe("rtn", bits=bits, group_size=group_size, is_symmetric=False)
    made = Made("model.layers")
    for name in filter(is_projection, weights()):
        values, scales, zeros = quantize(weights()[name], bits, group_size)
        scales = scales.to(torch.bfloat16) if scales.dtype == torch.bfloat16 else scales.float()
        made.weights[name.removesuffix(".weight")] = GroupedWeight(values, scales, zeros.to(torch.int32), bits)
    out = Path(tempfile.mkdtemp(dir=_home()))
    write_checkpoint(find_folder(EMBEDDED_MODEL), out, recipe, made)
    return str(out)


def answer(model: str = EMBEDDED_MODEL, question: str = QUESTION, max_tokens: int = 24, **settings: Any) -> str:
    """What the engine says with a model, greedily."""
    with Watch(model, num_gpu_blocks_override=24, max_model_len=192, dtype="float32", **settings) as watch:
        watch.add("A", question, max_tokens)
        return watch.run().text("A")


# -- what it costs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """Of answers that no model here was made with.

    Attributes:
        perplexity: exp of the mean of -log p.
        divergence: KL from the model that was rounded, nats a token.
    """

    perplexity: float
    divergence: float


@cache
def _documents() -> Sequence[Any]:
    return compare.read(None, EMBEDDED_MODEL)[::EVERY]


def _scores(model: str) -> compare.Scores:
    folder = find_folder(model)
    return compare.measure(folder, _documents(), compare.Decoding(1, 4, 2), dtype="float32", device="cpu")[0]


@cache
def _unquantized_scores() -> compare.Scores:
    return _scores(EMBEDDED_MODEL)


def loss(model: str = EMBEDDED_MODEL) -> Loss:
    """Perplexity of a part of the held-out text, and how far the probabilities of all tokens have moved."""
    unquantized = _unquantized_scores()
    found = unquantized if model == EMBEDDED_MODEL else _scores(model)
    return Loss(found.perplexity, mean(compare.divergences(unquantized, found)))


@dataclass(frozen=True)
class LayerErrors:
    """What a layer's output is off by, as a part of it, in the same grid.

    Attributes:
        layer: its name.
        of: by method.
    """

    layer: str
    of: dict[str, float]


def layer_errors(layer: str = "mlp.down_proj", bits: int = 4, group_size: int = 128) -> LayerErrors:
    """The first block's layer by three methods, on 16 rows of the calibration text: squared error of the output."""
    from transformers.utils import logging

    from teachllm.models.checkpoint import stored_tensors
    from teachllm.quantization.algorithms import blocks
    from teachllm.quantization.algorithms.awq import best_scales
    from teachllm.quantization.algorithms.calibrate import InputStatistics
    from teachllm.quantization.algorithms.clipping import clipped
    from teachllm.quantization.algorithms.gptq import gptq
    from teachllm.quantization.algorithms.grid import Grid
    from teachllm.quantization.algorithms.texts import CALIBRATION_TEXT, calibration_rows, read_tokenizer

    logging.disable_progress_bar()
    folder, grid = find_folder(EMBEDDED_MODEL), Grid(bits, group_size, is_symmetric=False)
    model = blocks.load(folder)
    parts = blocks.blocks_of(model, stored_tensors(folder))
    hidden = blocks.enter(model, parts, calibration_rows(CALIBRATION_TEXT, read_tokenizer(folder), 16, 256))
    parts[0].to("cpu", torch.float32)
    statistics = InputStatistics.of(parts[0], layer, hidden)
    weight, hessian = parts[0].linears()[layer].weight, statistics.hessian

    def error(found: torch.Tensor) -> float:
        off = found - weight
        return float(((off @ hessian) * off).sum() / ((weight @ hessian) * weight).sum())

    scales = best_scales([weight], hessian, statistics.mean_abs, grid)
    awq = clipped(weight * scales, hessian / torch.outer(scales, scales), grid).dequantize(torch.float32) / scales
    return LayerErrors(
        f"{parts[0].name}.{layer}",
        {
            "nearest": error(grid.nearest(weight).dequantize(torch.float32)),
            "AWQ": error(awq),
            "GPTQ": error(gptq(weight, hessian, grid).dequantize(torch.float32)),
        },
    )


def documented() -> dict[str, dict[str, float]]:
    """What `teachllm quantize --compare` found on all of the held-out text, from docs/quantization.md: MB, nats."""
    text = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:original, )?`?([\w -]+?)`? \| ([\d.]+) \|[^|]*\|[^|]*\| ([\d.]*)", text, re.MULTILINE)
    return {name: {"MB": float(size), "nats": float(nats or 0)} for name, size, nats in rows}


def on_a_gpu() -> tuple[dict[str, dict[str, dict[str, float]]], str]:
    """Committed results of benchmarks/quantized.py for Qwen3-8B: {way: {workload: figures}}; and where they are from.

    The newest one that has a way counts.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    said = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*-quantized-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        found |= result["workloads"]["qwen3-8b"]
        said.append(f"{result['device']} at {result['commit'][:9]}")
    return found, "; ".join(said)


def kv_blocks(num_bytes: int = 1 << 20, **settings: Any) -> tuple[int, Watch]:
    """How many blocks of 16 tokens fit into so many bytes; and the engine, in bfloat16."""
    watch = Watch(kv_cache_memory_bytes=num_bytes, max_model_len=128, dtype="bfloat16", **settings)
    return watch.trace.header["num_blocks"], watch


def size_on_disk(folder: str | Path) -> int:
    """Bytes of a checkpoint's tensors."""
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def tensor_bytes(folder: str | Path) -> dict[str, int]:
    """Bytes of a checkpoint by what they are."""
    from safetensors.torch import load_file

    found = dict.fromkeys(("embedding", "matrices", "scales", "norms"), 0)
    for name, tensor in load_file(Path(folder) / "model.safetensors").items():
        what = "embedding" if "embed" in name else "scales" if name.endswith("scale") else "matrices"
        found["norms" if "norm" in name or tensor.numel() < 3 else what] += tensor.nbytes
    return found


def nearest_4_bits() -> Path:
    """What `teachllm quantize --method rtn` makes of teachlm: 4 bits, a scale for each 128 inputs."""
    from transformers.utils import logging

    from teachllm.quantization.algorithms.quantize import quantize_model

    logging.disable_progress_bar()
    out = Path(tempfile.mkdtemp(dir=_home()))
    quantize_model(EMBEDDED_MODEL, out, Recipe("rtn"))
    return out


# -- pictures ------------------------------------------------------------------------------------------------------


def draw_grids(name: str, output: int, first: int, count: int, bits: int) -> Picture:
    """Draw some of an output's weights, and the values of the grid, with one scale for ever fewer of them.

    Args:
        name: of a weight.
        first, count: its inputs that are drawn, which are the smallest group.
    """
    weight = weights()[f"{name}.weight"]
    row = weight[output : output + 1]
    part = row[:, first : first + count]
    ranges = {"the weight": weight.reshape(1, -1), "the output": row, f"these {count}": part}
    figure, ax = axes(9, 0.7 + 0.72 * len(ranges))
    said = []
    for place, (what, group) in enumerate(ranges.items()):
        _, scales, zeros = own(group, bits, group.shape[1])
        step, zero = float(scales), int(zeros)
        levels = [(value - zero) * step for value in range(1 << bits)]
        ax.plot([levels[0], levels[-1]], [-place, -place], color=LINE, linewidth=1)
        ax.plot(levels, [-place] * len(levels), "|", color=BAD, markersize=17, markeredgewidth=1.4)
        ax.plot(part[0].tolist(), [-place] * count, "o", color=color(4), markersize=4, alpha=0.6)
        used = len({round(min(max(float(x) / step + zero, 0), len(levels) - 1)) for x in part[0]})
        said.append(f"one scale for {what}: a step of {step:.4f}, and these weights use {used} of {1 << bits} values")
        text = f"a step is {step:.3f}: {used} of {1 << bits} values"
        ax.text(levels[-1], 0.26 - place, text, ha="right", fontsize=8, color=INK)
    ax.set_yticks([-place for place in range(len(ranges))], [f"one scale for\n{what}" for what in ranges])
    ax.set_ylim(0.7 - len(ranges), 0.7)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("value of a weight")
    ax.set_title(f"dots: {count} weights; lines: what {bits} bits can stand for", fontsize=9, color=INK, loc="left")
    return Picture(figure, "; ".join(said))


def draw_speeds(ways: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Picture:
    """Draw one request's tokens, and many prompts, per weight dtype."""
    names = [name for name in ("bf16", "fp8", "int8", "int4") if name in ways]
    figure, both = axes(9, 2.2, ncols=2, sharey=True)
    figures = (
        ("one request: ms a token (less is better)", [ways[name]["single"]["tpot_ms"] for name in names]),
        ("64 prompts: tokens/s (more is better)", [ways[name]["batch64"]["prefill_tok_s"] for name in names]),
    )
    for ax, (label, values) in zip(both, figures, strict=True):
        drawn = ax.barh(names, values, color=[OTHER_BAR if name == "bf16" else BAR for name in names])
        ax.bar_label(drawn, [short(value) for value in values], padding=4, color=INK, fontsize=9)
        ax.set_xlabel(label)
        ax.margins(x=0.18)
    both[0].invert_yaxis()
    told = (f"{label}: {', '.join(map(short, values))}" for label, values in figures)
    return Picture(figure, f"{', '.join(names)}. {'; '.join(told)}")


class Together:
    """Some engines that answer the same question, stepped together.

    Args:
        models: {name: model}.
    """

    def __init__(self, models: Mapping[str, str], question: str = QUESTION, max_tokens: int = 24) -> None:
        self.watches = {
            name: Watch(model, num_gpu_blocks_override=24, max_model_len=192, dtype="float32")
            for name, model in models.items()
        }
        for watch in self.watches.values():
            watch.add("A", question, max_tokens, logprobs=1)

    def step(self, steps: int = 1) -> Together:
        """Of all of them."""
        for watch in self.watches.values():
            watch.run(steps)
        return self

    def run(self) -> Together:
        """Until all have answered."""
        for watch in self.watches.values():
            watch.run()
            watch.close()
        return self

    def said(self) -> Iterator[tuple[str, list[tuple[str, float]]]]:
        """Of each model: each token that it said, and the probability that it gave it."""
        for name, watch in self.watches.items():
            output = watch.outputs["A"].outputs[0]
            found = []
            for token_id, entries in zip(output.token_ids, output.logprobs or (), strict=True):
                entry = entries[token_id]
                found.append((entry.decoded_token or "", float(torch.tensor(entry.logprob).exp())))
            yield name, found

    def _repr_markdown_(self) -> str:
        rows = []
        for name, said in self.said():
            tokens = " ".join(f"`{token}` {probability:.0%}" for token, probability in said[-6:])
            rows.append(f"| {name} | {len(said)} | {tokens} |")
        return "| model | tokens | the last ones, and how sure it was |\n|---|---|---|\n" + "\n".join(rows)

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {''.join(token for token, _ in said)}" for name, said in self.said())

    def sure(self) -> Picture:
        """How sure each model was of each token that it said."""
        figure, ax = axes(9, 2.6)
        for index, (name, said) in enumerate(self.said()):
            ax.plot(
                [100 * probability for _, probability in said], marker="o", markersize=4, label=name, color=color(index)
            )
        ax.set_xlabel("output token")
        ax.set_ylabel("its probability, %")
        ax.set_ylim(0, 105)
        ax.grid(color=LINE, linewidth=0.5)
        ax.legend(frameon=False, labelcolor=INK, fontsize=9)
        return Picture(figure, "; ".join(f"{name}: least {min(p for _, p in said):.0%}" for name, said in self.said()))


# -- the exercise --------------------------------------------------------------------------------------------------

_SLACK = 1.001  # of a step: float32's own rounding


def contract_quantize(piece: Quantize) -> int:
    """Check quantized values, scales and zeros, from one group of four weights up."""
    exact = torch.tensor([[-1.0, 0.0, 1.0, 2.0]])
    back = _tried(piece, exact, 2, 4)
    require(
        torch.allclose(back, exact),
        f"four weights and four quantized values: {_of(exact)} in 2 bits fits exactly (values 0 1 2 3, scale 1, "
        f"zero 1), and came back as {_of(back)}",
    )
    cases = 1

    for row, why in (
        ([0.0, 0.0, 0.0, 0.0], "its range is nothing: a scale of 0 divides by 0"),
        ([3.0, 3.0, 3.0, 3.0], "its range is nothing, unless it reaches to 0.0"),
        ([-2.0, -2.0, -2.0, -2.0], "its range is nothing, unless it reaches to 0.0"),
        ([1.0, 2.0, 3.0, 4.0], "let the range reach to 0.0, or no quantized value is its zero"),
        ([-4.0, -3.0, -2.0, -1.0], "let the range reach to 0.0, or no quantized value is its zero"),
    ):
        weight = torch.tensor([row])
        _close(piece, weight, 4, 4, why)
        cases += 1

    for row in ([0.0, 0.37, -0.9, 0.2], [0.0, 5.0, 7.3, 0.4], [0.0, -5.0, -7.3, -0.4]):
        back = _tried(piece, torch.tensor([row]), 4, 4)
        require(
            float(back[0, 0]) == 0.0,
            f"0.0 in {row} came back as {float(back[0, 0]):.4g}: a quantized value has to stand for it, as pruned and "
            "padded weights have to be exactly that",
        )
        cases += 1

    calm, wild = torch.tensor([[0.1, -0.2, 0.3, -0.4]]), torch.tensor([[100.0, -50.0, 20.0, 10.0]])
    alone, beside = _tried(piece, calm, 4, 4), _tried(piece, torch.cat([calm, wild], dim=1), 4, 4)[:, :4]
    require(
        torch.equal(alone, beside),
        f"groups see each other: {_of(calm)} comes back as {_of(alone)} alone, and as {_of(beside)} beside a group "
        "with 100.0 in it. A scale for each group is there to keep an outlier to itself.",
    )
    above = _tried(piece, torch.cat([calm, wild]), 4, 4)[:1]
    require(
        torch.equal(alone, above), f"outputs see each other: {_of(calm)} comes back as {_of(above)} above {_of(wild)}"
    )
    cases += 2

    drawn = torch.Generator().manual_seed(11)
    for bits in (8, 4, 3):
        for group_size in (4, 16, 64):
            weight = torch.randn(8, 64, generator=drawn) * torch.rand(8, 1, generator=drawn)
            before = weight.clone()
            _close(piece, weight, bits, group_size, "each weight takes the nearest quantized value")
            require(torch.equal(weight, before), "it changes the weight that it is given: work on a copy")
            cases += 1
    return cases


def _tried(piece: Quantize, weight: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Return the dequantized weight, if the quantized values have the right form."""
    num_out, num_in = weight.shape
    asked = f"quantize({_of(weight)}, {bits}, {group_size})"
    found = piece(weight.clone() if num_in < 9 else weight, bits, group_size)
    if not (isinstance(found, tuple) and len(found) == 3 and all(isinstance(each, torch.Tensor) for each in found)):
        raise Wrong(f"{asked} is {type(found).__name__}: return three tensors, quantized values, scales and zeros")
    values, scales, zeros = found
    groups = (num_out, num_in // group_size)
    for what, tensor, shape in (
        ("quantized values", values, (num_out, num_in)),
        ("scales", scales, groups),
        ("zeros", zeros, groups),
    ):
        require(tuple(tensor.shape) == shape, f"{asked}: {what} are {list(tensor.shape)}, not {list(shape)}")
    is_positive = bool(scales.isfinite().all()) and bool((scales > 0).all())
    require(is_positive, f"{asked}: scales are {_of(scales)}: each must be above 0, as weights are divided by it")
    most = (1 << bits) - 1
    for what, tensor in (("quantized values", values), ("zeros", zeros)):
        is_whole = bool((tensor.double() == tensor.double().round()).all())
        require(is_whole, f"{asked}: {what} are {_of(tensor)}: round them to whole numbers")
        low, high = float(tensor.min()), float(tensor.max())
        require(
            low >= 0 and high <= most, f"{asked}: {what} from {low:g} to {high:g}, and {bits} bits hold 0 to {most}"
        )
    of_inputs = [each.double().repeat_interleave(group_size, dim=1) for each in (scales, zeros)]
    return ((values.double() - of_inputs[1]) * of_inputs[0]).float()


def _close(piece: Quantize, weight: torch.Tensor, bits: int, group_size: int, why: str) -> None:
    """Raises `Wrong` unless each number is off by half a step at most, of a grid that is as fine as it can be."""
    back = _tried(piece, weight, bits, group_size)
    groups = weight.unflatten(1, (-1, group_size))
    span = groups.amax(dim=2).clamp_min(0.0) - groups.amin(dim=2).clamp_max(0.0)
    step = span / ((1 << bits) - 1)
    off = (back - weight).abs()
    half = (step / 2 * _SLACK + 1e-6).repeat_interleave(group_size, dim=1)
    if bool((off > half).any()):
        output, at = (int(each) for each in divmod(int((off - half).argmax()), weight.shape[1]))
        group = weight[output : output + 1, at // group_size * group_size :][:, :group_size]
        raise Wrong(
            f"{float(weight[output, at]):.4g} came back as {float(back[output, at]):.4g}. Its group is {_of(group)}: "
            f"{1 << bits} values from {min(float(group.min()), 0.0):.4g} to {max(float(group.max()), 0.0):.4g} make "
            f"steps of {float(step[output, at // group_size]):.4g}, and nothing need be off by more than half of one "
            f"({why})"
        )


def _of(tensor: torch.Tensor) -> str:
    """A small tensor in a few characters."""
    shown = [f"{float(each):.4g}" for each in tensor.flatten()[:8]]
    return f"[{' '.join(shown)}{' ...' if tensor.numel() > 8 else ''}]"


MOST_LOST = 0.001  # nats a token, of 4 bits in groups of 32


@cache
def _own_words() -> str:
    return answer(packed(4, 32))


def live_quantize(piece: Quantize) -> str:
    model = packed(4, 32, piece)
    said, expected = answer(model), _own_words()
    require(
        said == expected,
        f"changes what the engine says: {expected!r} with its own quantized weights, {said!r} with yours",
    )
    lost = loss(model).divergence
    require(lost < MOST_LOST, f"loses {lost:.4f} nats a token in 4 bits and groups of 32, more than {MOST_LOST}")
    return (
        f"The engine ran teachlm from packed 4-bit weights in groups of 32: the same words as with its own quantized "
        f"weights, and {lost:.5f} nats a token lost."
    )


QUANTIZE = Exercise(
    lesson="11",
    name="quantize",
    contract=contract_quantize,
    live=live_quantize,
    reference=own,
    hints=(
        "A group has a smallest and a largest weight, and 2^bits quantized values to lay between them. How far apart "
        "are they then? And 0.0 must be one of them: what does that say of the smallest and the largest?",
        "Reshape to [out, groups, group_size]. `low = amin(2).clamp(max=0)`, `high = amax(2).clamp(min=0)`, the scale "
        "is their distance over 2^bits - 1, and never 0. The zero is the quantized 0.0: `-low / scale`, rounded.",
        "`values = (groups / scales[..., None]).round() + zeros[..., None]`, clamped to 0 ... 2^bits - 1, in the shape "
        "[out, in]; return values, scales, zeros. A group of zeros may have any scale above 0.",
    ),
)


def three_packings() -> None:
    """Write the same quantized weights in three formats."""
    for method in ("gptq", "awq", "autoround"):
        recipe = Recipe(method, group_size=64, is_symmetric=True)
        made = Made("model.layers")
        for name in filter(is_projection, weights()):
            made.weights[name.removesuffix(".weight")] = recipe.grid.nearest(weights()[name])
        out = Path(tempfile.mkdtemp(dir=_home()))
        write_checkpoint(find_folder(EMBEDDED_MODEL), out, recipe, made)
        print(f"{method:10} {answer(str(out), max_tokens=20)!r}")
