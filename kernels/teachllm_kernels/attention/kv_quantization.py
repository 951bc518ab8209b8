"""A quantized KV cache: K and V in one byte per value, half the size, so decode attention reads half as much.

    quantized   x / scale, rounded to what a byte can hold: e4m3 (three bits of mantissa, up to 448) or an integer up
                to 127
    value       quantized * scale

Each KV head's K, and its V, has one scale per layer. So nothing has to be dequantized first: dot products are taken
with quantized values and K's scale multiplies the scores; V's scale multiplies the weighted sum once, at its end. A
token's K and V are quantized when they are written, and attention reads nothing else, not even for this step's own
tokens: otherwise a prompt that is cut in another place would see other values.

Quantized values are multiplied in float16 if the model has 16 bits, since float16 holds every e4m3 value and every such
integer exactly, and their sums are float32. Products in e4m3 itself would be faster, but Hopper's tensor cores keep
only about 14 bits of such sums: over a long context the small terms are lost.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; for the sums, DeepSeek-AI, "DeepSeek-V3 Technical
Report", 2024, 3.3.2.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from teachllm_kernels._triton import tl, triton
from teachllm_kernels.dry_run import compute_capability, per_device

KVScales: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # of K and of V, [num_kv_heads] float32

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def quantize_kv_reference(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantize K or V: clamp, and round to the nearest, ties to even.

    Args:
        x: [num_tokens, num_kv_heads, head_size], as rounded by the model's dtype.
        scale: [num_kv_heads] float32.
        dtype: float8_e4m3fn or int8.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = (x.to(wide) / scale.to(wide).unsqueeze(-1)).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (steps if dtype.is_floating_point else steps.round()).to(dtype)


def dequantize_kv_reference(
    quantized: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Dequantize. Return [..., num_kv_heads, head_size]."""
    return quantized.to(dtype) * scale.to(dtype).unsqueeze(-1)


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """Return a quantized cache in a dtype that PyTorch can index and copy everywhere; any other cache as it is."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def for_kernel(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache as kernels take it: e4m3 as bytes if the GPU has no such type and no cast can read it."""
    return cache if has_fp8(cache.device) else as_bytes(cache)


@per_device
def has_fp8(device: torch.device) -> bool:
    """Return whether the device converts e4m3 in hardware: Ada, Hopper and newer. The interpreter does not."""
    return compute_capability(device) >= (8, 9)


@triton.jit
def quantize_kv(x, scale, CACHE_DTYPE: tl.constexpr):
    """Quantize like `quantize_kv_reference` inside a kernel; the bits are the same on every device.

    Args:
        x: as rounded by the model's dtype; the result for NaN is unspecified and differs between devices.
        scale: float32, one per value.
        CACHE_DTYPE: the cache's element type: int8, float8e4nv, or uint8 instead.
    """
    steps = tl.div_rn(x.to(tl.float32), scale)
    if tl.int8 == CACHE_DTYPE:
        clamped = tl.minimum(tl.maximum(steps, -127.0), 127.0)
        return (clamped + 12582912.0 - 12582912.0).to(tl.int8)  # 1.5 * 2^23: the sum rounds off the fraction
    size = tl.minimum(tl.abs(steps), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # Round to three bits of mantissa, which may carry into the exponent; its bias is 7 instead of 127.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 all steps are 2^-9, as float32's are from 2^14 on.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    quantized = tl.where(size < 0.015625, small, normal)
    quantized = (quantized | ((steps.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    return quantized if tl.uint8 == CACHE_DTYPE else quantized.to(CACHE_DTYPE, bitcast=True)


@triton.jit
def dequantize_unscaled(quantized, OPERAND: tl.constexpr):
    """Convert quantized values to float16 or float32, in which they are multiplied; the scale is not applied."""
    if quantized.dtype == tl.uint8:
        bits = quantized.to(tl.uint16)
        halves = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # the exponent's bias becomes 15 instead of 7
        return (halves.to(tl.float16, bitcast=True) * 256.0).to(OPERAND)
    return quantized.to(OPERAND)


@triton.jit
def multiplicand(x, OPERAND: tl.constexpr):
    """Convert q to the products' dtype: exact from bfloat16 within float16's range, clamped outside of it."""
    if tl.float16 == OPERAND:
        return tl.minimum(tl.maximum(x.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return x.to(OPERAND)
