"""Decode attention on Hopper: the fused form of `paged_decode.py`, with fewer instructions per byte.

In the portable kernel every warp loads keys and values, turns block numbers into addresses, multiplies 16 rows of which
only a few are query heads, and waits in between. A program alone reads slowly, and a card at its power limit pays for
every instruction. This kernel differs in four ways:

    roles        one warp only starts copies (TMA: 16 tokens of one block each, so block sizes are multiples of 16), as
                 many tiles ahead as shared memory holds; four warps multiply and compute the softmax
    early start  keys and values of earlier steps are fetched while the previous kernel still runs
    new token    its q, k and v come from that kernel. They are normed and rotated here, written to the cache, and start
                 the softmax's sums. The tiles hold older tokens only
    operands     a product takes 64 rows on its left, but as few as 8 columns on its right. So the transposed products
                 are computed: scores [64 keys, 8 heads] = K Q^T, sums [128 channels, 8 heads] += V^T P^T. K and V are
                 used as they lie in shared memory. With 4 heads, half of the 8 columns count; of 64 rows 1 in 16 would

With a quantized cache, four of the warps run `hopper_decode_quantized.py` instead. The plan is `decode_plan.py`'s; the
gain of each step is in benchmarks/NOTES.md. The definition is `rope_kv_write_reference`, then
`paged_attention_reference`.

Sources: those of `paged_decode.py` and `hopper_linear.py`; Shah et al., "FlashAttention-3", 2024.
"""

from __future__ import annotations

import torch

from teachllm_kernels._hopper import PIECE, barriers, fetch, pieces, tile_map
from teachllm_kernels._triton import barrier, gdc_launch_dependents, gdc_wait, gl, gluon, hopper, triton
from teachllm_kernels.attention import paged_attention, rope_kv_write
from teachllm_kernels.attention.decode_plan import (
    BEGIN,
    END,
    FIELDS,
    FIRST_ITEM,
    HOPPER_SHAPE,
    LOG2_E,
    NUM_SPLITS,
    ROW,
    SEQ,
    SEQ_LEN,
    TOKEN,
    DecodePlan,
    max_splits,
)
from teachllm_kernels.attention.hopper_decode_quantized import TILE as QUANTIZED_TILE
from teachllm_kernels.attention.hopper_decode_quantized import attend_quantized
from teachllm_kernels.attention.hopper_kv_dequantize import channel_of, key_layout, value_layout
from teachllm_kernels.attention.hopper_new_token import query_and_key
from teachllm_kernels.attention.kv_quantization import KVScales

__all__ = ["cost", "hopper_decode", "takes_decode_heads"]


@gluon.jit
def _copy(descs, buffers, task, table_ptr, D: gl.constexpr, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """The copying warp. Earlier steps wrote what it fetches, so it waits for room only."""
    k_desc, v_desc = descs
    k, v, arrived, free = buffers
    kv_head, first, _, end, _ = task
    TILE: gl.constexpr = k.shape[1]
    for tile in range(gl.cdiv(end - first, TILE)):
        stage, key = tile % STAGES, first + tile * TILE
        slots = pieces(k_desc, table_ptr, key, end, TILE, BLOCK_SIZE)
        hopper.mbarrier.wait(free.index(stage), (tile // STAGES - 1) & 1, tile >= STAGES)
        fetch(k_desc, k.index(stage), arrived.index(stage), slots, kv_head * D, key, end)
        fetch(v_desc, v.index(stage), arrived.index(stage), slots, kv_head * D, key, end)


@gluon.jit
def _attend(
    buffers, task, new, scale_log2,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr, HAS_NORM: gl.constexpr,
    PRODUCT: gl.constexpr, LOADED: gl.constexpr,
):  # fmt: skip
    """Four warps: return weighted sums of the values [D, HEADS], sums of weights [HEADS], highest scores [HEADS]."""
    k, v, arrived, free = buffers
    kv_head, first, begin, end, holds_new = task
    qkv_ptr, _, _, _, _, k_slot_ptr, v_slot_ptr = new
    TILE: gl.constexpr = k.shape[1]
    D: gl.constexpr = k.shape[2]
    DTYPE: gl.constexpr = k.dtype
    queries = gl.allocate_shared_memory(DTYPE, [HEADS, D], k.layout)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, TILE], DTYPE)
    weights = gl.allocate_shared_memory(DTYPE, [HEADS, TILE], WEIGHTS)
    new_score = gl.allocate_shared_memory(gl.float32, [HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gdc_wait()
    column = gl.arange(0, D, gl.SliceLayout(0, LOADED))
    channel = gl.arange(0, D, gl.SliceLayout(1, PRODUCT))
    new_v_ptr = qkv_ptr + (NUM_KV_HEADS * (GROUP + 1) + kv_head) * D
    value = gl.where(holds_new, gl.load(new_v_ptr + channel).to(gl.float32), 0.0)
    query, new_k = query_and_key(new, kv_head, NUM_KV_HEADS, GROUP, HEADS, D, HAS_NORM, LOADED)
    query, new_k = query.to(DTYPE), new_k.to(DTYPE)
    queries.store(query)
    hopper.fence_async_shared()
    new_score.store(gl.sum(query.to(gl.float32) * new_k.to(gl.float32)[None, :], axis=1))
    if holds_new:
        gl.store(k_slot_ptr + column, new_k)
        gl.store(v_slot_ptr + column, gl.load(new_v_ptr + column))
    # The sums begin with the new token, which is not among the tiles, and continue with the older ones.
    key = gl.arange(0, TILE, gl.SliceLayout(1, PRODUCT))
    nothing = gl.zeros([TILE, HEADS], gl.float32, PRODUCT)
    highest = gl.where(holds_new, new_score.load(gl.SliceLayout(0, PRODUCT)) * scale_log2, float("-inf"))
    total = gl.where((key == 0) & holds_new, 1.0, 0.0)[:, None] + nothing  # each thread's part; added up after the loop
    acc = hopper.warpgroup_mma_init(value[:, None] + gl.zeros([D, HEADS], gl.float32, PRODUCT))
    for tile in range(gl.cdiv(end - first, TILE)):
        stage = tile % STAGES
        start = first + tile * TILE
        hopper.mbarrier.wait(arrived.index(stage), tile // STAGES & 1)
        score = hopper.warpgroup_mma(k.index(stage), queries.permute((1, 0)), nothing, use_acc=False, is_async=True)
        score, sums = hopper.warpgroup_mma_wait(0, [score, acc])  # this tile's scores, the previous sums
        hopper.mbarrier.arrive(free.index((tile + STAGES - 1) % STAGES), pred=tile > 0)
        seen = (start + key >= begin) & (start + key < end)
        score = gl.where(seen[:, None], score * scale_log2, float("-inf"))
        higher = gl.maximum(highest, gl.max(score, axis=0))  # finite: the new token or one of the tile is seen
        weight = gl.exp2(score - higher[None, :])
        shrink = gl.exp2(highest - higher)[None, :]
        total = total * shrink + weight
        highest = higher
        weights.permute((1, 0)).store(weight.to(DTYPE))
        if start + TILE > end:  # slots after the end may hold NaN, and 0 * NaN is NaN
            mine = v.index(stage)
            inside = start + gl.arange(0, TILE, gl.SliceLayout(1, LOADED)) < end
            mine.store(gl.where(inside[:, None], mine.load(LOADED), 0.0))
        hopper.fence_async_shared()
        sums *= shrink
        acc = hopper.warpgroup_mma(v.index(stage).permute((1, 0)), weights.permute((1, 0)), sums, is_async=True)
    return hopper.warpgroup_mma_wait(0, [acc]), gl.sum(total, axis=0), highest


@gluon.jit
def _merge(
    partial_ptr, lse_ptr, out_ptr,
    first_item, num_splits, kv_head,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, MERGED: gl.constexpr,
):  # fmt: skip
    """Merge the splits of one sequence and KV head by their log-sum-exps, `MERGED` at a time."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([MERGED, 1], [1, 32], [1, 4], [1, 0])  # a thread has a column of all splits
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    for member in gl.static_range(GROUP):
        highest = float("-inf")
        total = 0.0
        acc = gl.zeros([D], gl.float32, gl.SliceLayout(0, LAYOUT))
        for start in range(0, num_splits, MERGED):
            split = start + gl.arange(0, MERGED, gl.SliceLayout(1, LAYOUT))
            row = ((first_item + split) * NUM_KV_HEADS + kv_head) * GROUP + member
            is_split = split < num_splits
            # Past the L1 cache, which may hold older values of these addresses.
            part_lse = gl.load(lse_ptr + row, is_split, float("-inf"), cache_modifier=".cg")
            at = partial_ptr + row[:, None] * D + column[None, :]
            part = gl.load(at, is_split[:, None], 0.0, cache_modifier=".cg")
            higher = gl.maximum(highest, gl.max(part_lse, axis=0))
            weight = gl.exp2(part_lse - higher)
            shrink = gl.exp2(highest - higher)
            acc = acc * shrink + gl.sum(part * weight[:, None], axis=0)
            total = total * shrink + gl.sum(weight, axis=0)
            highest = higher
        gl.store(out_ptr + member * D + column, (acc / total).to(out_ptr.dtype.element_ty))


@gluon.jit
def _hopper_decode(
    qkv_ptr, cos_ptr, signed_sin_ptr, qk_weight_ptr,
    eps,
    k_desc, v_desc, k_cache_ptr, v_cache_ptr, out_ptr, block_tables_ptr, items_ptr, partial_ptr, lse_ptr, finished_ptr,
    k_scale_ptr, v_scale_ptr,
    scale_log2, table_stride,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, MERGED: gl.constexpr, HAS_NORM: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Compute one split of one KV head. The warps are handed these tuples:

    descs    (K, V), tensor descriptors
    buffers  (k, v [STAGES, TILE, D], arrived, free [STAGES]): the copying warp fills a stage, the others free it
    task     (kv_head, first key fetched, first and one past the last key that count, whether the new token is here)
    new      (pointers to the new token's q, k and v, to its cos, its signed_sin, and qk_weight; eps; pointers to its
             slots in K and V)
    """
    gdc_launch_dependents()
    PIECE: gl.constexpr = k_desc.block_shape[0]
    D: gl.constexpr = k_desc.block_shape[1]
    DTYPE: gl.constexpr = k_desc.dtype
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    item, kv_head = gl.program_id(0) // NUM_KV_HEADS, gl.program_id(0) % NUM_KV_HEADS
    # The plan, the tables and earlier steps' K and V are already written, see `paged_decode.py`.
    fields_ptr = items_ptr + item * FIELDS
    seq = gl.load(fields_ptr + SEQ)
    table_ptr = block_tables_ptr + gl.load(fields_ptr + ROW).to(gl.int64) * table_stride
    begin = gl.load(fields_ptr + BEGIN)
    end = gl.load(fields_ptr + END)
    seq_len = gl.load(fields_ptr + SEQ_LEN)
    first_item = gl.load(fields_ptr + FIRST_ITEM)
    num_splits = gl.load(fields_ptr + NUM_SPLITS)
    has_work = begin < end
    token = gl.load(fields_ptr + TOKEN, has_work, 0).to(gl.int64)  # an unused item holds an earlier step's
    holds_new = has_work & (end == seq_len)
    end = gl.where(holds_new, end - 1, end)
    first = gl.where(has_work, begin // PIECE * PIECE, end)
    block = gl.load(table_ptr + (seq_len - 1) // BLOCK_SIZE, holds_new, 0).to(gl.int64)
    slot = ((block * BLOCK_SIZE + (seq_len - 1) % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * D
    qkv_ptr = qkv_ptr + token * (NUM_KV_HEADS * (GROUP + 2) * D)

    k = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, D], k_desc.layout)
    v = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, D], v_desc.layout)
    arrived, free = barriers(STAGES, 2 * (TILE // PIECE)), barriers(STAGES, 1)
    descs, buffers = (k_desc, v_desc), (k, v, arrived, free)
    task = (kv_head, first, begin, end, holds_new)
    new = (
        qkv_ptr,
        cos_ptr + token * D,
        signed_sin_ptr + token * D,
        qk_weight_ptr,
        eps,
        k_cache_ptr + slot,
        v_cache_ptr + slot,
    )
    if k_scale_ptr is None:
        acc, total, highest = gl.warp_specialize([
            (_attend, (buffers, task, new, scale_log2, NUM_KV_HEADS, GROUP, HEADS, STAGES, HAS_NORM, PRODUCT, LOADED)),
            (_copy, (descs, buffers, task, table_ptr, D, STAGES, BLOCK_SIZE)),
        ], [1], [56])  # fmt: skip
    else:
        acc, total, highest = gl.warp_specialize([
            (attend_quantized, (
                buffers, task, new, (k_scale_ptr, v_scale_ptr), scale_log2,
                NUM_KV_HEADS, GROUP, HEADS, STAGES, HAS_NORM, PRODUCT, LOADED, KEYS, VALUES,
            )),
            (_copy, (descs, buffers, task, table_ptr, D, STAGES, BLOCK_SIZE)),
        ], [1], [56])  # fmt: skip
    for i in gl.static_range(STAGES):
        hopper.mbarrier.invalidate(arrived.index(i))
        hopper.mbarrier.invalidate(free.index(i))

    channel = gl.arange(0, D, gl.SliceLayout(1, PRODUCT))
    member = gl.arange(0, HEADS, gl.SliceLayout(0, PRODUCT))
    is_mine = (member < GROUP) & has_work
    normalised = acc / total[None, :]
    if k_scale_ptr is not None:
        channel = channel_of(channel, D)
        normalised *= gl.load(v_scale_ptr + kv_head)
    at = member[None, :] * D + channel[:, None]
    out_ptr = out_ptr + (token * NUM_KV_HEADS + kv_head) * GROUP * D
    if num_splits == 1:
        y = normalised.to(out_ptr.dtype.element_ty)
        gl.store(out_ptr + at, y, is_mine[None, :], eviction_policy="evict_last")  # see `rms_norm.py`
    elif has_work:
        part = (item * NUM_KV_HEADS + kv_head) * GROUP
        gl.store(partial_ptr + (part * D + at), normalised, is_mine[None, :])
        gl.store(lse_ptr + part + member, highest + gl.log2(total), is_mine)
        barrier()  # every thread's part is written before the arrival is counted
        counter_ptr = finished_ptr + seq * NUM_KV_HEADS + kv_head
        if gl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_splits - 1:
            gl.store(counter_ptr, 0)
            _merge(partial_ptr, lse_ptr, out_ptr, first_item, num_splits, kv_head, NUM_KV_HEADS, GROUP, D, MERGED)


def hopper_decode(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    qk_weight: torch.Tensor | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Compute `fused_paged_decode` without a soft cap, on a Hopper, for heads of 16 bits that
    `takes_decode_heads` accepts; a window is in the plan.

    Args:
        scales: scales of K and V, if the cache is quantized.
    """
    num_blocks, block_size, num_kv_heads, head_size = k_cache.shape
    tile = HOPPER_SHAPE.tile if scales is None else QUANTIZED_TILE
    num_seqs, group = qkv.shape[0], qkv.shape[1] // num_kv_heads - 2
    out = qkv.new_empty((num_seqs, num_kv_heads * group, head_size))
    assert plan.filled_for == (num_seqs, HOPPER_SHAPE)
    num_slots = num_blocks * block_size
    k_scale, v_scale = scales or (None, None)
    _hopper_decode[(max_splits(num_seqs, num_kv_heads, HOPPER_SHAPE) * num_kv_heads,)](
        qkv_ptr=qkv,
        cos_ptr=cos,
        signed_sin_ptr=signed_sin,
        qk_weight_ptr=qkv if qk_weight is None else qk_weight,
        eps=eps,
        k_desc=tile_map(k_cache.view(num_slots, -1), [PIECE, head_size]),
        v_desc=tile_map(v_cache.view(num_slots, -1), [PIECE, head_size]),
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        out_ptr=out,
        block_tables_ptr=block_tables,
        items_ptr=plan.items,
        partial_ptr=plan.partial,
        lse_ptr=plan.lse,
        finished_ptr=plan.finished,
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        scale_log2=scale * LOG2_E,
        table_stride=block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEADS=max(8, triton.next_power_of_2(group)),
        BLOCK_SIZE=block_size,
        TILE=tile,
        STAGES=HOPPER_SHAPE.stages,
        MERGED=16,
        HAS_NORM=qk_weight is not None,
        KEYS=None if scales is None else key_layout(tile, head_size),
        VALUES=None if scales is None else value_layout(tile, head_size),
        num_warps=HOPPER_SHAPE.num_warps,
        maxnreg=HOPPER_SHAPE.maxnreg,
        launch_pdl=True,
    )
    return out


def takes_decode_heads(head_size: int, group: int, block_size: int) -> bool:
    """Return whether `hopper_decode` supports such heads, of 16 bits, and blocks.

    Args:
        group: query heads per KV head.
        block_size: tokens per KV block.
    """
    return head_size in (64, 128) and group <= 16 and block_size % PIECE == 0


def cost(
    kv_lens: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype_bytes: int = 2,
    kv_bytes: int | None = None,
) -> tuple[int, int]:
    """Return (bytes, FLOPs) that any implementation must spend on one token per sequence, without a window.

    This counts attention's own cost, the new tokens' K and V to the cache, and for cos and sin what `rotary.cost`
    counts.

    Args:
        kv_bytes: bytes per element of the cache; None: as in q.
    """
    num_seqs, kept = len(kv_lens), dtype_bytes if kv_bytes is None else kv_bytes
    num_bytes, flops = paged_attention.cost(
        query_lens=[1] * num_seqs,
        kv_lens=kv_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype_bytes=dtype_bytes,
        kv_bytes=kept,
    )
    num_bytes += num_seqs * (2 * num_kv_heads * kept + dtype_bytes) * head_size
    return num_bytes, flops + rope_kv_write.cost(num_seqs, num_heads, num_kv_heads, head_size)[1]
