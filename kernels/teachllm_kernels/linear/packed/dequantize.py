"""Dequantize a packed weight, for a matrix product of a library.

A product of many rows is bound by arithmetic, so reading fewer bytes no longer helps: the weight is dequantized once,
to memory, and multiplied like any other. Memory-bound: half a byte is read for every two that are written.

The definition is `dequantize_reference`. The kernel matches it bit for bit: integers are exact in x's dtype, and their
products with the scales are rounded once.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton
from teachllm_kernels.linear.packed.packed_dequantize import (
    conversion,
    dequantize_unscaled,
    of_steps,
    pairs_of_zeros,
    scale_step,
    scaled,
)
from teachllm_kernels.linear.packed.packed_weight import PackedWeight, dequantize_reference

__all__ = ["cost", "dequantize_reference", "dequantize_triton"]

_BLOCKS, _TILE_K = 4, 256  # blocks of 16 outputs, and inputs, per program


@triton.jit
def _dequantize(
    qweight_ptr, scales_ptr, zeros_ptr, out_ptr,
    magic, num_out, num_blocks,
    NUM_IN: tl.constexpr, BLOCKS: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,
    BITS: tl.constexpr, IS_E2M1: tl.constexpr, HAS_ZEROS: tl.constexpr, IN_TURNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    KB: tl.constexpr = TILE_K * BITS // 256
    STEPS: tl.constexpr = 16 // BITS
    NUM_K: tl.constexpr = (NUM_IN + 63) // 64 * BITS // 4
    NUM_GROUPS: tl.constexpr = (NUM_IN + GROUP - 1) // GROUP
    first, start = tl.program_id(1) * BLOCKS, tl.program_id(0) * TILE_K
    magic = tl.max(tl.zeros([32], tl.int32) + magic, axis=0)  # otherwise the argument would be read again at every use
    part = tl.arange(0, KB * BLOCKS)
    block, k_block = tl.minimum(first + part % BLOCKS, num_blocks - 1), start // (256 // BITS) + part // BLOCKS
    word_ptrs = qweight_ptr + (block.to(tl.int64) * NUM_K + tl.minimum(k_block, NUM_K - 1))[:, None] * 128
    words = tl.load(word_ptrs + tl.arange(0, 128)[None, :], eviction_policy="evict_first")
    part = tl.arange(0, TILE_K // STEP * BLOCKS)
    group = tl.minimum(start + part // BLOCKS * STEP, NUM_IN - 1) // GROUP
    block, thread = tl.minimum(first + part % BLOCKS, num_blocks - 1), tl.arange(0, 32)
    pair = (block * NUM_GROUPS + group)[:, None] * 8 + thread[None, :] // 4
    scale = tl.load(scales_ptr + pair[:, :, None] * 2 + tl.arange(0, 2)[None, None, :])
    zero = 0
    if HAS_ZEROS:
        zero = of_steps(tl.load(zeros_ptr + pair)[:, :, None], KB, BLOCKS, STEPS, 1)
        zero = tl.reshape(zero, [KB * BLOCKS, 8, 4, STEPS])
    w = dequantize_unscaled(words, zero, magic, out_ptr.dtype.element_ty, BITS, IS_E2M1, HAS_ZEROS)
    w = scaled(w, of_steps(scale, KB, BLOCKS, STEPS, 2))
    w = tl.reshape(w, [KB, BLOCKS, 8, 4, STEPS, 2, 2, 2])  # k block, block, g, q, step, i, j, h
    w = tl.reshape(tl.permute(w, [1, 5, 2, 0, 4, 6, 3, 7]), [BLOCKS * 16, TILE_K])
    n, k = tl.arange(0, BLOCKS * 16), start + tl.arange(0, TILE_K)
    if IN_TURNS:
        row = first * 8 + n // 16 * 8 + n % 8
        is_row = row < num_out // 2
        row += n // 8 % 2 * (num_out // 2)
    else:
        row = first * 16 + n
        is_row = row < num_out
    if PDL:
        gdc_wait()
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * NUM_IN + k[None, :]
    tl.store(out_ptrs, w, mask=is_row[:, None] & (k < NUM_IN)[None, :])


def dequantize_triton(weight: PackedWeight, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """Dequantize like `dequantize_reference`, bit for bit. Return [num_out, num_in].

    Args:
        dtype: bfloat16, float16 or float32.
        out: the tensor to write to; contiguous, [num_out, num_in] of that dtype.
    """
    if out is None:
        out = torch.empty((weight.num_out, weight.num_in), dtype=dtype, device=weight.qweight.device)
    assert out.shape == (weight.num_out, weight.num_in) and out.dtype == dtype and out.is_contiguous()
    num_blocks, zeros = weight.qweight.shape[0], pairs_of_zeros(weight)
    _dequantize[(triton.cdiv(weight.num_in, _TILE_K), triton.cdiv(num_blocks, _BLOCKS))](
        qweight_ptr=weight.qweight,
        scales_ptr=weight.scales,
        zeros_ptr=zeros,
        out_ptr=out,
        magic=conversion(dtype, weight),
        num_out=weight.num_out,
        num_blocks=num_blocks,
        NUM_IN=weight.num_in,
        BLOCKS=_BLOCKS,
        TILE_K=_TILE_K,
        GROUP=weight.group_size if weight.scales.shape[1] > 1 else 1 << 30,
        STEP=scale_step(weight),
        BITS=weight.bits,
        IS_E2M1=weight.is_e2m1,
        HAS_ZEROS=zeros is not None,
        IN_TURNS=weight.is_gated,
        num_warps=_BLOCKS,
        **launch_options(out.device),
    )
    return out


def cost(weight: PackedWeight, dtype_bytes: int = 2) -> tuple[int, int]:
    """Return (bytes, FLOPs) that any implementation must spend: quantized weights and scales in, floats out."""
    size = weight.num_out * weight.num_in
    return weight.num_bytes + size * dtype_bytes, 2 * size
