"""K and V as codes of one byte: a cache of half the size, of which decode attention reads half as much.

    code    x / scale, rounded to what a byte can say: e4m3 (three bits of mantissa, up to 448) or an integer up to 127
    number  code * scale

A scale belongs to one KV head's K, or to its V, in one layer. So no number need be made again: a dot product is taken
with codes, and its scale is the scores'; a weighted sum of V's codes is multiplied once at its end. A token's codes are
made when it is written, and attention reads nothing else, the step's own tokens included: else a prompt cut in another
place would see other numbers.

Codes multiply in float16 where the model is in 16 bits, since it holds every e4m3 number and every such integer
exactly, and their sums are float32. Products of e4m3 itself would be faster, but a Hopper's tensor cores keep some 14
bits of such sums: over a long context the small terms are lost.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; for the sums, DeepSeek-AI, "DeepSeek-V3 Technical
Report", 2024, 3.3.2.
"""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

import torch

from teachllm_kernels._triton import tl, triton

KVScales: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # of K and of V, [num_kv_heads] float32

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def encode_reference(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes of K or V: clamped, and rounded to the nearest, between two to the even one.

    Args:
        x: [num_tokens, num_kv_heads, head_size], as the model's dtype has rounded it.
        scale: [num_kv_heads] float32.
        dtype: float8_e4m3fn or int8.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = (x.to(wide) / scale.to(wide).unsqueeze(-1)).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (steps if dtype.is_floating_point else steps.round()).to(dtype)


def decode_reference(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers, [..., num_kv_heads, head_size]."""
    return codes.to(dtype) * scale.to(dtype).unsqueeze(-1)


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """A cache of codes in a dtype that PyTorch can index and copy on any device; any other as it is."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def for_kernel(cache: torch.Tensor) -> torch.Tensor:
    """A cache as kernels take it: e4m3 as bytes where the GPU knows no such type, and no cast can read it."""
    return cache if has_fp8(cache.device) else as_bytes(cache)


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether instructions convert e4m3 there: Ada and Hopper, and newer ones. No in the interpreter."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def encode(x, scale, CODE_DTYPE: tl.constexpr):
    """As `encode_reference`, bit by bit the same on every device, inside of a kernel.

    Args:
        x: as the model's dtype has rounded it; of a NaN some code is made, and not the same by everyone.
        scale: float32, of each.
        code_dtype: the cache's element type: int8, float8e4nv, or uint8 in its place.
    """
    steps = tl.div_rn(x.to(tl.float32), scale)
    if tl.int8 == CODE_DTYPE:
        clamped = tl.minimum(tl.maximum(steps, -127.0), 127.0)
        return (clamped + 12582912.0 - 12582912.0).to(tl.int8)  # 1.5 * 2^23: what is left of a fraction is rounded
    size = tl.minimum(tl.abs(steps), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # To three bits of mantissa, which may carry into the exponent; its bias is 7 in place of 127.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 steps are all of 2^-9, as those of float32 are from 2^14 on.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = (code | ((steps.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    return code if tl.uint8 == CODE_DTYPE else code.to(CODE_DTYPE, bitcast=True)


@triton.jit
def numbers(codes, OPERAND: tl.constexpr):
    """Codes as they are multiplied, in float16 or float32; without their scale."""
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.uint16)
        halves = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # an exponent whose bias is 15 in place of 7
        return (halves.to(tl.float16, bitcast=True) * 256.0).to(OPERAND)
    return codes.to(OPERAND)


@triton.jit
def multiplicand(x, OPERAND: tl.constexpr):
    """q as codes are multiplied with it. From bfloat16 exact within float16's range, at whose end it stops."""
    if tl.float16 == OPERAND:
        return tl.minimum(tl.maximum(x.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return x.to(OPERAND)
