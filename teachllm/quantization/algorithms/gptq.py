"""GPTQ (lesson 11): round one input's weights, and let the inputs not yet rounded make up for the error.

What must not change is the output y = x W^T, not W. For inputs with H = mean of x^T x the error is tr(D H D^T), where D
is what rounding changed. Once column i is rounded, by e, the best that the columns behind it can do against that is

    W[:, j] -= e * U[i, j] / U[i, i]     for j > i;  U upper triangular, U^T U = H^-1

U holds all that is needed of H^-1 with the columns before i removed, for every i at once: that is the paper's use of
the Cholesky factor. Columns are rounded in blocks, and what a block owes to those behind it is paid in one product.

H may be singular (an input that is always 0, fewer tokens than inputs): a little of its mean is added to the diagonal.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from teachllm.layers.weights.quantized_weights import GroupedWeight
from teachllm.quantization.algorithms.grid import Grid

_MOST_DAMPING = 1.0


def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    grid: Grid,
    desc_act: bool = False,
    damping: float = 0.01,
    block_size: int = 128,
) -> GroupedWeight:
    """Quantize a weight, given what it is multiplied with.

    Args:
        weight: [out, in].
        hessian: [in, in], mean of x^T x over tokens; any positive factor does.
        desc_act: round the inputs with the largest activations first, when there is most left to make up for them.
            Groups are of inputs in that order, so that each input has a `group_index`.
        damping: part of the diagonal's mean that is added to it.
        block_size: columns between two products; changes nothing but the time.

    Raises:
        ValueError: the Hessian cannot be made positive definite: it holds infinities or NaN.
    """
    num_in = weight.shape[1]
    width = grid.width(num_in)
    weight, hessian = weight.float().clone(), hessian.float().clone()
    is_dead = hessian.diagonal() == 0  # always multiplied with 0
    weight[:, is_dead] = 0.0
    order = hessian.diagonal().argsort(descending=True) if desc_act else torch.arange(num_in, device=weight.device)
    weight, hessian = weight[:, order], hessian[order][:, order]
    factor = inverse_factor(hessian, damping)

    qweight = torch.empty_like(weight, dtype=torch.uint8)
    scales: list[torch.Tensor] = []  # of each group, [out, 1]
    zeros: list[torch.Tensor] = []
    for start, end in blocks_of_columns(num_in, width, block_size):
        block, own = weight[:, start:end], factor[start:end, start:end]  # a view: what is written there stays
        errors = torch.empty_like(block)
        for i in range(end - start):
            if (start + i) % width == 0:  # the range of a group is known when those before it are rounded
                group = grid.nearest(weight[:, start + i : start + i + width])
                scales.append(group.scales)
                zeros.append(group.with_zeros())
            step, zero = scales[-1].float(), zeros[-1]
            column = block[:, i : i + 1]
            quantized = ((column / step).round() + zero).clamp(0, grid.most)
            qweight[:, start + i : start + i + 1] = quantized
            errors[:, i : i + 1] = (column - (quantized - zero) * step) / own[i, i]
            block[:, i + 1 :] -= errors[:, i : i + 1] * own[i, i + 1 :]
        weight[:, end:] -= errors @ factor[start:end, end:]

    as_given = torch.empty_like(qweight)
    as_given[:, order] = qweight
    group_index = None
    if desc_act:
        group_index = torch.empty(num_in, dtype=torch.int32, device=weight.device)
        group_index[order] = torch.arange(num_in, dtype=torch.int32, device=weight.device) // width
    all_zeros = torch.cat(zeros, dim=1)
    has_zeros = bool((all_zeros != grid.middle).any())
    return GroupedWeight(as_given, torch.cat(scales, dim=1), all_zeros if has_zeros else None, grid.bits, group_index)


def blocks_of_columns(num_in: int, width: int, block_size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of columns: some whole groups; or a part of one, which may be a whole row."""
    whole = width * max(1, block_size // width)
    for group in range(0, num_in, whole):
        last = min(group + whole, num_in)
        for start in range(group, last, block_size):
            yield start, min(start + block_size, last)


def inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the upper triangular U with U^T U = (H + damping)^-1, damped more where that is not enough.

    Raises:
        ValueError: nothing is enough.
    """
    hessian = hessian.double()
    diagonal = hessian.diagonal()
    mean = diagonal.mean().clamp_min(torch.finfo(torch.float32).tiny)
    while damping <= _MOST_DAMPING:
        lower, failed = torch.linalg.cholesky_ex(hessian + torch.diag_embed((damping * mean).expand(len(hessian))))
        if not failed and bool(lower.isfinite().all()):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper.float()
        damping = max(10 * damping, 1e-4)
    raise ValueError("what calibration found of its inputs is not finite: the model's activations overflow")
