"""Everything between the QKV projection and attention in one pass: q/k norm, rotary embedding and the KV cache write.

Done apart, these are five trips to memory for a few kilobytes per token. Here one program takes a few heads of one
token through all of them in registers: q goes back to where it was, k there and into the cache, v into the cache. A
quantized cache (`kv_quantization.py`) gets quantized k and v.

Sources: those of `rms_norm.py`, `rotary.py` and `kv_write.py`, whose references this is checked against.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton
from teachllm_kernels.attention.kv_quantization import KVScales, for_kernel, quantize_kv
from teachllm_kernels.attention.kv_write import kv_write_reference
from teachllm_kernels.attention.rotary import normed_and_turned, rotary_reference
from teachllm_kernels.rms_norm import rms_norm_reference

_HEADS = 8  # heads of one token per program


def rope_kv_write_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    qk_weight: torch.Tensor | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """The definition. It works in place.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_size], contiguous: the result of the merged projection.
            q and k are normed and rotated in place.
        cos, signed_sin: [num_tokens, 1, head_size], see `rotary_reference`.
        qk_weight: [num_heads + num_kv_heads, head_size], the norm's weight for each head of q and k; None: no norm.
        eps: of that norm.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_size]; k and v are written to their slots.
        slot_mapping: [num_tokens] int64; -1 means that the token is not written (padding).
        scales: scales of K and V, if the cache is quantized.
    """
    num_kv_heads = k_cache.shape[2]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    qk, v = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    normed = qk if qk_weight is None else rms_norm_reference(qk, None, qk_weight, eps)[0]
    qk.copy_(rotary_reference(normed, cos, signed_sin))
    kv_write_reference(qk[:, num_heads:], v, k_cache, v_cache, slot_mapping, scales)


@triton.jit
def _rope_kv_write(
    qkv_ptr, cos_ptr, signed_sin_ptr, qk_weight_ptr,
    k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_scale_ptr, v_scale_ptr,
    eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, HALF_PADDED)
    is_turned = head < NUM_HEADS + NUM_KV_HEADS
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (lane < HALF)[None, :]
    weight_a, weight_b = 0.0, 0.0
    if HAS_NORM:
        weight_ptrs = qk_weight_ptr + head[:, None] * 2 * HALF + lane[None, :]
        normed = is_turned[:, None] & inside
        weight_a = tl.load(weight_ptrs, mask=normed, other=0.0).to(tl.float32)
        weight_b = tl.load(weight_ptrs + HALF, mask=normed, other=0.0).to(tl.float32)
    slot = tl.load(slot_mapping_ptr + token)
    pair_cos = tl.load(cos_ptr + token * 2 * HALF + lane, mask=lane < HALF, other=0.0).to(tl.float32)[None, :]
    is_lane = lane < HALF
    sin_ptrs = signed_sin_ptr + token * 2 * HALF + HALF + lane
    pair_sin = tl.load(sin_ptrs, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    if PDL:
        gdc_wait()

    # A head's two halves, which the rotation pairs: channel i with channel i + HALF.
    head_ptrs = qkv_ptr + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head)[:, None] * 2 * HALF + lane[None, :]
    a = tl.load(head_ptrs, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(head_ptrs + HALF, mask=inside, other=0.0).to(tl.float32)
    turned_a, turned_b = normed_and_turned(a, b, weight_a, weight_b, pair_cos, pair_sin, eps, HALF, HAS_NORM)
    a = tl.where(is_turned[:, None], turned_a, a)
    b = tl.where(is_turned[:, None], turned_b, b)

    dtype = qkv_ptr.dtype.element_ty
    tl.store(head_ptrs, a.to(dtype), mask=inside & is_turned[:, None])
    tl.store(head_ptrs + HALF, b.to(dtype), mask=inside & is_turned[:, None])
    is_k = (head >= NUM_HEADS) & is_turned
    kv_head = tl.where(is_k, head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS)
    to = (slot * NUM_KV_HEADS + kv_head)[:, None] * 2 * HALF + lane[None, :]
    written = inside & (slot >= 0)
    kept_a, kept_b = a.to(dtype), b.to(dtype)
    if k_scale_ptr is not None:
        is_v = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
        of_k = tl.load(k_scale_ptr + kv_head, mask=is_k, other=1.0)
        scale = tl.where(is_v, tl.load(v_scale_ptr + kv_head, mask=is_v, other=1.0), of_k)[:, None]
        kept_a = quantize_kv(kept_a, scale, k_cache_ptr.dtype.element_ty)
        kept_b = quantize_kv(kept_b, scale, k_cache_ptr.dtype.element_ty)
    tl.store(k_cache_ptr + to, kept_a, mask=written & is_k[:, None])
    tl.store(k_cache_ptr + to + HALF, kept_b, mask=written & is_k[:, None])
    tl.store(v_cache_ptr + to, kept_a, mask=written & ~is_turned[:, None])
    tl.store(v_cache_ptr + to + HALF, kept_b, mask=written & ~is_turned[:, None])


def rope_kv_write_triton(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    qk_weight: torch.Tensor | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """Compute `rope_kv_write_reference` in float32 throughout."""
    num_tokens, num_all_heads, head_size = qkv.shape
    num_kv_heads, half = k_cache.shape[2], head_size // 2
    k_scale, v_scale = scales or (None, None)
    _rope_kv_write[(num_tokens, triton.cdiv(num_all_heads, _HEADS))](
        qkv_ptr=qkv,
        cos_ptr=cos,
        signed_sin_ptr=signed_sin,
        qk_weight_ptr=qk_weight,
        k_cache_ptr=for_kernel(k_cache),
        v_cache_ptr=for_kernel(v_cache),
        slot_mapping_ptr=slot_mapping,
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        eps=eps,
        NUM_HEADS=num_all_heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        HALF_PADDED=triton.next_power_of_2(half),
        HEADS=_HEADS,
        HAS_NORM=qk_weight is not None,
        num_warps=2,
        **launch_options(qkv.device),
    )


def cost(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype_bytes: int = 2,
    kv_bytes: int | None = None,
) -> tuple[int, int]:
    """Return (bytes, FLOPs) that any implementation must spend: q, k and v in and out once, the slots in.

    This includes for cos and sin what `rotary.cost` counts: one of their two halves, which hold the same angles.

    Args:
        kv_bytes: bytes per element of the cache; None: as outside.
    """
    per_token = (2 * num_heads + 2 * num_kv_heads + 1) * dtype_bytes
    per_token += 2 * num_kv_heads * (dtype_bytes if kv_bytes is None else kv_bytes)
    flops = num_tokens * (num_heads + num_kv_heads) * head_size * 7
    return num_tokens * (per_token * head_size + 8), flops
