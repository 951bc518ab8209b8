"""Clipping: the largest weight of a group need not be kept.

A narrower range has finer steps for all others. So for each group of each output some ranges are tried, and that is
taken which has the least error of its part of the output,

    (w' - w) H (w' - w)^T        H = mean of x^T x, of the group's inputs

Source: the clipping search of Lin et al., "AWQ: Activation-aware Weight Quantization", MLSys 2024.
"""

from __future__ import annotations

import torch

from teachllm.layers.weights.quantized_weights import GroupedWeight
from teachllm.quantization.algorithms.grid import Grid

NUM_RANGES = 20  # to try
NARROWEST = 0.5  # of the whole range


def clipped(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid) -> GroupedWeight:
    """Round to nearest in the range of least error.

    Args:
        weight: [out, in].
        hessian: [in, in], mean of x^T x over tokens.
    """
    width = grid.width(weight.shape[1])
    groups = weight.unflatten(1, (-1, width))  # [out, num_groups, width]
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    least_error = torch.full_like(low, torch.inf)
    best_ratio = torch.ones_like(low)
    for ratio in torch.linspace(1.0, NARROWEST, NUM_RANGES).tolist():
        quantized = grid.nearest(groups.clamp(ratio * low, ratio * high).flatten(1))
        error = _error(quantized.dequantize(torch.float32) - weight, hessian, width)
        is_better = error < least_error
        least_error = torch.where(is_better, error, least_error)
        best_ratio = torch.where(is_better, ratio, best_ratio)
    return grid.nearest(groups.clamp(best_ratio * low, best_ratio * high).flatten(1))


def _error(difference: torch.Tensor, hessian: torch.Tensor, width: int) -> torch.Tensor:
    """Map [out, in] to [out, num_groups, 1]."""
    groups = difference.unflatten(1, (-1, width))
    of_groups = hessian.unflatten(0, (-1, width)).unflatten(2, (-1, width))  # [num_groups, width, num_groups, width]
    own = of_groups.diagonal(dim1=0, dim2=2).movedim(-1, 0)  # [num_groups, width, width]
    return torch.einsum("ogi,gij,ogj->og", groups, own, groups).unsqueeze(2)
