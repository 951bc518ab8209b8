"""Decode attention on Hopper over a quantized cache: what replaces `_attend` of `hopper_decode.py`.

Quantized values take half of the bytes, so a tile has twice the keys, and multiplying, weighting and waiting take as
long as before. All of a tile is in registers before it is weighted: its place in shared memory is free again by then.

A tile's sums are added to the earlier ones outside of the tensor cores, in float32.

Sources: those of `hopper_kv_dequantize.py` and `hopper_decode.py`.
"""

from __future__ import annotations

from teachllm_kernels._triton import gdc_wait, gl, gluon, hopper
from teachllm_kernels.attention.hopper_kv_dequantize import (
    channel_of,
    in_order_of_keys,
    key_operand,
    multiplicand,
    quantize_kv,
    value_operand,
)
from teachllm_kernels.attention.hopper_new_token import query_and_key

TILE = 128  # keys


@gluon.jit
def attend_quantized(
    buffers, task, new, scales, scale_log2,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr, HAS_NORM: gl.constexpr,
    PRODUCT: gl.constexpr, LOADED: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Like `hopper_decode._attend`, for quantized values, without V's scale; `channel_of` orders the sums' rows."""
    k, v, arrived, free = buffers
    kv_head, first, begin, end, holds_new = task
    qkv_ptr, _, _, _, _, k_slot_ptr, v_slot_ptr = new
    TILE: gl.constexpr = k.shape[1]
    D: gl.constexpr = k.shape[2]
    X_DTYPE: gl.constexpr = qkv_ptr.dtype.element_ty
    QUERIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, D], gl.float16)
    queries = gl.allocate_shared_memory(gl.float16, [HEADS, D], QUERIES)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, TILE], gl.float16)
    weights = gl.allocate_shared_memory(gl.float16, [HEADS, TILE], WEIGHTS)
    new_score = gl.allocate_shared_memory(gl.float32, [HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_scale, v_scale = gl.load(scales[0] + kv_head), gl.load(scales[1] + kv_head)
    score_scale = scale_log2 * k_scale
    gdc_wait()
    column = gl.arange(0, D, gl.SliceLayout(0, LOADED))
    channel = channel_of(gl.arange(0, D, gl.SliceLayout(1, PRODUCT)), D)
    new_v_ptr = qkv_ptr + (NUM_KV_HEADS * (GROUP + 1) + kv_head) * D
    value = quantize_kv(gl.load(new_v_ptr + channel), v_scale, v.dtype)
    value = gl.where(holds_new, value.to(gl.float32), 0.0)
    query, new_k = query_and_key(new, kv_head, NUM_KV_HEADS, GROUP, HEADS, D, HAS_NORM, LOADED)
    query, new_k = multiplicand(query.to(X_DTYPE)), quantize_kv(new_k.to(X_DTYPE), k_scale, k.dtype)
    queries.store(in_order_of_keys(query))
    hopper.fence_async_shared()
    new_score.store(gl.sum(query.to(gl.float32) * new_k.to(gl.float32)[None, :], axis=1))
    if holds_new:
        gl.store(k_slot_ptr + column, new_k)
        gl.store(v_slot_ptr + column, quantize_kv(gl.load(new_v_ptr + column), v_scale, v.dtype))
    key = gl.arange(0, TILE, gl.SliceLayout(1, PRODUCT))
    nothing = gl.zeros([TILE, HEADS], gl.float32, PRODUCT)
    no_sums = gl.zeros([D, HEADS], gl.float32, PRODUCT)
    highest = gl.where(holds_new, new_score.load(gl.SliceLayout(0, PRODUCT)) * score_scale, float("-inf"))
    total = gl.where((key == 0) & holds_new, 1.0, 0.0)[:, None] + nothing  # each thread's part; added up after the loop
    acc = value[:, None] + no_sums
    for tile in range(gl.cdiv(end - first, TILE)):
        stage = tile % STAGES
        start = first + tile * TILE
        hopper.mbarrier.wait(arrived.index(stage), tile // STAGES & 1)
        keys = key_operand(k.index(stage), KEYS, PRODUCT)
        score = hopper.warpgroup_mma(keys, queries.permute((1, 0)), nothing, use_acc=False, is_async=True)
        score = hopper.warpgroup_mma_wait(0, [score])
        values = value_operand(v.index(stage), end - start, VALUES, PRODUCT)
        hopper.mbarrier.arrive(free.index(stage))
        seen = (start + key >= begin) & (start + key < end)
        score = gl.where(seen[:, None], score * score_scale, float("-inf"))
        higher = gl.maximum(highest, gl.max(score, axis=0))  # finite: the new token or one of the tile is seen
        weight = gl.exp2(score - higher[None, :])
        shrink = gl.exp2(highest - higher)[None, :]
        total = total * shrink + weight
        highest = higher
        weights.permute((1, 0)).store(weight.to(gl.float16))
        hopper.fence_async_shared()
        sums = hopper.warpgroup_mma(values, weights.permute((1, 0)), no_sums, use_acc=False, is_async=True)
        acc = acc * shrink + hopper.warpgroup_mma_wait(0, [sums])
    return acc, gl.sum(total, axis=0), highest
