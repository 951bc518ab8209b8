"""Products of many 8-bit rows by the library: what `torch._scaled_mm` and `torch._int_mm` support, and how.

    e4m3, row and output scales    cuBLAS supports them since CUDA 12.9, on Hopper; elsewhere CUTLASS does
    e4m3, group and block scales   cuBLAS as well, on Hopper only; the rows' scales lie column by column, and columns
                                   begin at multiples of 16 bytes, so rows of zeros pad them to a multiple of 4
    int8                           sums are int32, [num_rows, out]: a kernel of our own reads them and does the rest

The weight is passed transposed, as it lies in memory: the inputs of both operands are contiguous. On Hopper
`hopper_scaled_mm.py` does the same without an intermediate result.

Source: cuBLAS documentation, "Narrow Precision Data Types Usage".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton
from teachllm_kernels.linear.scaled.scaled_reference import cost, scale_kind
from teachllm_kernels.quantize_rows import GROUP, QuantizedRows
from teachllm_kernels.silu_and_mul import silu_and_mul

__all__ = ["cost", "library_multiplies", "scaled_mm"]

_BLOCK = 1024


def library_multiplies(capability: tuple[int, int], num_in: int, num_out: int, is_e4m3: bool, has_blocks: bool) -> bool:
    """Return whether a GPU's library multiplies such a weight by many rows.

    With few rows it has no algorithm for some shapes: integers take 17 rows or more, e4m3 256.

    Args:
        capability: the card's compute capability.
        is_e4m3: the weight is e4m3; otherwise int8.
        has_blocks: it has scales of blocks.
    """
    if num_in % 16 or num_out % 16:
        return False
    if not is_e4m3:
        return not has_blocks
    if has_blocks:  # columns of the weight's scales begin at multiples of 16 bytes, too
        return capability[0] == 9 and -(-num_in // GROUP) % 4 == 0
    return capability >= (8, 9)


def scaled_mm(
    x: QuantizedRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = True,
) -> torch.Tensor:
    """Compute `scaled_linear_reference`, where `library_multiplies`; a CPU multiplies integers without blocks.

    If gated, the product is rounded before it is gated, except for integers.

    Args:
        fast: the tensor cores accumulate products of e4m3, in about 14 bits; otherwise, and always with blocks, partial
            sums are added up in float32.
    """
    if weight.dtype == torch.int8:
        return _scaled(torch._int_mm(x.values, weight.t()), x.scales, scales, bias, gated, dtype)
    if scales.numel() == 1:
        scales = scales.expand(weight.shape[0], 1).contiguous()
    num_rows = x.values.shape[0]
    if scale_kind(weight, scales) == "block":
        fast, x = False, _with_rows_of_zeros(x, -num_rows % 4)
    y = torch._scaled_mm(
        x.values,
        weight.t(),
        scale_a=x.scales,
        scale_b=scales.t(),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=fast,
    )[:num_rows]
    return silu_and_mul(y) if gated else y


def _with_rows_of_zeros(x: QuantizedRows, count: int) -> QuantizedRows:
    """Return x with `count` rows of zeros appended; a copy, if there are any."""
    if count == 0:
        return x
    values = F.pad(x.values.view(torch.uint8), (0, 0, 0, count)).view(x.values.dtype)
    return QuantizedRows(values, F.pad(x.scales.t(), (0, count)).t())


@triton.jit
def _scale_sums(
    sums_ptr, x_scales_ptr, scales_ptr, bias_ptr, out_ptr,
    num_out,
    BLOCK: tl.constexpr, BY_OUTPUT: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_out
    of_row = tl.load(x_scales_ptr + row)
    y = tl.zeros([BLOCK], tl.float32)
    for half in tl.static_range(2 if GATED else 1):
        gate = y
        at = half * num_out + column
        width = num_out * (2 if GATED else 1)
        y = tl.load(sums_ptr + row * width + at, mask=inside, other=0).to(tl.float32) * of_row
        y = y * (tl.load(scales_ptr + at, mask=inside, other=0.0) if BY_OUTPUT else tl.load(scales_ptr))
        if HAS_BIAS:
            y += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if half == 1:
            y = gate * tl.sigmoid(gate) * y
    tl.store(out_ptr + row * num_out + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def _scaled(
    sums: torch.Tensor,
    x_scales: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Turn int32 sums, [num_rows, rows of the weight], into the result. One program per row and 1024 columns."""
    num_rows, num_out = sums.shape[0], sums.shape[1] // (2 if gated else 1)
    out = torch.empty((num_rows, num_out), dtype=dtype, device=sums.device)
    _scale_sums[(num_rows, triton.cdiv(num_out, _BLOCK))](
        sums_ptr=sums,
        x_scales_ptr=x_scales,
        scales_ptr=scales,
        bias_ptr=bias,
        out_ptr=out,
        num_out=num_out,
        BLOCK=_BLOCK,
        BY_OUTPUT=scales.numel() > 1,
        GATED=gated,
        HAS_BIAS=bias is not None,
        **launch_options(sums.device),
    )
    return out
