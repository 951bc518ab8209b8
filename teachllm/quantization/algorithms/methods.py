"""What each method does with a block: from its linear layers, and what goes through it, to their codes.

| method | looks at | then |
|---|---|---|
| int8, fp8, rtn | nothing; int8 with SmoothQuant: how large inputs are | the nearest code |
| gptq | the inputs of each layer, behind the layers that are rounded already | column by column |
| awq | the inputs of each layer | scales inputs, clips, the nearest code |
| autoround | what the block puts out | all layers together, by gradients |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from teachllm.models.registry import ModelError
from teachllm.quantization import rounding
from teachllm.quantization.algorithms import autoround, folding
from teachllm.quantization.algorithms.awq import best_scales
from teachllm.quantization.algorithms.blocks import DecoderBlock
from teachllm.quantization.algorithms.calibrate import InputStatistics
from teachllm.quantization.algorithms.clipping import clipped
from teachllm.quantization.algorithms.folding import LayerGroup
from teachllm.quantization.algorithms.gptq import gptq
from teachllm.quantization.algorithms.recipe import EIGHT_BIT, Recipe
from teachllm.quantization.algorithms.smoothquant import smoothing_scales
from teachllm.quantization.quantized_weights import GroupedCodes, Quantized

Codes = dict[str, Quantized]
OVERFLOW = (
    "{}: activations of the calibration text overflow: give another text (--calibration), or use --method int8, fp8 or "
    "rtn, which need none"
)
_ROWS_AT_ONCE = 8  # of an iteration of autoround


@dataclass(frozen=True)
class Task:
    """A block to quantize.

    Attributes:
        block: its parameters are float32.
        stored_dtypes: what its parameters are in the file, by name.
        groups: its linear layers, by the inputs that they share, in the order in which they run. Sources are found for
            methods that scale inputs.
        hidden: [num_rows, seq_len, hidden_size], what the blocks before put out, quantized as they are.
        wanted: the same size: what the block would put out if nothing were quantized. For autoround only.
        done: called with the part of the block, 0 to 1, that is done since the last call.
    """

    recipe: Recipe
    block: DecoderBlock
    stored_dtypes: Mapping[str, torch.dtype]
    done: Callable[[float], None]
    groups: Sequence[LayerGroup] = ()
    hidden: torch.Tensor | None = None
    wanted: torch.Tensor | None = None

    def weight(self, name: str) -> torch.Tensor:
        """[out, in] float32 of a linear layer."""
        return self.block.linears()[name].weight

    def statistics(self, group: LayerGroup) -> InputStatistics:
        """Of the inputs that a group's layers share.

        Raises:
            ModelError: they are not finite.
        """
        assert self.hidden is not None
        found = InputStatistics.of(self.block, group.names[0], self.hidden)
        if not bool(found.hessian.isfinite().all()):
            raise ModelError(OVERFLOW.format(f"{self.block.name}.{group.names[0]}"))
        return found

    def fold(self, group: LayerGroup, of_source: torch.Tensor) -> torch.Tensor:
        """See `folding.fold`."""
        return folding.fold(self.block, group, of_source, self.stored_dtypes[f"{group.source}.weight"])


def nearest(task: Task) -> Codes:
    """Each number's nearest code. compressed-tensors has scales in the model's dtype."""
    method, codes = task.recipe.method, Codes()
    names = task.block.linears()
    for name in names:
        weight, scale_dtype = task.weight(name), task.stored_dtypes[f"{name}.weight"]
        if method in EIGHT_BIT:
            codes[name] = rounding.scaled(weight, EIGHT_BIT[method], scale_dtype=scale_dtype)
        else:
            codes[name] = replace(task.recipe.grid, scale_dtype=scale_dtype).nearest(weight)
        task.done(1 / len(names))
    return codes


def with_smoothquant(task: Task) -> Codes:
    """The nearest codes, once outliers have moved from activations to weights, where a norm can divide them."""
    linears = task.block.linears()
    for group in task.groups:
        if group.source is not None and group.source not in linears:
            weights = [task.weight(name) for name in group.names]
            task.fold(group, smoothing_scales(weights, task.statistics(group).max_abs))
    return nearest(task)


def with_gptq(task: Task) -> Codes:
    """Layers behind one another: each sees the error of those before."""
    codes = Codes()
    for group in task.groups:
        weights = [task.weight(name) for name in group.names]
        # Outputs do not meddle with each other, so layers of one input are rounded as one.
        together = gptq(torch.cat(weights), task.statistics(group).hessian, task.recipe.grid, task.recipe.desc_act)
        found = dict(zip(group.names, _split(together, [len(weight) for weight in weights]), strict=True))
        install(task.block, found)
        codes |= found
        task.done(len(group.names) / len(task.block.linears()))
    return codes


def with_awq(task: Task) -> Codes:
    """Scales first, then codes: scales of one group may change the weights of another, its source."""
    grid = task.recipe.grid
    hessians: dict[str, torch.Tensor] = {}
    for group in task.groups:
        statistics = task.statistics(group)
        if group.source is not None:
            statistics = statistics.divided_by(task.fold(group, _awq_scales(task, group, statistics)))
        hessians |= dict.fromkeys(group.names, statistics.hessian)
    codes = Codes()
    for name, hessian in hessians.items():
        codes[name] = clipped(task.weight(name), hessian, grid)
        task.done(1 / len(hessians))
    return codes


def with_autoround(task: Task) -> Codes:
    """All of the block's layers together, some rows of the text at a time."""
    hidden, wanted, num_iters = task.hidden, task.wanted, task.recipe.num_iters
    assert hidden is not None and wanted is not None
    generator = torch.Generator().manual_seed(0)

    def loss_of(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rows = torch.randperm(len(hidden), generator=generator)[:_ROWS_AT_ONCE].to(hidden.device)
        return F.mse_loss(task.block(hidden[rows], weights), wanted[rows])

    weights = {name: layer.weight for name, layer in task.block.linears().items()}
    return dict(autoround.learn(weights, task.recipe.grid, loss_of, num_iters, lambda: task.done(1 / num_iters)))


def method_of(recipe: Recipe) -> Callable[[Task], Codes]:
    """What a recipe does with a block."""
    if recipe.smoothquant:
        return with_smoothquant
    return {"gptq": with_gptq, "awq": with_awq, "autoround": with_autoround}.get(recipe.method, nearest)


def _awq_scales(task: Task, group: LayerGroup, statistics: InputStatistics) -> torch.Tensor:
    """Of each output of a group's source."""
    size, num_in = folding.source_size(task.block, group), len(statistics.mean_abs)
    return best_scales(
        [task.weight(name) for name in group.names],
        statistics.hessian,
        group.tied(statistics.mean_abs, size),
        task.recipe.grid,
        lambda of_source: group.spread(of_source, num_in),
    )


@torch.no_grad()
def install(block: DecoderBlock, codes: Mapping[str, Quantized]) -> None:
    """Puts numbers of codes in the place of those that they were made of."""
    linears = block.linears()
    for name, each in codes.items():
        linears[name].weight.copy_(each.dequantize(torch.float32))


def _split(codes: GroupedCodes, sizes: Sequence[int]) -> list[GroupedCodes]:
    """Weights that were one below the other."""
    zeros = [None] * len(sizes) if codes.zeros is None else codes.zeros.split(list(sizes))
    parts = zip(codes.codes.split(list(sizes)), codes.scales.split(list(sizes)), zeros, strict=True)
    return [GroupedCodes(*part, codes.bits, codes.group_index) for part in parts]
