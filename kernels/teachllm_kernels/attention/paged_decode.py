"""Attention of a few query tokens per sequence over the paged KV cache (lesson 08): what a decode step waits for.

One query reads all K and V of its sequence once and does little with them, so the time is bytes over bandwidth, and
the task is to keep every multiprocessor reading until the end, however ragged the batch:

    split     a sequence's KV is cut into splits, so that one long sequence occupies the whole card; `decode_plan.py`
              assigns them
    pack      the query heads that share a KV head, and up to 8 query tokens, are the rows of one matrix product; more
              tokens are divided among programs, 8 each
    merge     each split leaves its softmax-weighted sum and log-sum-exp; the program that finishes a sequence's last
              split merges them, so there is no second kernel. Several query tokens have too much to merge for one
              program: they take a second kernel (`merge_splits.py`)
    alone     one sequence has few bytes, and the time is a chain of waits. While the previous product still runs, each
              program loads its first tile (if registers hold it) and everything else that no kernel of this step
              writes; then it loads the rest, at once. 32 splits are merged in one round, since each round waits for
              what other programs have just written

Several query tokens per sequence, and a tree mask, are for verifying drafts. With a quantized cache
(`kv_quantization.py`) the scores are multiplied by K's scale, the sums by V's. `decode_tile.py` has the loop's body.

`fused_paged_decode` also does what comes before attention (q/k norm, rotary embedding, KV write) for one new token per
sequence: at small batches one kernel less per layer is worth more than the few values that each split computes again.
On Hopper it is `hopper_decode.py`, for any number of sequences except one.

Sources: Dao et al., "Flash-Decoding for long-context inference", 2023; Kwon et al., "Efficient Memory Management for
LLM Serving with PagedAttention", SOSP 2023.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, shared_memory, tl, triton
from teachllm_kernels.attention.decode_plan import (
    ALONE_SHAPE,
    BEGIN,
    COMMON_SHAPE,
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
    decode_shape,
    fitting_tile,
    max_splits,
)
from teachllm_kernels.attention.decode_tile import attend_tile, capped, keys_and_values, visible_keys
from teachllm_kernels.attention.hopper_decode import hopper_decode
from teachllm_kernels.attention.kv_quantization import (
    KVScales,
    dequantize_unscaled,
    for_kernel,
    multiplicand,
    quantize_kv,
)
from teachllm_kernels.attention.merge_splits import MERGED, merge, merge_splits
from teachllm_kernels.attention.paged_attention import cost
from teachllm_kernels.attention.rotary import load_halves, turned_heads

__all__ = ["cost", "fused_paged_decode", "paged_decode_triton"]

_QUERIES = 8  # query tokens per sequence and program
_MOST_EARLY = 32 << 10  # bytes of K and V that a program holds in 64 registers per thread until the query arrives
_MERGED_ALONE = 16384  # elements: 32 splits of 4 heads of 128


@triton.jit(do_not_specialize=["query_start_ptr"])  # prompts begin anywhere after the decodes
def _paged_decode(
    q_ptr, k_cache_ptr, v_cache_ptr, out_ptr, block_tables_ptr, tree_ptr,
    items_ptr, partial_ptr, lse_ptr, finished_ptr,
    cos_ptr, signed_sin_ptr, qk_weight_ptr, k_scale_ptr, v_scale_ptr,
    eps, scale_log2, soft_cap, q_stride, table_stride,
    query_start_ptr, first_place,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MAX_Q: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_TREE: tl.constexpr, FUSED: tl.constexpr, HAS_NORM: tl.constexpr,
    MERGE: tl.constexpr, MERGE_ROWS: tl.constexpr, EARLY: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = 2 * HALF
    D_PADDED: tl.constexpr = 2 * HALF_PADDED
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    QUANTIZED_KV: tl.constexpr = k_scale_ptr is not None
    if PDL:
        gdc_launch_dependents()
    item, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    # The plan, the tables and earlier steps' K and V are already written, see `_launch`.
    fields_ptr = items_ptr + item * FIELDS
    begin = tl.load(fields_ptr + BEGIN)
    end = tl.load(fields_ptr + END)
    if begin < end:
        seq = tl.load(fields_ptr + SEQ)
        table_ptr = block_tables_ptr + tl.load(fields_ptr + ROW).to(tl.int64) * table_stride
        token = tl.load(fields_ptr + TOKEN)
        seq_len = tl.load(fields_ptr + SEQ_LEN)
        first = tl.load(fields_ptr + FIRST_ITEM)
        num_splits = tl.load(fields_ptr + NUM_SPLITS)
        num_queries = 1
        if MAX_Q > 1:
            num_queries = tl.load(query_start_ptr + seq + 1) - token
        first_query = 0
        if MAX_Q > QUERIES:
            first_query = tl.program_id(1) * QUERIES
        key = begin + tl.arange(0, TILE)
        next_block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0)
        column = tl.arange(0, D_PADDED)
        channel = column
        is_channel = column < D
        if HALF != HALF_PADDED and FUSED:  # the halves are padded separately, since they are rotated separately
            channel = column // HALF_PADDED * HALF + column % HALF_PADDED
            is_channel = column % HALF_PADDED < HALF
        row = tl.arange(0, ROWS)
        query, member = first_query + row // GROUP, row % GROUP
        head = kv_head * GROUP + member  # [ROWS]
        is_row = query < num_queries
        if MAX_Q > QUERIES:
            is_row = is_row & (row < QUERIES * GROUP)
        DTYPE: tl.constexpr = q_ptr.dtype.element_ty
        QUANTIZED_OPERAND: tl.constexpr = tl.float16 if DTYPE.primitive_bitwidth == 16 else tl.float32
        OPERAND: tl.constexpr = DTYPE if k_scale_ptr is None else QUANTIZED_OPERAND
        if k_scale_ptr is not None:
            k_scale_of_head = tl.load(k_scale_ptr + kv_head)
            scale_log2 *= k_scale_of_head
        highest = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D_PADDED], tl.float32)
        if FUSED:
            # Everything that no kernel of this step writes is loaded before the wait, then the rest at once: attention
            # of few sequences is a chain of waits. So every split reads the new token's K and V, though one needs them.
            q_head = tl.where(is_row, head, -1)
            k_head = NUM_HEADS + kv_head + tl.zeros([1], tl.int32)
            lane = tl.arange(0, HALF_PADDED)
            pair_cos = tl.load(cos_ptr + token * D + lane, mask=lane < HALF, other=0.0).to(tl.float32)
            pair_sin = tl.load(signed_sin_ptr + token * D + HALF + lane, mask=lane < HALF, other=0.0).to(tl.float32)
            angles = (pair_cos[None, :], pair_sin[None, :])
            if HAS_NORM:
                q_weights = load_halves(qk_weight_ptr, q_head, HALF, HALF_PADDED)
                k_weights = load_halves(qk_weight_ptr, k_head, HALF, HALF_PADDED)
            new_block = tl.load(table_ptr + (seq_len - 1) // BLOCK_SIZE).to(tl.int64)
            holds_new = end == seq_len
            end -= holds_new.to(tl.int32)  # the new token is not in the cache yet
            if EARLY:
                is_first = key < end
                first_k, first_v = keys_and_values(
                    k_cache_ptr, v_cache_ptr, next_block, key, kv_head, channel, is_first, is_channel,
                    NUM_KV_HEADS, BLOCK_SIZE, D,
                )  # fmt: skip
                begin += TILE
                next_block = tl.load(table_ptr + (key + TILE) // BLOCK_SIZE, mask=key + TILE < end, other=0)
            if PDL:
                gdc_wait()
            token_ptr = q_ptr + token.to(tl.int64) * q_stride
            of_q = load_halves(token_ptr, q_head, HALF, HALF_PADDED)
            of_k = load_halves(token_ptr, k_head, HALF, HALF_PADDED)
            new_v_ptrs = token_ptr + (NUM_HEADS + NUM_KV_HEADS + kv_head) * D + channel
            new_v = tl.load(new_v_ptrs, mask=is_channel, other=0.0)[None, :]
            queries = turned_heads(of_q, q_weights if HAS_NORM else of_q, angles, eps, HALF, HAS_NORM).to(DTYPE)
            new_k = turned_heads(of_k, k_weights if HAS_NORM else of_k, angles, eps, HALF, HAS_NORM).to(DTYPE)
        else:
            if PDL:
                gdc_wait()
            q_ptrs = q_ptr + (token + query).to(tl.int64)[:, None] * q_stride + head[:, None] * D + channel[None, :]
            queries = tl.load(q_ptrs, mask=is_row[:, None] & is_channel[None, :], other=0.0)
        if k_scale_ptr is not None:
            queries = multiplicand(queries, OPERAND)

        if FUSED:  # the split that ends the sequence writes the new token's K and V and attends to them
            if k_scale_ptr is not None:
                CACHE_DTYPE: tl.constexpr = k_cache_ptr.dtype.element_ty
                new_k = quantize_kv(new_k, k_scale_of_head, CACHE_DTYPE)
                new_v = quantize_kv(new_v, tl.load(v_scale_ptr + kv_head), CACHE_DTYPE)
            to = ((new_block * BLOCK_SIZE + (seq_len - 1) % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * D + channel[None, :]
            tl.store(k_cache_ptr + to, new_k, mask=is_channel[None, :] & holds_new)
            tl.store(v_cache_ptr + to, new_v, mask=is_channel[None, :] & holds_new)
            if k_scale_ptr is not None:
                new_k, new_v = dequantize_unscaled(new_k, OPERAND), dequantize_unscaled(new_v, OPERAND)
            new_score = tl.sum(queries.to(tl.float32) * new_k.to(tl.float32), axis=1) * scale_log2
            if HAS_CAP:
                new_score = capped(new_score, soft_cap)
            highest = tl.where(holds_new, new_score, highest)
            total += tl.where(holds_new, 1.0, 0.0)
            acc += tl.where(holds_new, new_v.to(tl.float32), 0.0)
            if EARLY:
                highest, total, acc = attend_tile(
                    queries, first_k, first_v, is_first[None, :], scale_log2, soft_cap, highest, total, acc,
                    HAS_CAP, QUANTIZED_KV,
                )  # fmt: skip
        if begin < end:  # even entering a loop takes time
            for start in tl.range(begin, end, TILE, num_stages=STAGES):
                key = start + tl.arange(0, TILE)
                is_key = key < end
                block = next_block
                next_block = tl.load(table_ptr + (key + TILE) // BLOCK_SIZE, mask=key + TILE < end, other=0)
                k, v = keys_and_values(
                    k_cache_ptr, v_cache_ptr, block, key, kv_head, channel, is_key, is_channel,
                    NUM_KV_HEADS, BLOCK_SIZE, D,
                )  # fmt: skip
                visible = is_key[None, :]
                if MAX_Q > 1 or HAS_TREE:
                    first_new = seq_len - num_queries
                    visible = visible_keys(
                        key, is_key, query, is_row, first_new, tree_ptr, first_place, WINDOW, HAS_TREE
                    )
                highest, total, acc = attend_tile(
                    queries, k, v, visible, scale_log2, soft_cap, highest, total, acc, HAS_CAP, QUANTIZED_KV
                )

        normalised = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if v_scale_ptr is not None:
            normalised *= tl.load(v_scale_ptr + kv_head)
        out_ptrs = out_ptr + ((token + query).to(tl.int64) * NUM_HEADS + head)[:, None] * D + channel[None, :]
        is_out = is_row[:, None] & is_channel[None, :]
        if num_splits == 1:
            tl.store(out_ptrs, normalised.to(out_ptr.dtype.element_ty), mask=is_out)
        else:
            part_row = (item * NUM_KV_HEADS + kv_head) * GROUP * MAX_Q + first_query * GROUP + row
            is_part = row < GROUP * MAX_Q
            if MAX_Q > QUERIES:
                is_part = is_row
            is_written = is_part[:, None] & is_channel[None, :]
            part_ptrs = partial_ptr + part_row[:, None] * D + channel[None, :]
            tl.store(part_ptrs, normalised, mask=is_written)
            tl.store(lse_ptr + part_row, highest + tl.log2(total), mask=is_part)
            if MAX_Q == 1:
                tl.debug_barrier()  # every thread's part is written before the arrival is counted
                count = tl.atomic_add(finished_ptr + seq * NUM_KV_HEADS + kv_head, 1, sem="acq_rel")
                if count == num_splits - 1:
                    tl.store(finished_ptr + seq * NUM_KV_HEADS + kv_head, 0)
                    merge(
                        partial_ptr, lse_ptr, out_ptr, first, num_splits, kv_head, token, channel, is_channel,
                        NUM_KV_HEADS, GROUP, D, MERGE, MERGE_ROWS,
                    )  # fmt: skip
    elif PDL:  # noqa: SIM102 (settled when the kernel is compiled)
        if item == 0:  # a batch of only padding must wait too, see `_triton.py`; other programs free their place
            gdc_wait()


def paged_decode_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    max_query_len: int = 1,
    tree: torch.Tensor | None = None,
    first_place: int = 0,
    out: torch.Tensor | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Compute attention for the last few tokens of each sequence, whose K and V are already written.

    Args:
        q: [num_tokens, num_heads, head_size], each token's heads side by side; tokens may lie apart.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_size].
        block_tables: [max_rows, max_blocks] int32.
        query_start: [num_seqs + 1] int32, first token of each sequence in the flat batch.
        plan: filled by `plan_decode` for this batch and window. Padding gets no output.
        scale, window, soft_cap: as in `paged_attention_reference`.
        max_query_len: the most tokens of one sequence, and no more than `plan` was allocated for.
        tree: [num_places] int64 if the tokens are a tree of drafts, the same for all sequences: bit j of place i
            means that the token there sees the one at place j; it sees itself and its ancestors. 64 places at most.
            Without a tree a token sees itself and those before it.
        first_place: the place in the tree of each sequence's first token; the tokens before it are in the cache.
        out: [num_tokens, num_heads, head_size], contiguous, to write to.
        scales: scales of K and V, if the cache is quantized.

    Returns:
        `out`, or a new tensor like it.
    """
    if out is None:
        out = q.new_empty(q.shape)
    _launch(
        q=q, k_cache=k_cache, v_cache=v_cache, out=out, block_tables=block_tables, plan=plan,
        scales=scales, scale=scale, window=window, soft_cap=soft_cap,
        tree=tree, query_start=query_start, max_query_len=max_query_len, first_place=first_place,
    )  # fmt: skip
    return out


def fused_paged_decode(
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
    window: int | None = None,
    soft_cap: float | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Compute `rope_kv_write` and `paged_decode_triton` in one launch, for one decoding token per sequence.

    Args:
        qkv: [num_seqs, num_heads + 2 * num_kv_heads, head_size], contiguous; read only.
        cos, signed_sin, qk_weight, eps: as in `rope_kv_write_reference`.
        plan: filled by `plan_decode` for `fused_paged_decode`, or for `hopper_decode`, which then computes what has no
            soft cap.
        The others are those of `paged_decode_triton`.

    Returns:
        [num_seqs, num_heads, head_size].
    """
    num_heads = qkv.shape[1] - 2 * k_cache.shape[2]
    assert plan.kernel != "paged_decode"
    if plan.kernel == "hopper_decode" and soft_cap is None:
        return hopper_decode(
            qkv=qkv, cos=cos, signed_sin=signed_sin, qk_weight=qk_weight, eps=eps,
            k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, plan=plan, scale=scale, scales=scales,
        )  # fmt: skip
    out = qkv.new_empty((qkv.shape[0], num_heads, qkv.shape[2]))
    _launch(
        q=qkv, k_cache=k_cache, v_cache=v_cache, out=out, block_tables=block_tables, plan=plan,
        scales=scales, scale=scale, window=window, soft_cap=soft_cap,
        prologue=(cos, signed_sin, qk_weight, eps),
    )  # fmt: skip
    return out


def _launch(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    plan: DecodePlan,
    scales: KVScales | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    prologue: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float] | None = None,
    tree: torch.Tensor | None = None,
    query_start: torch.Tensor | None = None,
    max_query_len: int = 1,
    first_place: int = 0,
) -> None:
    """Launch the kernel; with `prologue` (cos, signed_sin, qk_weight, eps) the fused form, for which `q` is qkv."""
    _, block_size, num_kv_heads, head_size = k_cache.shape
    group, half = out.shape[1] // num_kv_heads, head_size // 2
    num_seqs = out.shape[0] if query_start is None else query_start.shape[0] - 1
    cos, signed_sin, qk_weight, eps = (None, None, None, 0.0) if prologue is None else prologue
    k_scale, v_scale = scales or (None, None)
    queries = min(max_query_len, _QUERIES)
    half_padded, rows = max(triton.next_power_of_2(half), 16), triton.next_power_of_2(group * queries)
    stored_bytes, operand_bytes, rows_padded = k_cache.element_size(), q.element_size(), max(rows, 16)
    fits_any_shape = rows <= 16 and half_padded <= 64 and operand_bytes <= 2  # others fit COMMON_SHAPE only
    planned = decode_shape(num_seqs, num_kv_heads, "paged_decode" if prologue is None else plan.kernel)
    assert plan.filled_for == (num_seqs, planned) and out.shape[1] * max_query_len <= plan.partial.shape[1]
    shape = planned if fits_any_shape and planned is not HOPPER_SHAPE else COMMON_SHAPE
    is_alone = shape is ALONE_SHAPE
    tile = fitting_tile(
        shape=shape,
        rows=rows_padded,
        head_padded=2 * half_padded,
        stored_bytes=stored_bytes,
        operand_bytes=operand_bytes,
        most_bytes=shared_memory(q.device),
    )
    # The plan is read before the wait, see `_triton.py`. After the plan of a last layer that computes only the tokens
    # whose logits are needed, the kernel launched the ordinary way is the selection of their queries.
    _paged_decode[(max_splits(num_seqs, num_kv_heads, planned) * num_kv_heads, triton.cdiv(max_query_len, queries))](
        q_ptr=q, k_cache_ptr=for_kernel(k_cache), v_cache_ptr=for_kernel(v_cache), out_ptr=out,
        block_tables_ptr=block_tables, tree_ptr=tree,
        items_ptr=plan.items, partial_ptr=plan.partial, lse_ptr=plan.lse, finished_ptr=plan.finished,
        cos_ptr=cos, signed_sin_ptr=signed_sin, qk_weight_ptr=qk_weight, k_scale_ptr=k_scale, v_scale_ptr=v_scale,
        eps=eps, scale_log2=scale * LOG2_E, soft_cap=(soft_cap or 0.0) * LOG2_E,
        q_stride=q.stride(0), table_stride=block_tables.stride(0),
        query_start_ptr=query_start, first_place=first_place,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, MAX_Q=max_query_len, QUERIES=queries, ROWS=rows_padded,
        HALF=half, HALF_PADDED=half_padded, BLOCK_SIZE=block_size, TILE=tile, WINDOW=window or 0,
        HAS_CAP=soft_cap is not None, HAS_TREE=tree is not None,
        FUSED=prologue is not None, HAS_NORM=qk_weight is not None,
        MERGE=max((_MERGED_ALONE if is_alone else MERGED) // (min(rows, 8) * 2 * half_padded), 1),
        MERGE_ROWS=min(rows, 8),
        EARLY=is_alone and 4 * tile * half_padded * stored_bytes <= _MOST_EARLY,
        STAGES=shape.stages,
        num_warps=shape.num_warps, **launch_options(q.device, maxnreg=shape.maxnreg),
    )  # fmt: skip
    if max_query_len > 1:
        assert query_start is not None
        merge_splits(plan.partial, plan.lse, out, plan.spans, query_start, num_kv_heads, max_query_len)
