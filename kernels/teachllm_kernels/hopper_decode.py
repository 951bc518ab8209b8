"""Decode attention on Hopper: `paged_decode.py`'s fused form, in which one program alone reads as fast as two or three.

There every warp asks for keys and values, turns block numbers into addresses, multiplies, and waits in between, so
that a program reads 11 to 15 GB/s and the card needs 400 of them at a time. Where fewer sequences are left, or a few
long ones, it idles. Here are

    roles         one warp does nothing but start copies, as far ahead as shared memory reaches
    copy engine   16 tokens of a block are one copy (TMA): blocks are multiples of that
    early start   what earlier steps wrote is asked for before the kernel in front has ended. This step's token comes
                  from that kernel, through norm and rotation, and is where the sums begin
    rows          the tensor cores take 64 rows; the query heads of a KV head are the first few, the others nobody's. A
                  row then lies within four neighbouring threads: maximum, sum and weights never leave the registers

The plan is `decode_plan.py`'s.

Sources: those of `paged_decode.py` and `hopper_linear.py`; Shah et al., "FlashAttention-3", 2024.
"""

from __future__ import annotations

import torch

from teachllm_kernels._hopper import has_hopper, tiles
from teachllm_kernels._triton import (
    barrier,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    hopper,
    triton,
)
from teachllm_kernels.decode_plan import HOPPER_SHAPE, DecodePlan, max_splits

__all__ = ["fits_hopper_decode", "hopper_decode"]

_PIECE = 16  # keys of a copy, which lie in one block
_LOG2_E = 1.4426950408889634


@gluon.jit
def _fetch(k_desc, v_desc, k, v, arrived, stage, table, column, key, end, BLOCK_SIZE: gl.constexpr):
    """Starts copying the keys and values from `key` on to a stage, piece by piece."""
    PIECE: gl.constexpr = k_desc.block_shape[0]
    BYTES: gl.constexpr = 2 * PIECE * k_desc.block_shape[1] * k.dtype.primitive_bitwidth // 8
    for piece in gl.static_range(k.shape[1] // PIECE):
        at = key + piece * PIECE
        inside = at < end
        block = gl.load(table + at // BLOCK_SIZE, mask=inside, other=0)
        slot = block * BLOCK_SIZE + at % BLOCK_SIZE
        hopper.mbarrier.expect(arrived.index(stage), BYTES, inside)
        hopper.mbarrier.arrive(arrived.index(stage), pred=at >= end)
        to = k.index(stage).slice(piece * PIECE, PIECE)
        hopper.tma.async_copy_global_to_shared(k_desc, [slot, column], arrived.index(stage), to, inside)
        to = v.index(stage).slice(piece * PIECE, PIECE)
        hopper.tma.async_copy_global_to_shared(v_desc, [slot, column], arrived.index(stage), to, inside)


@gluon.jit
def _copy(
    k_desc, v_desc, k, v, arrived, free, table, column, first, end, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr
):
    """The copying warp. Earlier steps wrote what it asks for: there is nothing to wait for but room."""
    TILE: gl.constexpr = k.shape[1]
    for tile in range(gl.cdiv(end - first, TILE)):
        stage = tile % STAGES
        hopper.mbarrier.wait(free.index(stage), (tile // STAGES - 1) & 1, tile >= STAGES)
        _fetch(k_desc, v_desc, k, v, arrived, stage, table, column, first + tile * TILE, end, BLOCK_SIZE)


@gluon.jit
def _normed_and_turned(heads, weights, other, turn, sideways, is_head, eps, AXIS: gl.constexpr, HAS_NORM: gl.constexpr):
    """Heads through norm and rotation, float32.

    Args:
        heads, weights: addresses of each head's channels, the last axis being `AXIS`.
        other: how far away lies the channel that the rotation pairs with each.
    """
    D: gl.constexpr = heads.shape[AXIS]
    x = gl.load(heads, is_head, 0.0).to(gl.float32)
    y = gl.load(heads + other, is_head, 0.0).to(gl.float32)
    scale = 1.0
    if HAS_NORM:
        scale = gl.rsqrt(gl.sum(x * x, axis=AXIS) / D + eps)
        if AXIS == 1:
            scale = scale[:, None]
        x *= gl.load(weights, is_head, 0.0).to(gl.float32)
        y *= gl.load(weights + other, is_head, 0.0).to(gl.float32)
    return (x * turn + y * sideways) * scale


@gluon.jit
def _attend(
    k, v, queries, fresh, arrived, free, token, k_slot, v_slot, cos, signed_sin, qk_weight, eps,
    first, begin, end, holds_new, kv_head, scale_log2,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, HAS_NORM: gl.constexpr,
    SCORES: gl.constexpr, SUMS: gl.constexpr, LOADED: gl.constexpr,
):  # fmt: skip
    """Four warps: (weighted sum of the values, sum of the weights, highest score) of every row."""
    TILE: gl.constexpr = k.shape[1]
    D: gl.constexpr = k.shape[2]
    NUM_HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    dtype: gl.constexpr = k.dtype
    gdc_wait()
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    column = gl.arange(0, D, gl.SliceLayout(0, LOADED))
    other = (column + D // 2) % D - column
    turn, sideways = gl.load(cos + column).to(gl.float32), gl.load(signed_sin + column).to(gl.float32)
    at = ((kv_head * GROUP + row) * D)[:, None] + column[None, :]
    query = _normed_and_turned(token + at, qk_weight + at, other[None, :], turn[None, :], sideways[None, :],
                               (row < GROUP)[:, None], eps, 1, HAS_NORM).to(dtype)  # fmt: skip
    queries.slice(0, ROWS).store(query)  # what is behind them is nobody's query
    hopper.fence_async_shared()
    at = (NUM_HEADS + kv_head) * D + column
    new_k = _normed_and_turned(token + at, qk_weight + at, other, turn, sideways, column < D, eps, 0, HAS_NORM)
    new_k = new_k.to(dtype)
    new_v = token + (NUM_HEADS + NUM_KV_HEADS + kv_head) * D
    if holds_new:
        gl.store(k_slot + column, new_k)
        gl.store(v_slot + column, gl.load(new_v + column))
    # Sums begin with the new token, which is not among the tiles, and go on with those before it.
    fresh.slice(0, ROWS).store(gl.sum(query.to(gl.float32) * new_k.to(gl.float32)[None, :], axis=1))
    highest = gl.where(holds_new, fresh.load(gl.SliceLayout(1, SCORES)) * scale_log2, float("-inf"))
    total = gl.where(holds_new, 1.0, 0.0) + gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    channel = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    value = gl.load(new_v + channel, holds_new & (channel < D), 0.0).to(gl.float32)
    acc = value[None, :] + gl.zeros([64, D], gl.float32, SUMS)
    nothing = gl.zeros([64, TILE], gl.float32, SCORES)
    for tile in range(gl.cdiv(end - first, TILE)):
        stage = tile % STAGES
        start = first + tile * TILE
        hopper.mbarrier.wait(arrived.index(stage), tile // STAGES & 1)
        score = hopper.warpgroup_mma(queries, k.index(stage).permute((1, 0)), nothing, use_acc=False)
        key = start + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
        score = gl.where(((key >= begin) & (key < end))[None, :], score * scale_log2, float("-inf"))
        higher = gl.maximum(highest, gl.max(score, axis=1))  # finite: the new token or one of the tile is seen
        weight = gl.exp2(score - higher[:, None])
        shrink = gl.exp2(highest - higher)
        total = total * shrink + gl.sum(weight, axis=1)
        highest = higher
        if start + TILE > end:  # nobody wrote what lies behind the end: zero times that may not be zero
            mine = v.index(stage)
            inside = start + gl.arange(0, TILE, gl.SliceLayout(1, LOADED)) < end
            mine.store(gl.where(inside[:, None], mine.load(LOADED), 0.0))
            hopper.fence_async_shared()
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        weight = gl.convert_layout(weight.to(dtype), gl.DotOperandLayout(0, SUMS, 2))
        acc = hopper.warpgroup_mma(weight, v.index(stage), acc)
        hopper.mbarrier.arrive(free.index(stage))
    return acc, total, highest


@gluon.jit
def _merge(
    partial, lse, out, first_item, num_splits, kv_head,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, MERGED: gl.constexpr,
):  # fmt: skip
    """Merges the splits of one sequence and KV head by their log-sum-exps, `MERGED` at a time."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    for member in gl.static_range(GROUP):
        highest = float("-inf")
        total = 0.0
        acc = gl.zeros([D], gl.float32, gl.SliceLayout(0, LAYOUT))
        for start in range(0, num_splits, MERGED):
            split = start + gl.arange(0, MERGED, gl.SliceLayout(1, LAYOUT))
            row = ((first_item + split) * NUM_KV_HEADS + kv_head) * GROUP + member
            is_split = split < num_splits
            # Past the first-level cache, which may hold what these addresses were before.
            part_lse = gl.load(lse + row, is_split, float("-inf"), cache_modifier=".cg")
            at = partial + row[:, None] * D + column[None, :]
            part = gl.load(at, is_split[:, None], 0.0, cache_modifier=".cg")
            higher = gl.maximum(highest, gl.max(part_lse, axis=0))
            weight = gl.exp2(part_lse - higher)
            shrink = gl.exp2(highest - higher)
            acc = acc * shrink + gl.sum(part * weight[:, None], axis=0)
            total = total * shrink + gl.sum(weight, axis=0)
            highest = higher
        gl.store(out + member * D + column, (acc / total).to(out.dtype.element_ty))


@gluon.jit
def _hopper_decode(
    qkv, cos, signed_sin, qk_weight, eps, k_desc, v_desc, k_cache, v_cache, out, block_tables,
    items, partial, lse, finished, scale_log2, table_stride,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, MERGED: gl.constexpr, HAS_NORM: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    PIECE: gl.constexpr = k_desc.block_shape[0]
    D: gl.constexpr = k_desc.block_shape[1]
    dtype: gl.constexpr = k_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    item, kv_head = gl.program_id(0) // NUM_KV_HEADS, gl.program_id(0) % NUM_KV_HEADS
    # The plan, the tables and what earlier steps wrote to the cache are there already, see `paged_decode.py`.
    fields = items + item * 8
    seq = gl.load(fields)
    table = block_tables + gl.load(fields + 1).to(gl.int64) * table_stride
    begin = gl.load(fields + 3)
    end = gl.load(fields + 4)
    seq_len = gl.load(fields + 5)
    first_item = gl.load(fields + 6)
    num_splits = gl.load(fields + 7)
    has_work = begin < end
    token = gl.load(fields + 2, has_work, 0).to(gl.int64)  # of an unused item: an earlier step's
    holds_new = has_work & (end == seq_len)
    end = gl.where(holds_new, end - 1, end)
    first = gl.where(has_work, begin // PIECE * PIECE, end)
    block = gl.load(table + (seq_len - 1) // BLOCK_SIZE, holds_new, 0).to(gl.int64)
    slot = ((block * BLOCK_SIZE + (seq_len - 1) % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * D

    k = gl.allocate_shared_memory(dtype, [STAGES, TILE, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, TILE, D], v_desc.layout)
    queries = gl.allocate_shared_memory(dtype, [64, D], k_desc.layout)
    fresh = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(arrived.index(i), count=TILE // PIECE)
        hopper.mbarrier.init(free.index(i), count=1)
    acc, total, highest = gl.warp_specialize([
        (_attend, (k, v, queries, fresh, arrived, free, qkv + token * (NUM_KV_HEADS * (GROUP + 2) * D), k_cache + slot,
                   v_cache + slot, cos + token * D, signed_sin + token * D, qk_weight, eps, first, begin, end,
                   holds_new, kv_head, scale_log2, NUM_KV_HEADS, GROUP, ROWS, STAGES, HAS_NORM, SCORES, SUMS, LOADED)),
        (_copy, (k_desc, v_desc, k, v, arrived, free, table, kv_head * D, first, end, STAGES, BLOCK_SIZE)),
    ], [1], [56])  # fmt: skip
    for i in gl.static_range(STAGES):
        hopper.mbarrier.invalidate(arrived.index(i))
        hopper.mbarrier.invalidate(free.index(i))

    row = gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    column = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    is_row = (row < GROUP) & has_work
    normalised = acc / gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]
    out_at = out + (token * NUM_KV_HEADS + kv_head) * GROUP * D
    if num_splits == 1:
        at = out_at + row[:, None] * D + column[None, :]
        gl.store(at, normalised.to(out.dtype.element_ty), is_row[:, None])
    elif has_work:
        part_row = (item * NUM_KV_HEADS + kv_head) * GROUP
        gl.store(partial + (part_row + row)[:, None] * D + column[None, :], normalised, is_row[:, None])
        score_row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        gl.store(lse + part_row + score_row, highest + gl.log2(total), score_row < GROUP)
        barrier()  # every thread's part is written before the arrival is counted
        count = gl.atomic_add(finished + seq * NUM_KV_HEADS + kv_head, 1, sem="acq_rel")
        if count == num_splits - 1:
            gl.store(finished + seq * NUM_KV_HEADS + kv_head, 0)
            _merge(partial, lse, out_at, first_item, num_splits, kv_head, NUM_KV_HEADS, GROUP, D, MERGED)


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
) -> torch.Tensor:
    """As `fused_paged_decode`, without a soft cap; a window is the plan's. For what `fits_hopper_decode`."""
    num_blocks, block_size, num_kv_heads, head_size = k_cache.shape
    num_seqs, group = qkv.shape[0], qkv.shape[1] // num_kv_heads - 2
    out = qkv.new_empty((num_seqs, num_kv_heads * group, head_size))
    slots = (tiles(cache.view(num_blocks * block_size, -1), [_PIECE, head_size]) for cache in (k_cache, v_cache))
    _hopper_decode[(max_splits(num_seqs, num_kv_heads, HOPPER_SHAPE) * num_kv_heads,)](
        *(qkv, cos, signed_sin, qkv if qk_weight is None else qk_weight, eps),
        *(*slots, k_cache, v_cache, out, block_tables),
        *(plan.items, plan.partial, plan.lse, plan.arrived, scale * _LOG2_E, block_tables.stride(0)),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=max(8, triton.next_power_of_2(group)),
        BLOCK_SIZE=block_size,
        TILE=HOPPER_SHAPE.tile,
        STAGES=HOPPER_SHAPE.stages,
        MERGED=16,
        HAS_NORM=qk_weight is not None,
        num_warps=HOPPER_SHAPE.num_warps,
        maxnreg=HOPPER_SHAPE.maxnreg,
        launch_pdl=True,
    )
    return out


def fits_hopper_decode(device: torch.device, dtype: torch.dtype, head_size: int, group: int, block_size: int) -> bool:
    """Whether `hopper_decode` takes such heads there, from blocks of such a size.

    Args:
        group: query heads of a KV head.
    """
    fits = dtype.itemsize == 2 and head_size in (64, 128) and group <= 64 and block_size % _PIECE == 0
    return fits and has_hopper(device)
