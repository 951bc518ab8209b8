"""AutoRound: learn for each weight whether to round it up or down, from what its block puts out.

Round to nearest is the best for a weight by itself, not for the sum of thousands that it is part of. So each weight
gets an offset v in -0.5 to 0.5, and each group two factors a and b in 0 to 1 that narrow its range:

    q = round(w / step + v) + zero           step, zero: of the range from a * min to b * max

and all of a block's are moved together, against the gradient of the squared error of the block's output; a rounding
passes its gradient on as if it were none. Only the sign of a gradient is used: 200 steps of 1/200, which shrink to
nothing, take every offset wherever it may have to go, and no optimizer needs to know how large gradients are.

Source: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch

from teachllm.layers.weights.quantized_weights import GroupedWeight
from teachllm.quantization.algorithms.grid import Grid
from teachllm.quantization.formats.rounding import smallest_scale


@dataclass
class Choices:
    """Describe what is learned of a weight.

    Attributes:
        offsets: [out, in], -0.5 to 0.5.
        low, high: [out, num_groups, 1], 0 to 1.
    """

    offsets: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def none(cls, weight: torch.Tensor, grid: Grid) -> Choices:
        """Return the choices that round to nearest."""
        ones = torch.ones(weight.shape[0], weight.shape[1] // grid.width(weight.shape[1]), 1, device=weight.device)
        return cls(*(x.requires_grad_() for x in (torch.zeros_like(weight), ones, ones.clone())))

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


def rounded(weight: torch.Tensor, choices: Choices, grid: Grid) -> torch.Tensor:
    """Return the weight, [out, in], rounded to the grid, with gradients for the choices."""
    qweight, steps, zeros = _rounded(weight, choices, grid)
    return ((qweight - zeros) * steps).flatten(1)


def quantize_weight(weight: torch.Tensor, choices: Choices, grid: Grid) -> GroupedWeight:
    """Return the same as a quantized weight."""
    with torch.no_grad():
        qweight, steps, zeros = _rounded(weight, choices, grid)
    of_groups = None if grid.is_symmetric else zeros.squeeze(2).to(torch.int32)
    return GroupedWeight(
        qweight.flatten(1).to(torch.uint8), steps.squeeze(2).to(grid.scale_dtype), of_groups, grid.bits
    )


def learn(
    weights: Mapping[str, torch.Tensor],
    grid: Grid,
    loss_of: Callable[[Mapping[str, torch.Tensor]], torch.Tensor],
    num_iters: int = 200,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, GroupedWeight]:
    """Learn the rounding of all of a block's weights.

    Args:
        weights: [out, in] float32 of each layer, by name.
        loss_of: the error of the block's output with other weights than its own, each time for other tokens.
        progress: called after each iteration.
    """
    choices = {name: Choices.none(weight, grid) for name, weight in weights.items()}
    tensors = [tensor for each in choices.values() for tensor in each.tensors()]
    rate, least, best = 1.0 / num_iters, torch.inf, [tensor.detach().clone() for tensor in tensors]
    for iteration in range(num_iters):
        loss = loss_of({name: rounded(weight, choices[name], grid) for name, weight in weights.items()})
        gradients = torch.autograd.grad(loss, tensors)
        if loss.item() < least:
            least, best = loss.item(), [tensor.detach().clone() for tensor in tensors]
        now = rate * (1.0 - iteration / num_iters)
        with torch.no_grad():
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor -= now * gradient.sign()
            for each in choices.values():
                each.offsets.clamp_(-0.5, 0.5)
                each.low.clamp_(0.0, 1.0)
                each.high.clamp_(0.0, 1.0)
        progress()
    with torch.no_grad():
        for tensor, kept in zip(tensors, best, strict=True):
            tensor.copy_(kept)
    return {name: quantize_weight(weight, choices[name], grid) for name, weight in weights.items()}


def _rounded(weight: torch.Tensor, choices: Choices, grid: Grid) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return quantized values [out, num_groups, width], steps and zeros [out, num_groups, 1], all float32."""
    groups = weight.unflatten(1, (-1, grid.width(weight.shape[1])))
    low = groups.amin(dim=2, keepdim=True).clamp_max(0.0) * choices.low
    high = groups.amax(dim=2, keepdim=True).clamp_min(0.0) * choices.high
    span = 2 * torch.maximum(high, -low) if grid.is_symmetric else high - low
    smallest = smallest_scale(grid.scale_dtype)
    steps = _straight(span / grid.most, lambda x: x.clamp_min(smallest).to(grid.scale_dtype).float())
    if grid.is_symmetric:
        zeros = torch.full_like(steps, grid.middle)
    else:
        zeros = _straight(-low / steps, torch.round).clamp(0, grid.most)
    offsets = choices.offsets.unflatten(1, (-1, groups.shape[2]))
    qweight = _straight(groups / steps + offsets, torch.round) + zeros
    return qweight.clamp(0, grid.most), steps, zeros


def _straight(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return function(x), with the gradient of x."""
    return x + (function(x) - x).detach()
