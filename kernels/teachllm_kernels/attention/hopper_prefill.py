"""Prefill attention on Hopper: the loop of `paged_prefill.py`, with one warp group for each task that takes time.

In the portable kernel all warps load keys, turn block numbers into addresses, multiply and compute the softmax, and the
tensor cores wait during all but one of these. With the short prompts of a busy server a program ends soon after it has
begun. This kernel differs in four ways:

    roles        one warp only starts copies (TMA), 16 tokens of a block at a time. Two groups of four warps take 64
                 rows of a tile of queries each: while one computes its softmax, the other one can multiply
    one behind   within a group, too, the values of one tile are multiplied while the scores of the next are weighted.
                 So values are needed later than their keys, and each has its own queue
    persistent   one program per multiprocessor takes one tile of queries after the other: the copying warp is at the
                 next tile's keys while this tile's last ones are multiplied
    plan         the list of tiles is the same for all layers and written once per step, the tiles with the most keys
                 first. They are dealt to the programs in rounds, every other round from the last program to the first:
                 the program with the longest tile of a round gets the shortest of the next (`prefill_plan.py`)

The definition is `paged_attention_reference`. As in `paged_prefill.py`, the rows of a tile are the query heads that
share a KV head, for a few tokens. In memory they lie side by side, one token's heads next to the next token's, and the
copy engine lays them out as rows.

Sources: those of `paged_prefill.py` and `hopper_decode.py`; Shah et al., "FlashAttention-3", 2024.
"""

from __future__ import annotations

import torch

from teachllm_kernels._hopper import PIECE, barriers, fetch, head_map, num_multiprocessors, pieces, tile_map
from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, gl, gluon, hopper
from teachllm_kernels.attention.decode_plan import LOG2_E
from teachllm_kernels.attention.hopper_kv_dequantize import multiplicand
from teachllm_kernels.attention.hopper_prefill_quantized import STAGES as QUANTIZED_STAGES
from teachllm_kernels.attention.hopper_prefill_quantized import TILE as QUANTIZED_TILE
from teachllm_kernels.attention.hopper_prefill_quantized import convert
from teachllm_kernels.attention.hopper_tasks import num_tasks, task_of
from teachllm_kernels.attention.kv_quantization import KVScales
from teachllm_kernels.attention.paged_attention import cost
from teachllm_kernels.attention.prefill_plan import ROWS, PrefillPlan

__all__ = ["cost", "hopper_prefill", "takes_prefill_heads"]

_STAGES = {64: 4, 128: 2}  # by keys per tile; 128 KiB with heads of 128; two tiles of queries take another 64 KiB


@gluon.jit
def _copy(
    descs, buffers, told, work, block_tables_ptr, table_stride,
    NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The copying warp: it copies one tile's queries, keys and values after the other, each when there is room."""
    q_desc, k_desc, v_desc = descs
    q, k, v = buffers
    q_arrived, q_free, k_arrived, k_free, v_arrived, v_free = told
    STAGES: gl.constexpr = k.shape[0]
    TILE: gl.constexpr = k.shape[1]
    D: gl.constexpr = k.shape[2]
    GROUP: gl.constexpr = q.shape[2]
    Q_BYTES: gl.constexpr = q.shape[1] * GROUP * D * q.dtype.primitive_bitwidth // 8
    count = 0  # tiles of keys so far
    gdc_wait()
    for task in range(num_tasks(work, NUM_KV_HEADS)):
        kv_head, token, _, _, row, begin, end = task_of(work, task, NUM_KV_HEADS, TILE, WINDOW)
        table_ptr = block_tables_ptr + row.to(gl.int64) * table_stride
        here = task % 2
        hopper.mbarrier.wait(q_free.index(here), (task // 2 - 1) & 1, task >= 2)
        hopper.mbarrier.expect(q_arrived.index(here), Q_BYTES)
        at = [token, kv_head * GROUP, 0]
        hopper.tma.async_copy_global_to_shared(q_desc, at, q_arrived.index(here), q.index(here))
        for key in range(begin, end, TILE):
            stage, parity = count % STAGES, (count // STAGES - 1) & 1
            slots = pieces(k_desc, table_ptr, key, end, TILE, BLOCK_SIZE)
            hopper.mbarrier.wait(k_free.index(stage), parity, count >= STAGES)
            fetch(k_desc, k.index(stage), k_arrived.index(stage), slots, kv_head * D, key, end)
            hopper.mbarrier.wait(v_free.index(stage), parity, count >= STAGES)
            fetch(v_desc, v.index(stage), v_arrived.index(stage), slots, kv_head * D, key, end)
            count += 1


@gluon.jit
def _weigh(
    score, first_key, first_position, position, top, total, scale_log2, TILE: gl.constexpr, WINDOW: gl.constexpr
):
    """Return a tile's weights, the shrink factor of earlier sums, and each row's new highest score and total."""
    key = (first_key + gl.arange(0, TILE, gl.SliceLayout(0, score.type.layout)))[None, :]
    if WINDOW is not None:
        is_seen = (key <= position[:, None]) & (key > position[:, None] - WINDOW)
        score = gl.where(is_seen, score, float("-inf"))
    elif first_key + TILE > first_position:  # the diagonal
        score = gl.where(key <= position[:, None], score, float("-inf"))
    higher = gl.maximum(top, gl.max(score, axis=1) * scale_log2)
    weight = gl.exp2(score * scale_log2 - higher[:, None])
    shrink = gl.exp2(top - higher)
    return weight, shrink, higher, total * shrink + gl.sum(weight, axis=1)


@gluon.jit
def _clean_slots(values, clean, num_cleaned, first_key, end, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """Set the slots after the last key that any row sees to zero, half of the tile by each group.

    Slots that were not fetched, or never written, may hold NaN, and 0 * NaN is NaN.
    """
    ROWS: gl.constexpr = values.shape[0] // 2
    mine = values.slice(HALF * ROWS, ROWS)
    key = first_key + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    mine.store(gl.where((key < end)[:, None], mine.load(LAYOUT), 0.0))
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(clean)
    hopper.mbarrier.wait(clean, num_cleaned & 1)


@gluon.jit
def _attend(
    buffers, told, clean, work,
    out_ptr, k_scale_ptr, v_scale_ptr,
    scale_log2,
    HALF: gl.constexpr, NUM_KV_HEADS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Four warps: they compute attention for half of the rows of each tile.

    clean: see `_clean_slots`; None: the warps that dequantize have cleaned the slots.
    k_scale_ptr, v_scale_ptr: scales of a quantized cache; None: the cache is not quantized.
    """
    q, k, v = buffers
    q_arrived, q_free, k_arrived, k_free, v_arrived, v_free = told
    QUERIES: gl.constexpr = q.shape[1]
    GROUP: gl.constexpr = q.shape[2]
    STAGES: gl.constexpr = k.shape[0]
    TILE: gl.constexpr = k.shape[1]
    D: gl.constexpr = k.shape[2]
    DTYPE: gl.constexpr = k.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    QUERY_OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    MOVED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    nothing = gl.zeros([64, TILE], gl.float32, SCORES)
    count = 0
    num_cleaned = 0
    gdc_wait()  # each group waits: the previous kernel may write the plan, and an earlier one read `out`
    for task in range(num_tasks(work, NUM_KV_HEADS)):
        kv_head, token, num_queries, first_position, _, begin, end = task_of(work, task, NUM_KV_HEADS, TILE, WINDOW)
        position = first_position + row // GROUP
        here = task % 2
        hopper.mbarrier.wait(q_arrived.index(here), task // 2 & 1)
        queries = q.index(here).reshape([QUERIES * GROUP, D]).slice(HALF * 64, 64)
        score_scale = scale_log2
        if k_scale_ptr is not None:
            queries = multiplicand(queries.load(QUERY_OPERAND))
            hopper.mbarrier.arrive(q_free.index(here))
            score_scale = scale_log2 * gl.load(k_scale_ptr + kv_head)
        top = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, SCORES))  # finite: a row may see nothing of a tile
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([64, D], gl.float32, SUMS)

        stage, parity = count % STAGES, count // STAGES & 1
        hopper.mbarrier.wait(k_arrived.index(stage), parity)
        score = hopper.warpgroup_mma(queries, k.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        score = hopper.warpgroup_mma_wait(0, [score])
        hopper.mbarrier.arrive(k_free.index(stage))
        weight, _, top, total = _weigh(score, begin, first_position, position, top, total, score_scale, TILE, WINDOW)
        weight = gl.convert_layout(weight.to(DTYPE), WEIGHTS)
        count += 1
        hopper.mbarrier.wait(k_arrived.index(count % STAGES), count // STAGES & 1, begin + TILE < end)
        for first_key in range(begin + TILE, end, TILE):
            before, v_parity, stage = stage, parity, count % STAGES
            score = hopper.warpgroup_mma(queries, k.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            hopper.mbarrier.wait(v_arrived.index(before), v_parity)
            sums = hopper.warpgroup_mma(weight, v.index(before), acc, is_async=True)
            score = hopper.warpgroup_mma_wait(1, [score])  # the scores only: the sums continue
            hopper.mbarrier.arrive(k_free.index(stage))
            next_weight, shrink, top, total = _weigh(
                score, first_key, first_position, position, top, total, score_scale, TILE, WINDOW
            )
            parity = count // STAGES & 1
            count += 1
            # Not at the loop's head: without a barrier wait between the two, the compiler would move the wait for the
            # sums before the weights are computed.
            hopper.mbarrier.wait(k_arrived.index(count % STAGES), count // STAGES & 1, first_key + TILE < end)
            acc = hopper.warpgroup_mma_wait(0, [sums])
            hopper.mbarrier.arrive(v_free.index(before))
            acc *= gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
            weight = gl.convert_layout(next_weight.to(DTYPE), WEIGHTS)  # the old ones were in use until now
        if k_scale_ptr is None:
            hopper.mbarrier.arrive(q_free.index(here))
        hopper.mbarrier.wait(v_arrived.index(stage), parity)
        if clean is not None:
            last_key = begin + (end - 1 - begin) // TILE * TILE
            if last_key + TILE > end:
                _clean_slots(v.index(stage), clean.index(0), num_cleaned, last_key, end, HALF, MOVED)
                num_cleaned += 1
        sums = hopper.warpgroup_mma_wait(0, [hopper.warpgroup_mma(weight, v.index(stage), acc, is_async=True)])
        hopper.mbarrier.arrive(v_free.index(stage))

        sums = sums / gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]
        if v_scale_ptr is not None:
            sums *= gl.load(v_scale_ptr + kv_head)
        moved = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), MOVED)
        out_row = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, MOVED))
        head = kv_head * GROUP + out_row % GROUP
        at = ((token + out_row // GROUP).to(gl.int64) * (NUM_KV_HEADS * GROUP) + head) * D
        at = at[:, None] + gl.arange(0, D, gl.SliceLayout(0, MOVED))[None, :]
        gl.store(out_ptr + at, moved, (out_row // GROUP < num_queries)[:, None])


@gluon.jit
def _hopper_prefill(
    q_desc, k_desc, v_desc, out_ptr, block_tables_ptr, items_ptr, num_items_ptr, k_scale_ptr, v_scale_ptr,
    scale_log2, table_stride,
    NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Each buffer is filled by one side and freed by the other, with one barrier each way. Without quantization:

    ```
    buffer                          filled by the copying warp          freed by both groups, when
    q [2] tiles of queries          one copy, one arrival               their last scores are there
    k [STAGES] tiles of keys        PIECES copies, an arrival each      the tile's scores are there
    v [STAGES] tiles of values      PIECES copies, an arrival each      its sums are: one tile after its keys
    clean                           the two groups wait for each other before they read what both have cleaned
    ```

    The groups wait for the keys of tile n + 2 before they free the values of tile n. With two stages this is no
    deadlock: the copying warp fetches these keys before it waits for room for their values, and the keys of tile n,
    whose place they take, are free by then. A quantized cache has separate buffers for the fetched tiles, and a warp
    group that dequantizes them between the copying warp and the others, see `hopper_prefill_quantized.py`.
    """
    gdc_launch_dependents()
    PIECES: gl.constexpr = TILE // k_desc.block_shape[0]
    D: gl.constexpr = k_desc.block_shape[1]
    DTYPE: gl.constexpr = k_desc.dtype
    q = gl.allocate_shared_memory(q_desc.dtype, [2] + q_desc.block_shape, q_desc.layout)  # noqa: RUF005
    k = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, D], k_desc.layout)
    v = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, D], v_desc.layout)
    q_arrived, q_free = barriers(2, 1), barriers(2, 2)
    FREED_BY: gl.constexpr = 2 if k_scale_ptr is None else 1
    k_arrived, k_free = barriers(STAGES, PIECES), barriers(STAGES, FREED_BY)
    v_arrived, v_free = barriers(STAGES, PIECES), barriers(STAGES, FREED_BY)
    told = (q_arrived, q_free, k_arrived, k_free, v_arrived, v_free)
    descs, buffers, work = (q_desc, k_desc, v_desc), (q, k, v), (items_ptr, num_items_ptr)
    if k_scale_ptr is None:
        clean = barriers(1, 2)
        gl.warp_specialize([
            (_attend, (buffers, told, clean, work, out_ptr, None, None, scale_log2, 0, NUM_KV_HEADS, WINDOW)),
            (_attend, (buffers, told, clean, work, out_ptr, None, None, scale_log2, 1, NUM_KV_HEADS, WINDOW)),
            (_copy, (descs, buffers, told, work, block_tables_ptr, table_stride, NUM_KV_HEADS, BLOCK_SIZE, WINDOW)),
        ], [4, 1], [224, 56])  # fmt: skip
        # Those are the warps and registers of the second and third role; the first keeps 224 registers.
    else:
        DEQUANTIZED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, D], gl.float16)
        dequantized_k = gl.allocate_shared_memory(gl.float16, [STAGES, TILE, D], DEQUANTIZED)
        dequantized_v = gl.allocate_shared_memory(gl.float16, [STAGES, TILE, D], DEQUANTIZED)
        operands = (q, dequantized_k, dequantized_v)
        made = (barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1), barriers(STAGES, 2))
        heard = (q_arrived, q_free, made[0], made[1], made[2], made[3])
        fetched = (k_arrived, k_free, v_arrived, v_free)
        gl.warp_specialize([
            (_attend, (operands, heard, None, work, out_ptr, k_scale_ptr, v_scale_ptr, scale_log2, 0,
                       NUM_KV_HEADS, WINDOW)),
            (_attend, (operands, heard, None, work, out_ptr, k_scale_ptr, v_scale_ptr, scale_log2, 1,
                       NUM_KV_HEADS, WINDOW)),
            (convert, ((k, v), fetched, (dequantized_k, dequantized_v), made, work, NUM_KV_HEADS, WINDOW)),
            (_copy, (descs, buffers, told, work, block_tables_ptr, table_stride, NUM_KV_HEADS, BLOCK_SIZE, WINDOW)),
        ], [4, 4, 1], [200, 72, 40])  # fmt: skip


def hopper_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: PrefillPlan,
    scale: float,
    window: int | None = None,
    out: torch.Tensor | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Compute `paged_prefill_triton` without a soft cap; the plan says which program computes which tile.

    Only on a Hopper, for heads of 16 bits and blocks that `takes_prefill_heads` accepts. With a window every tile is
    masked, and heads of 64 leave half of the shared memory unused: neither has been tuned.

    Args:
        q: [num_tokens, num_heads, head_size], heads contiguous; the stride between tokens is any multiple of 8.
        out: [num_tokens, num_heads, head_size] contiguous.
        scales: scales of K and V, if the cache is quantized.
    """
    num_blocks, block_size, num_kv_heads, head_size = k_cache.shape
    group = q.shape[1] // num_kv_heads
    assert plan.group == group
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    num_slots = num_blocks * block_size
    k_scale, v_scale = scales or (None, None)
    num_programs = min(plan.items.shape[0] * num_kv_heads, num_multiprocessors(q.device))
    _hopper_prefill[(num_programs,)](
        q_desc=head_map(q, [ROWS // group, group, head_size]),
        k_desc=tile_map(k_cache.view(num_slots, -1), [PIECE, head_size]),
        v_desc=tile_map(v_cache.view(num_slots, -1), [PIECE, head_size]),
        out_ptr=out,
        block_tables_ptr=block_tables,
        items_ptr=plan.items,
        num_items_ptr=plan.count,
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        scale_log2=scale * LOG2_E,
        table_stride=block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        TILE=plan.tile if scales is None else QUANTIZED_TILE,
        STAGES=_STAGES[plan.tile] if scales is None else QUANTIZED_STAGES,
        WINDOW=window,
        num_warps=4,
        launch_pdl=True,  # the previous kernel, `rope_kv_write`, has small programs: there is room beside them
    )
    return out


def takes_prefill_heads(head_size: int, group: int, block_size: int) -> bool:
    """Return whether `hopper_prefill` supports such heads, of 16 bits, and blocks.

    Args:
        group: query heads per KV head.
        block_size: tokens per KV block.
    """
    return head_size in (64, 128) and group in (1, 2, 4, 8, 16, 32, 64) and block_size % PIECE == 0
