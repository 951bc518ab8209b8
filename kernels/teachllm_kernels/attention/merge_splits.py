"""Merge the splits of a sequence's KV (lesson 08): each has left the mean of its values and the weight of that mean.

    partial    sum of softmax weights x values, divided by the split's own sum of weights
    lse        log2 of that sum
    merged     sum of partial x 2^lse, divided by the sum of 2^lse

Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton

MERGED = 4096  # elements that a program holds at once


@triton.jit
def merge(
    partial_ptr, lse_ptr, out_ptr,
    first, num_splits, kv_head, token, channel, is_channel,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, MERGE: tl.constexpr, MERGE_ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one sequence and KV head by log-sum-exp, `MERGE` splits of `MERGE_ROWS` at a time."""
    for first_row in tl.static_range(0, GROUP, MERGE_ROWS):
        row = first_row + tl.arange(0, MERGE_ROWS)
        is_row = row < GROUP
        highest = tl.full([MERGE_ROWS], -float("inf"), tl.float32)
        total = tl.zeros([MERGE_ROWS], tl.float32)
        acc = tl.zeros([MERGE_ROWS, channel.shape[0]], tl.float32)
        for start in range(0, num_splits, MERGE):
            split = start + tl.arange(0, MERGE)
            part_row = ((first + split) * NUM_KV_HEADS + kv_head)[:, None] * GROUP + row[None, :]
            is_part = (split < num_splits)[:, None] & is_row[None, :]
            # Past the L1 cache, which may hold older values of these addresses.
            part_lse = tl.load(lse_ptr + part_row, mask=is_part, other=-float("inf"), cache_modifier=".cg")
            part = tl.load(
                partial_ptr + part_row[:, :, None] * D + channel[None, None, :],
                mask=is_part[:, :, None] & is_channel[None, None, :], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            higher = tl.maximum(highest, tl.max(part_lse, axis=0))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            weight = tl.exp2(part_lse - base[None, :])
            shrink = tl.exp2(highest - base)
            acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], axis=0)
            total = total * shrink + tl.sum(weight, axis=0)
            highest = higher
        out_ptrs = out_ptr + (token.to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + row)[:, None] * D
        merged = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out_ptrs + channel[None, :], merged.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_channel[None, :]
        )


@triton.jit
def _merge_splits(
    partial_ptr, lse_ptr, out_ptr, spans_ptr, query_start_ptr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MAX_Q: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    MERGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Like `merge`, for one query token of a sequence and one head."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq, query, head = tl.program_id(0) // MAX_Q, tl.program_id(0) % MAX_Q, tl.program_id(1)
    num_splits = tl.load(spans_ptr + 2 * seq + 1)
    token = tl.load(query_start_ptr + seq) + query
    if (num_splits < 2) | (token >= tl.load(query_start_ptr + seq + 1)):
        return
    first = tl.load(spans_ptr + 2 * seq)
    row = query * GROUP + head % GROUP
    channel = tl.arange(0, D_PADDED)
    highest = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([D_PADDED], tl.float32)
    for start in range(0, num_splits, MERGE):
        split = start + tl.arange(0, MERGE)
        part_row = ((first + split) * NUM_KV_HEADS + head // GROUP) * GROUP * MAX_Q + row
        part_lse = tl.load(lse_ptr + part_row, mask=split < num_splits, other=-float("inf"))
        is_part = (split < num_splits)[:, None] & (channel < D)[None, :]
        part = tl.load(partial_ptr + part_row[:, None] * D + channel[None, :], mask=is_part, other=0.0)
        higher = tl.maximum(highest, tl.max(part_lse, axis=0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp2(part_lse - base)
        shrink = tl.exp2(highest - base)
        acc = acc * shrink + tl.sum(part * weight[:, None], axis=0)
        total = total * shrink + tl.sum(weight, axis=0)
        highest = higher
    merged = acc / tl.where(total == 0.0, 1.0, total)
    out_ptrs = out_ptr + (token.to(tl.int64) * NUM_KV_HEADS * GROUP + head) * D + channel
    tl.store(out_ptrs, merged.to(out_ptr.dtype.element_ty), mask=channel < D)


def merge_splits(
    partial: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    spans: torch.Tensor,
    query_start: torch.Tensor,
    num_kv_heads: int,
    max_query_len: int,
) -> None:
    """Merge the splits of sequences that have several; one program per query token and head.

    Args:
        partial, lse, spans: as in `DecodePlan`; `partial` and `lse` have rows for `max_query_len` tokens of each split.
        out: [num_tokens, num_heads, head_size], written.
        query_start: [num_seqs + 1] int32, the first query token of each sequence.
    """
    num_heads, head_size = out.shape[1:]
    padded = triton.next_power_of_2(head_size)
    _merge_splits[((query_start.shape[0] - 1) * max_query_len, num_heads)](
        partial_ptr=partial,
        lse_ptr=lse,
        out_ptr=out,
        spans_ptr=spans,
        query_start_ptr=query_start,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        MAX_Q=max_query_len,
        D=head_size,
        D_PADDED=padded,
        MERGE=max(MERGED // padded, 1),
        **launch_options(out.device),
    )
