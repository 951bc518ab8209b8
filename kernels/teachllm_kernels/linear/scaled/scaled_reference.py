"""The definition of a product of 8-bit operands, against which the kernels are checked.

    y = (q_x q_w^T) * s_x * s_w        q: int8 or e4m3; s_x per row of x, s_w per output, or one for all
    y = the sum of such products over groups of 128 inputs, with s_x per row and group and s_w per block of 128 x 128

Integer products are accumulated in int32, exactly; e4m3 products in float32, where each product is exact. Row and
output scales stay out of the sum, and so cost nothing.

Sources: Xiao et al., "SmoothQuant", ICML 2023 (rows and columns); DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024
(groups and blocks).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from teachllm_kernels.quantize_rows import GROUP, QuantizedRows

__all__ = ["Scales", "cost", "scale_kind", "scaled_linear_reference", "weight_only_reference"]

Scales = Literal["tensor", "output", "block"]


def scale_kind(weight: torch.Tensor, scales: torch.Tensor) -> Scales:
    """Return what the scales [1, 1], [out, 1] or [out / 128, in / 128] (rounded up) of a weight [out, in] belong
    to.
    """
    if scales.numel() == 1:
        return "tensor"
    return "output" if scales.shape == (weight.shape[0], 1) else "block"


def scaled_linear_reference(
    x: QuantizedRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The definition, in float64, in which sums of products of quantized values are exact.

    Args:
        x: [num_rows, in]; its scales are those of groups if the weight's are of blocks, else of rows.
        weight: [out, in], of x's quantized dtype; with `gated` [2 * out, in], gate above up.
        scales: of the weight, see `scale_kind`; float32.
        bias: [rows of weight].
        gated: the result is silu(gate) * up.
        dtype: of the result.

    Returns:
        [num_rows, out].
    """
    if scale_kind(weight, scales) == "block":
        y = F.linear(x.values.double() * _expand_scales(x.scales, x.values, 1), _dequantized(weight, scales))
    else:
        y = F.linear(x.values.double(), weight.double()) * x.scales * scales.t()
    return _finished(y, bias, gated).to(dtype)


def weight_only_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Like `scaled_linear_reference`, for float x, [num_rows, in]: W = weight * scales, rounded to x's dtype."""
    w = _dequantized(weight, scales).float().to(x.dtype)
    return _finished(F.linear(x.double(), w.double()), bias, gated).to(x.dtype)


def _finished(y: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    y = y if bias is None else y + bias
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y


def _dequantized(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return [out, in] float64."""
    for dim in (0, 1):
        scales = _expand_scales(scales, weight, dim)
    return weight.double() * scales


def _expand_scales(scales: torch.Tensor, values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a scale for each value along `dim`, or one for all."""
    size = values.shape[dim]
    return scales if scales.shape[dim] in (1, size) else scales.repeat_interleave(GROUP, dim).narrow(dim, 0, size)


def cost(num_rows: int, num_in: int, num_out: int, dtype_bytes: int = 2, gated: bool = False) -> tuple[int, int]:
    """Return (bytes, FLOPs) that any implementation must spend: operands in, the result (`dtype_bytes`) out."""
    num_weights = num_in * num_out * (2 if gated else 1)
    return num_weights + num_rows * (num_in + num_out * dtype_bytes), 2 * num_rows * num_weights
