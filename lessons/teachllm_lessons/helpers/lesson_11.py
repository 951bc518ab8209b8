"""Lesson 11, quantization: teachlm with rounded weights, what rounding costs it, and what is predicted and judged."""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from teachllm.checkpoint.files import EMBEDDED_MODEL, find_folder
from teachllm.errors import ModelError
from teachllm.layers.weights.quantized_weights import GroupedWeight
from teachllm.quantization.algorithms.recipe import Recipe
from teachllm.quantization.algorithms.write import Made, write_checkpoint
from teachllm.quantization.formats import rounding
from teachllm_lessons.exercise import Exercise, Wrong, require
from teachllm_lessons.faults import ROOT
from teachllm_lessons.helpers.lesson_11_losses import loss
from teachllm_lessons.predict import Prediction
from teachllm_lessons.results import committed
from teachllm_lessons.watch import Watch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # in a notebook tqdm misses a widget, which is not needed here
    import tqdm.auto  # noqa: F401

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # quantized values, scales, zeros
Quantize = Callable[[torch.Tensor, int, int], Parts]

WHOLE, ROW = 0, -1  # in place of a group's size
QUESTION = "Explain paged attention to me."

PERCENT_LEFT = Prediction(
    asks="Percent of its size on disk that is left",
    answer=37.1,
    because="The matrices shrink to (4 + 16/128) / 16 of their size: 11.8 MB become 3.0 MB. With the embedding's 2.1 "
    "MB that is 5.1 MB of 13.9 MB, or 37%. The engine's files have {before} before, and {after} after. The embedding, "
    "which is the output head as well, stays: the softmax is sensitive to it, and in a large model it is a small "
    "part. Here it was a seventh and is two fifths.",
    unit=" %",
    within=0.02,
    traps={
        25.0: "That is 4 bits of 16, without the scales and with a quantized embedding.",
        25.8: "That would be right if the embedding were quantized, too.",
        36.3: "Nearly: each 128 weights have a scale of 16 bits, an eighth of a bit per weight.",
        62.9: "That is what was saved. The question is what is left.",
        0.37: "That is a fraction. The question asks for percent: multiply by 100.",
    },
)


def own(weight: torch.Tensor, bits: int, group_size: int) -> Parts:
    """The engine's own rounding, each group with a zero of its own."""
    found = rounding.grouped(weight, bits, group_size, is_symmetric=False, scale_dtype=torch.float32)
    return found.qweight, found.scales, found.with_zeros()


def dequantize(parts: Parts, bits: int) -> torch.Tensor:
    """Return the dequantized weight, [out, in] float32, as the engine itself dequantizes it."""
    values, scales, zeros = parts
    return GroupedWeight(values, scales.float(), zeros.to(torch.int32), bits).dequantize(torch.float32)


# -- teachlm, rounded ----------------------------------------------------------------------------------------------


@cache
def weights() -> dict[str, torch.Tensor]:
    """All of teachlm's tensors, float32, as they are stored."""
    from safetensors.torch import load_file

    return {name: each.float() for name, each in load_file(find_folder(EMBEDDED_MODEL) / "model.safetensors").items()}


def is_projection(name: str) -> bool:
    """Return whether a tensor is what quantizers round: a layer's matrix, not a norm or the embedding."""
    return ".layers." in name and weights()[name].dim() == 2


@cache
def _home() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="teachllm-lesson-11-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def rounded(bits: int, group_size: int, quantize: Quantize = own) -> str:
    """Write a copy of teachlm whose projections were quantized and dequantized, with any number of bits.

    Args:
        group_size: the number of inputs that share a scale; `ROW`: all inputs of an output; `WHOLE`: the whole weight.

    Returns:
        The copy's folder.
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
    """Write a checkpoint of teachlm in quantized values of 8 or 4 bits, as compressed-tensors packs them."""
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
    """Return what the engine says with a model, greedily."""
    with Watch(model, num_gpu_blocks_override=24, max_model_len=192, dtype="float32", **settings) as watch:
        watch.add("A", question, max_tokens)
        return watch.run().text("A")


# -- what it costs ------------------------------------------------------------------------------------------------


def documented() -> dict[str, dict[str, float]]:
    """Return MB and nats that `teachllm quantize --compare` found on the held-out text, from docs/quantization.md."""
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
    """Return how many blocks of 16 tokens fit into so many bytes; and the engine, in bfloat16."""
    watch = Watch(kv_cache_memory_bytes=num_bytes, max_model_len=128, dtype="bfloat16", **settings)
    return watch.trace.header["num_blocks"], watch


def rounded_smollm2() -> tuple[dict[str, Any], str]:
    """Return the committed result of benchmarks/rounding.py for SmolLM2-135M, and where it is from."""
    path, result = committed("-cpu-rounding-smollm2")
    return result, f"{path.name}, commit {result['commit'][:9]}"


def size_on_disk(folder: str | Path) -> int:
    """Bytes of a checkpoint's tensors."""
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def told_bytes(folder: str | Path) -> str:
    """Return the megabytes of a checkpoint by what they are, in words."""
    return ", ".join(f"{what} {size / 1e6:.2f} MB" for what, size in tensor_bytes(folder).items() if size)


def tensor_bytes(folder: str | Path) -> dict[str, int]:
    """Bytes of a checkpoint by what they are."""
    from safetensors.torch import load_file

    found = dict.fromkeys(("embedding", "matrices", "scales", "norms"), 0)
    for name, tensor in load_file(Path(folder) / "model.safetensors").items():
        what = "embedding" if "embed" in name else "scales" if name.endswith("scale") else "matrices"
        found["norms" if "norm" in name or tensor.numel() < 3 else what] += tensor.nbytes
    return found


def nearest_4_bits() -> Path:
    """Return what `teachllm quantize --method rtn` makes of teachlm: 4 bits, a scale for each 128 inputs."""
    from transformers.utils import logging

    from teachllm.quantization.algorithms.quantize import quantize_model

    logging.disable_progress_bar()
    out = Path(tempfile.mkdtemp(dir=_home()))
    quantize_model(EMBEDDED_MODEL, out, Recipe("rtn"))
    return out


# -- the exercise --------------------------------------------------------------------------------------------------

_SLACK = 1.001  # of a step: float32's own rounding


def contract_quantize(piece: Quantize) -> int:
    """Check the quantized values, scales and zeros of `piece`, from one group of four weights up."""
    exact = torch.tensor([[-1.0, 0.0, 1.0, 2.0]])
    back = _tried(piece, exact, 2, 4)
    require(
        torch.allclose(back, exact),
        f"four weights and four quantized values: {_of(exact)} in 2 bits fits exactly (values 0 1 2 3, scale 1, zero "
        f"1), and came back as {_of(back)}",
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
            f"0.0 in {row} came back as {float(back[0, 0]):.4g}: one quantized value has to be exactly 0, since "
            "pruned and padded weights are 0",
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
    """Return the dequantized weight, if the quantized values, scales and zeros have the right form."""
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
    """Raise `Wrong` unless each weight is off by half a step at most, with steps as small as they can be."""
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


MOST_LOST = 0.003  # nats per token, of 4 bits in groups of 32: about twice what the engine's own rounding loses


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
    require(lost < MOST_LOST, f"loses {lost:.4f} nats per token in 4 bits and groups of 32, more than {MOST_LOST}")
    return (
        f"The engine ran teachlm from packed 4-bit weights in groups of 32: the same words as with its own quantized "
        f"weights, and {lost:.5f} nats per token lost."
    )


QUANTIZE = Exercise(
    lesson="11",
    name="quantize",
    contract=contract_quantize,
    live=live_quantize,
    reference=own,
    hints=(
        "A group has a smallest and a largest number, and 2^bits quantized values to lay between them. How far apart "
        "are they then? And 0.0 must be one of them: what does that say of the smallest and the largest?",
        "Reshape to [out, groups, group_size]. `low = amin(2).clamp(max=0)`, `high = amax(2).clamp(min=0)`, the scale "
        "is their distance over 2^bits - 1, and never 0. The zero is the quantized value of 0.0: `-low / scale`, "
        "rounded.",
        "`values = (groups / scales[..., None]).round() + zeros[..., None]`, clamped to 0 ... 2^bits - 1, in the shape "
        "[out, in]; return values, scales, zeros. A group of zeros may have any scale above 0.",
    ),
)


def three_packings() -> None:
    """Write the same quantized values in three formats, and print what the engine answers with each."""
    for method in ("gptq", "awq", "autoround"):
        recipe = Recipe(method, group_size=64, is_symmetric=True)
        made = Made("model.layers")
        for name in filter(is_projection, weights()):
            made.weights[name.removesuffix(".weight")] = recipe.grid.nearest(weights()[name])
        out = Path(tempfile.mkdtemp(dir=_home()))
        write_checkpoint(find_folder(EMBEDDED_MODEL), out, recipe, made)
        try:
            print(f"{method:10} {answer(str(out), max_tokens=20)!r}")
        except ModelError as error:
            print(f"{method:10} is refused: {str(error).rpartition('/')[2].partition(': write ')[0]}")
