"""Each method quantizes a block: it turns the block's linear layers and hidden states into quantized weights.

| method | looks at | then |
|---|---|---|
| int8, fp8, rtn | nothing; int8 with SmoothQuant: how large inputs are | rounds to nearest |
| gptq | the inputs of each layer, after the layers before it are quantized | rounds column by column |
| awq | the inputs of each layer | scales inputs, clips, rounds to nearest |
| autoround | the output of the block | learns the rounding of all layers together, by gradients |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from teachllm.errors import ModelError
from teachllm.layers.weights.quantized_weights import GroupedWeight, Quantized
from teachllm.quantization.algorithms import autoround, folding
from teachllm.quantization.algorithms.awq import best_scales
from teachllm.quantization.algorithms.blocks import DecoderBlock
from teachllm.quantization.algorithms.calibrate import InputStatistics
from teachllm.quantization.algorithms.clipping import clipped
from teachllm.quantization.algorithms.folding import LayerGroup
from teachllm.quantization.algorithms.gptq import gptq
from teachllm.quantization.algorithms.recipe import EIGHT_BIT, Recipe
from teachllm.quantization.algorithms.smoothquant import smoothing_scales
from teachllm.quantization.formats import rounding

QuantizedWeights = dict[str, Quantized]
OVERFLOW = (
    "{}: activations of the calibration text overflow: give another text (--calibration), or use --method int8, fp8 or "
    "rtn, which need none"
)
_ROWS_AT_ONCE = 8  # per iteration of autoround


@dataclass(frozen=True)
class Task:
    """Describes one block to quantize.

    Attributes:
        block: the block; its parameters are float32.
        stored_dtypes: the dtypes of the block's parameters in the file, by name.
        groups: the block's linear layers, grouped by the inputs that they share, in the order in which they run. A
            method that scales inputs needs the groups' sources, too.
        hidden: [num_rows, seq_len, hidden_size], the output of the blocks before this one, which are quantized already.
        wanted: [num_rows, seq_len, hidden_size], the output of this block if nothing were quantized; for autoround
            only.
        done: a callback; its argument is the fraction of the block, 0 to 1, that was done since the last call.
    """

    recipe: Recipe
    block: DecoderBlock
    stored_dtypes: Mapping[str, torch.dtype]
    done: Callable[[float], None]
    groups: Sequence[LayerGroup] = ()
    hidden: torch.Tensor | None = None
    wanted: torch.Tensor | None = None

    def weight(self, name: str) -> torch.Tensor:
        """Return the weight of a linear layer, [out, in] float32."""
        return self.block.linears()[name].weight

    def statistics(self, group: LayerGroup) -> InputStatistics:
        """Return the statistics of the inputs that a group's layers share.

        Raises:
            ModelError: the statistics are not finite.
        """
        assert self.hidden is not None
        found = InputStatistics.of(self.block, group.names[0], self.hidden)
        if not bool(found.hessian.isfinite().all()):
            raise ModelError(OVERFLOW.format(f"{self.block.name}.{group.names[0]}"))
        return found

    def fold(self, group: LayerGroup, of_source: torch.Tensor) -> torch.Tensor:
        """Divide a group's inputs by the scales of its source and return the divisors; see `folding.fold`."""
        return folding.fold(self.block, group, of_source, self.stored_dtypes[f"{group.source}.weight"])


def nearest(task: Task) -> QuantizedWeights:
    """Round each weight to the nearest quantized value. compressed-tensors has scales in the model's dtype."""
    method, quantized = task.recipe.method, QuantizedWeights()
    names = task.block.linears()
    for name in names:
        weight, scale_dtype = task.weight(name), task.stored_dtypes[f"{name}.weight"]
        if method in EIGHT_BIT:
            quantized[name] = rounding.scaled(weight, EIGHT_BIT[method], scale_dtype=scale_dtype)
        else:
            quantized[name] = replace(task.recipe.grid, scale_dtype=scale_dtype).nearest(weight)
        task.done(1 / len(names))
    return quantized


def with_smoothquant(task: Task) -> QuantizedWeights:
    """Move outliers from activations to weights, where a norm can divide the activations; then round to nearest."""
    linears = task.block.linears()
    for group in task.groups:
        if group.source is not None and group.source not in linears:
            weights = [task.weight(name) for name in group.names]
            task.fold(group, smoothing_scales(weights, task.statistics(group).max_abs))
    return nearest(task)


def with_gptq(task: Task) -> QuantizedWeights:
    """Quantize one layer after the other with GPTQ: each layer sees the errors of the layers before it."""
    quantized = QuantizedWeights()
    for group in task.groups:
        weights = [task.weight(name) for name in group.names]
        # Outputs do not depend on each other, so layers that share their inputs are rounded as one layer.
        together = gptq(torch.cat(weights), task.statistics(group).hessian, task.recipe.grid, task.recipe.desc_act)
        found = dict(zip(group.names, _split(together, [len(weight) for weight in weights]), strict=True))
        install(task.block, found)
        quantized |= found
        task.done(len(group.names) / len(task.block.linears()))
    return quantized


def with_awq(task: Task) -> QuantizedWeights:
    """Scale all groups with AWQ, then quantize: scales of one group may change the weights of another, its source."""
    grid = task.recipe.grid
    hessians: dict[str, torch.Tensor] = {}
    for group in task.groups:
        statistics = task.statistics(group)
        if group.source is not None:
            statistics = statistics.divided_by(task.fold(group, _awq_scales(task, group, statistics)))
        hessians |= dict.fromkeys(group.names, statistics.hessian)
    quantized = QuantizedWeights()
    for name, hessian in hessians.items():
        quantized[name] = clipped(task.weight(name), hessian, grid)
        task.done(1 / len(hessians))
    return quantized


def with_autoround(task: Task) -> QuantizedWeights:
    """Learn the rounding of all of the block's layers together, from some rows of the text at a time."""
    hidden, wanted, num_iters = task.hidden, task.wanted, task.recipe.num_iters
    assert hidden is not None and wanted is not None
    generator = torch.Generator().manual_seed(0)

    def loss_of(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rows = torch.randperm(len(hidden), generator=generator)[:_ROWS_AT_ONCE].to(hidden.device)
        return F.mse_loss(task.block(hidden[rows], weights), wanted[rows])

    weights = {name: layer.weight for name, layer in task.block.linears().items()}
    return dict(autoround.learn(weights, task.recipe.grid, loss_of, num_iters, lambda: task.done(1 / num_iters)))


def method_of(recipe: Recipe) -> Callable[[Task], QuantizedWeights]:
    """Return the function that quantizes a block as a recipe says."""
    if recipe.smoothquant:
        return with_smoothquant
    return {"gptq": with_gptq, "awq": with_awq, "autoround": with_autoround}.get(recipe.method, nearest)


def _awq_scales(task: Task, group: LayerGroup, statistics: InputStatistics) -> torch.Tensor:
    """Return a scale for each output of a group's source."""
    size, num_in = folding.source_size(task.block, group), len(statistics.mean_abs)
    return best_scales(
        [task.weight(name) for name in group.names],
        statistics.hessian,
        group.tied(statistics.mean_abs, size),
        task.recipe.grid,
        lambda of_source: group.spread(of_source, num_in),
    )


@torch.no_grad()
def install(block: DecoderBlock, quantized: Mapping[str, Quantized]) -> None:
    """Replace the weights of a block's linear layers by the dequantized ones."""
    linears = block.linears()
    for name, each in quantized.items():
        linears[name].weight.copy_(each.dequantize(torch.float32))


def _split(quantized: GroupedWeight, sizes: Sequence[int]) -> list[GroupedWeight]:
    """Split a weight into weights of `sizes` outputs each."""
    zeros = [None] * len(sizes) if quantized.zeros is None else quantized.zeros.split(list(sizes))
    parts = zip(quantized.qweight.split(list(sizes)), quantized.scales.split(list(sizes)), zeros, strict=True)
    return [GroupedWeight(*part, quantized.bits, quantized.group_index) for part in parts]
