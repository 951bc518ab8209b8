"""Attention of many query tokens per sequence on a GPU: prompts, chunks of prompts, drafts to verify.

The scores of a long prompt do not fit anywhere, so they are never stored: a program takes a tile of queries past the
sequence's keys, one tile of keys at a time, and keeps only each row's highest score, the sum of its weights and their
weighted sum of V. When a higher score appears, the sums so far shrink to match (the online softmax).

The keys of a tile come from wherever the block table points. The rows of a query tile are the query heads that share
one KV head, for a few tokens: one load of K and V serves them all, and little lies beyond the diagonal.

With `is_fixed` the bits of a token's result depend on its sequence alone: its keys come in the same tiles, by the same
instructions, whatever chunk it is computed in.

Sources: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023; finding a tile
of a ragged batch without the host's help: vLLM's `triton_unified_attention.py`.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, shared_memory, tl, triton
from teachllm_kernels.attention.kv_quantization import KVScales, dequantize_unscaled, for_kernel, multiplicand
from teachllm_kernels.attention.paged_attention import cost

__all__ = ["cost", "paged_prefill_triton", "tile_options"]

_AT_ONCE = 64  # sequences that a program compares with its tile in one step


@triton.jit
def _attend(
    acc, total, top, q, position,
    k_head_ptr, v_head_ptr, table_ptr,
    begin, end, scale,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, QUANTIZED_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SLOT_STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the keys [begin, end) to the running softmax. Not MASKED: whole tiles, of which every row sees every key.

    QUANTIZED_KV: K and V are quantized; `scale` then includes K's scale, and the caller applies V's to the result.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    lane = tl.arange(0, HEAD_PADDED)
    for first_key in range(begin, end, BLOCK_N):
        key = first_key + tl.arange(0, BLOCK_N)
        inside = (lane < HEAD_SIZE)[None, :]
        if MASKED:
            # Slots that were never written may hold NaN, and 0 * NaN is NaN: they are not read.
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0)
            inside = inside & (key < end)[:, None]
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        at = slot[:, None] * SLOT_STRIDE + lane[None, :]

        k = tl.load(k_head_ptr + at, mask=inside, other=0.0)
        if QUANTIZED_KV:
            k = dequantize_unscaled(k, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        to_base_2 = scale * LOG2_E  # the hardware computes exp2
        if SOFT_CAP is not None:
            doubled = tl.exp2(scores * (scale * (2 * LOG2_E / SOFT_CAP)))
            scores = SOFT_CAP - 2 * SOFT_CAP / (doubled + 1)  # SOFT_CAP * tanh(scores * scale / SOFT_CAP)
            to_base_2 = LOG2_E
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if WINDOW is not None:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, axis=1) * to_base_2)
        weights = tl.exp2(scores * to_base_2 - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(v_head_ptr + at, mask=inside, other=0.0)
        if QUANTIZED_KV:
            v = dequantize_unscaled(v, q.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["num_seqs", "rows_ptr", "seq_lens_ptr"])  # they differ from batch to batch
def _paged_prefill(
    q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, rows_ptr, query_start_ptr, seq_lens_ptr, out_ptr,
    k_scale_ptr, v_scale_ptr,
    scale, num_seqs, q_token_stride, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, FIXED: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)
    # Backwards: a sequence's last tiles see the most keys, and long work that starts late leaves processors idle.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)

    # Sequence i owns the tiles from query_start[i] // QUERIES + i on: enough for its queries, whatever came before.
    # All sequences are compared at once: a binary search would be a trip to memory per step.
    seq = -1
    for start in range(0, num_seqs, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        begins = tl.load(query_start_ptr + i, mask=i < num_seqs, other=2**30)
        seq += tl.sum((begins // QUERIES + i <= tile).to(tl.int32))
    first_query = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - first_query
    context_len = tl.load(seq_lens_ptr + seq) - query_len
    row = tl.load(rows_ptr + seq)
    first = (tile - first_query // QUERIES - seq) * QUERIES
    if (first >= query_len) | (row < 0):
        return

    lane = tl.arange(0, HEAD_PADDED)
    query = first + tl.arange(0, BLOCK_M) // GROUP
    head = kv_head * GROUP + tl.arange(0, BLOCK_M) % GROUP
    is_row = (query < tl.minimum(first + QUERIES, query_len))[:, None] & (lane < HEAD_SIZE)[None, :]
    token = (first_query + query).to(tl.int64)
    q_at = (token * q_token_stride + head * HEAD_SIZE)[:, None] + lane[None, :]
    q_tile = tl.load(q_ptr + q_at, mask=is_row, other=0.0)  # [BLOCK_M, HEAD_PADDED]
    QUANTIZED_KV: tl.constexpr = k_scale_ptr is not None
    if QUANTIZED_KV:
        q_tile = multiplicand(q_tile, tl.float16 if q_ptr.dtype.element_ty.primitive_bitwidth == 16 else tl.float32)
        scale *= tl.load(k_scale_ptr + kv_head)

    position = context_len + query
    k_head_ptr = k_cache_ptr + kv_head * HEAD_SIZE
    v_head_ptr = v_cache_ptr + kv_head * HEAD_SIZE
    table_ptr = block_tables_ptr + row.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, HEAD_PADDED], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -1e30, tl.float32)  # finite: a row that has seen nothing yet must not meet inf - inf

    # Keys [full_begin, full_end) are seen by all rows; keys before (in a window) or after, only by some.
    end = context_len + tl.minimum(first + QUERIES, query_len)
    begin, full_begin = 0, 0
    full_end = (context_len + first + 1) // BLOCK_N * BLOCK_N
    if WINDOW is not None:
        begin = tl.maximum(context_len + first + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N, full_end)
    if FIXED:
        full_end = begin  # which keys all rows see depends on the chunk, so all keys take the masked loop
    elif WINDOW is not None:
        acc, total, top = _attend(
            acc, total, top, q_tile, position, k_head_ptr, v_head_ptr, table_ptr, begin, full_begin, scale,
            True, WINDOW, SOFT_CAP, QUANTIZED_KV, BLOCK_SIZE, NUM_KV_HEADS * HEAD_SIZE, HEAD_SIZE, HEAD_PADDED, BLOCK_N,
        )  # fmt: skip
    if not FIXED:
        acc, total, top = _attend(
            acc, total, top, q_tile, position, k_head_ptr, v_head_ptr, table_ptr, full_begin, full_end, scale,
            False, WINDOW, SOFT_CAP, QUANTIZED_KV, BLOCK_SIZE, NUM_KV_HEADS * HEAD_SIZE, HEAD_SIZE, HEAD_PADDED,
            BLOCK_N,
        )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q_tile, position, k_head_ptr, v_head_ptr, table_ptr, full_end, end, scale,
        True, WINDOW, SOFT_CAP, QUANTIZED_KV, BLOCK_SIZE, NUM_KV_HEADS * HEAD_SIZE, HEAD_SIZE, HEAD_PADDED, BLOCK_N,
    )  # fmt: skip

    out_ptrs = out_ptr + ((token * (NUM_KV_HEADS * GROUP * HEAD_SIZE) + head * HEAD_SIZE)[:, None] + lane[None, :])
    averaged = acc / total[:, None]
    if QUANTIZED_KV:
        averaged *= tl.load(v_scale_ptr + kv_head)
    tl.store(out_ptrs, averaged.to(out_ptr.dtype.element_ty), mask=is_row)


def tile_options(head_size: int, dtype: torch.dtype, most_bytes: int) -> dict[str, int]:
    """Return the tile sizes and launch options that fit and are fastest on an H200.

    A tile has many rows, because they share a load of K and V. Two programs run per multiprocessor, because the
    products of one then hide the softmax of the other: `maxnreg` makes room for the second, at the price of a few
            spilled registers.

    Args:
        most_bytes: shared memory per program.
    """
    if dtype == torch.float32:
        return {"BLOCK_M": 32, "BLOCK_N": 32 if head_size <= 128 else 16, "num_warps": 4, "num_stages": 2}
    if head_size <= 64:
        return {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3, "maxnreg": 128}
    if head_size <= 128:
        return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3, "maxnreg": 128}
    fits = most_bytes >= 144 << 10
    return {"BLOCK_M": 128, "BLOCK_N": 64 if fits else 32, "num_warps": 8, "num_stages": 2 if fits else 1}


def paged_prefill_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
    num_tokens: int | None = None,
    is_fixed: bool = False,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Compute `paged_attention_reference` with all lengths on the device, so one captured launch serves any batch.

    Args:
        q: [num_tokens, num_heads, head_size]; heads contiguous, tokens at any stride (a view into q, k and v).
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_size] contiguous, this step's tokens already
            written.
        block_tables: [max_rows, max_blocks] int32, rows contiguous.
        rows: [num_seqs] int32, each sequence's row in `block_tables`; -1 is padding, whose tokens are not computed.
        query_start: [num_seqs + 1] int32, where the tokens of each sequence begin in `q`, and where the last one's end.
        seq_lens: [num_seqs] int32, with this step's tokens.
        scale, window, soft_cap: as in `paged_attention_reference`; `scale` is positive.
        out: [num_tokens, num_heads, head_size] contiguous, written for the tokens of sequences, otherwise left as it
            is.
        num_tokens: no sequence ends later than this in `q`; None: all of `q`. It sizes the grid.
        is_fixed: a token's result does not depend, by one bit, on its chunk or on other sequences; slower.
        scales: scales of K and V, if the cache is quantized (`kv_quantization.py`).

    Returns:
        `out`, or a new tensor.
    """
    _, num_heads, head_size = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_seqs = rows.shape[0]
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_tokens is None:
        num_tokens = q.shape[0]
    options = tile_options(head_size, q.dtype, shared_memory(q.device))
    maxnreg = options.pop("maxnreg", None)
    group = num_heads // num_kv_heads
    queries = options["BLOCK_M"] // group
    k_scale, v_scale = scales or (None, None)
    _paged_prefill[(num_kv_heads, num_tokens // queries + num_seqs)](
        q_ptr=q,
        k_cache_ptr=for_kernel(k_cache),
        v_cache_ptr=for_kernel(v_cache),
        block_tables_ptr=block_tables,
        rows_ptr=rows,
        query_start_ptr=query_start,
        seq_lens_ptr=seq_lens,
        out_ptr=out,
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        scale=scale,
        num_seqs=num_seqs,
        q_token_stride=q.stride(0),
        table_stride=block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        HEAD_PADDED=triton.next_power_of_2(head_size),
        BLOCK_SIZE=block_size,
        WINDOW=window,
        SOFT_CAP=soft_cap,
        FIXED=is_fixed,
        QUERIES=queries,
        AT_ONCE=_AT_ONCE,
        **options,
        **launch_options(q.device, maxnreg=maxnreg),
    )
    return out
