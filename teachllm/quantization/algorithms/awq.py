"""AWQ: inputs that matter get finer steps, by scaling their weights up before rounding.

A step is as wide for a weight that meets activations of 0.1 as for one that meets 10. If input j's weights are
multiplied by s_j > 1, and its activations divided by it, the product is the same, and the error of those weights s_j
times smaller: unless s_j widens the range of its group, which makes all errors larger. So s_j = a_j^r, where a_j is the
mean size of the activations, and the r in 0 to 1 is taken that gives the least error of the output, tr(D H D^T).
Dividing the activations costs nothing: it is done by the weights of the norm, or the layer, that they come from.
At last each group's range is narrowed where that lowers the error (`clipping.py`).

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", MLSys 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from teachllm.quantization.algorithms.grid import Grid

_SMALLEST = 1e-4  # an input that is always 0 is scaled, too


def best_scales(
    weights: Sequence[torch.Tensor],
    hessian: torch.Tensor,
    mean_abs: torch.Tensor,
    grid: Grid,
    spread: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    num_ratios: int = 20,
) -> torch.Tensor:
    """Return what to multiply the weights of each input with, and to divide the input by.

    Args:
        weights: [out, in] of the layers that share the inputs.
        hessian: [in, in], mean of x^T x.
        mean_abs: [num_scales], mean of |x|.
        spread: [num_scales] -> [in], where several inputs must have one scale.
        num_ratios: powers to try.

    Returns:
        [num_scales] float32.
    """
    best, least = torch.ones_like(mean_abs), torch.inf
    for step in range(num_ratios):
        scales = mean_abs.clamp_min(_SMALLEST) ** (step / num_ratios)
        scales = scales / (scales.amax() * scales.amin()).sqrt()
        of_inputs = spread(scales)
        error = 0.0
        for weight in weights:
            rounded = grid.nearest(weight * of_inputs).dequantize(torch.float32) / of_inputs
            difference = rounded - weight
            error += float(((difference @ hessian) * difference).sum())
        if error < least:
            best, least = scales, error
    return best
