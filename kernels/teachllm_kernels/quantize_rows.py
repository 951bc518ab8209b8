"""Quantize activations to 8 bits, so that tensor cores multiply 8-bit operands, twice as fast as 16-bit ones.

A weight is quantized once; x is quantized where it is made, for every token anew:

    dynamic   a row's largest value gets the largest quantized value. No token depends on what runs beside it
    static    one scale for all rows, calibrated beforehand
    grouped   a scale for every 128 values of a row, for weights that have one per block of 128 x 128

A value is multiplied by 1 / scale, which is rounded once per row: a division takes a GPU ten instructions. Every kernel
that quantizes on its way does it with `scale_of` and `quantize_with_scale`, and so matches `quantize_rows_reference`
bit for bit. Memory-bound: its speed is bytes over bandwidth, see `cost`. After a norm or SiLU,
`rms_norm_quantized_triton` and `silu_and_mul_quantized_triton` avoid writing the row and reading it again.

Sources: Dettmers et al., "LLM.int8()", 2022; Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton

__all__ = [
    "GROUP",
    "KEPT",
    "QuantizedRows",
    "clamped",
    "cost",
    "empty_rows",
    "quantize_rows",
    "quantize_rows_reference",
    "quantize_rows_triton",
    "quantize_with_scale",
    "scale_of",
    "store_row",
]

GROUP = 128  # consecutive values that share a scale, if not the whole row does
_LEAST = 1e-10  # a floor for the largest value: the scale of an all-zero row must have an inverse, too
KEPT = 256  # at most this many rows fit in the L2 cache beside everything else kept there, see `rms_norm.py`
# What the largest value of a row is quantized to. For integers this is half a step more than the largest one, so
# that the steps from -128 to 127 are centred on 0, as in compressed-tensors.
_MOST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.5}
_TO_INTEGER = 1.5 * 2**23  # a float32 added to this is rounded to an integer, ties to even, in the lowest bits
_GROUP = tl.constexpr(GROUP)
_KERNEL_LEAST = tl.constexpr(_LEAST)
_KERNEL_TO_INTEGER = tl.constexpr(_TO_INTEGER)


class QuantizedRows(NamedTuple):
    """Quantized rows and their scales: x = value * scale.

    Attributes:
        values: [num_rows, size] int8 or float8_e4m3fn, contiguous.
        scales: float32: [num_rows, 1], or grouped, [num_rows, num_groups] stored column by column.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """Return (num_rows, size)."""
        return self.values.shape

    def dequantize(self) -> torch.Tensor:
        """Return [num_rows, size] float32."""
        size = self.values.shape[1]
        width = size if self.scales.shape[1] == 1 else GROUP
        return self.values.to(torch.float32) * self.scales.repeat_interleave(width, dim=1)[:, :size]


def empty_rows(shape: tuple[int, int], dtype: torch.dtype, grouped: bool, device: torch.device) -> QuantizedRows:
    """Allocate room for [num_rows, size]."""
    num_rows, size = shape
    num_scales = -(-size // GROUP) if grouped else 1
    scales = torch.empty((num_scales, num_rows), dtype=torch.float32, device=device)
    return QuantizedRows(torch.empty(shape, dtype=dtype, device=device), scales.t())


def quantize_rows_reference(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None, grouped: bool = False
) -> QuantizedRows:
    """The definition, in float32: scale = max(|x|) / 448, value = round(x * (1 / scale)).

    For integers, scale = max(|x|) / 127.5 and value = clamp(round(x / scale)), since the last bit of the largest
    one, at 127.5, decides how it is rounded.

    Args:
        x: [num_rows, size], any float dtype.
        dtype: dtype of the result, float8_e4m3fn or int8. Values are rounded to the nearest, ties to even.
        scale: [1] float32, for all values; None: each row has its own.
        grouped: one scale for every `GROUP` values of a row instead; the last group may be shorter.
    """
    assert scale is None or not grouped
    (num_rows, size), most = x.shape, _MOST[dtype]
    wide, width = x.to(torch.float32), GROUP if grouped else size
    by_scale = F.pad(wide, (0, -size % width)).unflatten(1, (-1, width)).abs()
    # Divide by a tensor: on a GPU, PyTorch divides by a Python number by multiplying with its inverse.
    scales = by_scale.amax(-1).clamp(min=_LEAST) / torch.full((), most, device=x.device)
    if scale is not None:
        scales = scale.to(torch.float32).expand(num_rows, 1)
    if dtype == torch.int8:
        values = (wide / scales.repeat_interleave(width, dim=1)[:, :size]).round().clamp(-128, 127)
    else:
        values = (wide * scales.reciprocal().repeat_interleave(width, dim=1)[:, :size]).clamp(-most, most)
    return QuantizedRows(values.to(dtype), scales.t().contiguous().t())


@triton.jit
def scale_of(largest, DTYPE: tl.constexpr):
    """Return the scale, float32, of values whose largest magnitude is `largest`."""
    MOST: tl.constexpr = 127.5 if DTYPE.is_int() else 448.0
    return tl.div_rn(tl.maximum(largest, _KERNEL_LEAST), MOST)


@triton.jit
def clamped(x, scale, DTYPE: tl.constexpr):
    """Clamp values that are far beyond the range of a given scale."""
    MOST: tl.constexpr = 128.0 if DTYPE.is_int() else 448.0
    edge = scale * (MOST * 1.002)  # rounds to the largest quantized value
    return tl.clamp(x, -edge, edge, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quantize_with_scale(x, scale, DTYPE: tl.constexpr):
    """Quantize values, float32, that are within range. `scale` is shaped like x, or one for all."""
    if DTYPE.is_int():
        sums = tl.div_rn(x, scale + tl.zeros_like(x)) + _KERNEL_TO_INTEGER
        sums = tl.minimum(sums, _KERNEL_TO_INTEGER + 127.0)  # half a step beyond would round to 128
        values = sums.to(tl.int32, bitcast=True).to(tl.int8)
    else:
        values = (x * tl.div_rn(1.0, scale)).to(DTYPE)
    return values


@triton.jit
def store_row(
    x,
    values_ptr, scales_ptr, given_scale_ptr,
    row, num_rows, size,
    BLOCK: tl.constexpr, GROUPED: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """Quantize a row, [BLOCK] float32 with zeros after its end, into what `empty_rows` has allocated."""
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    value_ptrs = values_ptr + row.to(tl.int64) * size + column
    if GROUPED:
        group = tl.arange(0, BLOCK // _GROUP)
        by_group = tl.reshape(x, [BLOCK // _GROUP, _GROUP])
        scale = scale_of(tl.max(tl.abs(by_group), axis=1), DTYPE)
        q = tl.reshape(quantize_with_scale(by_group, scale[:, None], DTYPE), [BLOCK])
        tl.store(scales_ptr + group * num_rows + row, scale, mask=group * _GROUP < size)
    else:
        if given_scale_ptr is not None:
            scale = tl.load(given_scale_ptr)
            x = clamped(x, scale, DTYPE)
        else:
            scale = scale_of(tl.max(tl.abs(x)), DTYPE)
        q = quantize_with_scale(x, scale, DTYPE)
        tl.store(scales_ptr + row, scale)
    tl.store(value_ptrs, q, mask=column < size, eviction_policy=EVICTION)


@triton.jit(do_not_specialize=["num_rows"])  # it differs from batch to batch
def _quantize_rows(
    x_ptr, values_ptr, scales_ptr, given_scale_ptr,
    num_rows, size,
    BLOCK: tl.constexpr, GROUPED: tl.constexpr, EVICTION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row.to(tl.int64) * size + column, mask=column < size, other=0.0).to(tl.float32)
    store_row(x, values_ptr, scales_ptr, given_scale_ptr, row, num_rows, size, BLOCK, GROUPED, EVICTION)


def quantize_rows_triton(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None, grouped: bool = False
) -> QuantizedRows:
    """Compute `quantize_rows_reference` for contiguous x. One program per row."""
    assert scale is None or not grouped
    num_rows, size = x.shape
    quantized = empty_rows((num_rows, size), dtype, grouped, x.device)
    block = triton.next_power_of_2(max(size, GROUP))
    _quantize_rows[(num_rows,)](
        x_ptr=x,
        values_ptr=quantized.values,
        scales_ptr=quantized.scales,
        given_scale_ptr=scale,
        num_rows=num_rows,
        size=size,
        BLOCK=block,
        GROUPED=grouped,
        EVICTION="evict_last" if num_rows <= KEPT else "",
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(x.device),
    )
    return quantized


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None, grouped: bool = False
) -> QuantizedRows:
    """Compute `quantize_rows_reference` for contiguous x, the fastest way on the device."""
    return (quantize_rows_reference if x.is_cpu else quantize_rows_triton)(x, dtype, scale, grouped)


def cost(num_rows: int, size: int, dtype_bytes: int = 2) -> tuple[int, int]:
    """Return (bytes, FLOPs) that any implementation must spend: floats in, quantized values out."""
    return num_rows * size * (dtype_bytes + 1), 3 * num_rows * size
