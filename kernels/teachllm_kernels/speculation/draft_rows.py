"""A drafter's inputs and outputs in the rows of a batch, on the device: what it reads and where its drafts are written.

A row's known tokens end at `num_known`. Its drafts lie after them; the next step computes and verifies these
(`verify_drafts.py`). Nothing is transferred to the host.

    token_ids   | prompt and output | d0 d1 d2 |        num_known points at d0
    inputs      the flat tokens of a drafter's next forward pass: the newest known ones, or the drafts of a level
    following   the tokens that a step has computed, each with the id of the token after it
    push        drafted tokens are written after the known ones

Source: Li et al., "EAGLE", ICML 2024.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton

_BLOCK = 64


@triton.jit(do_not_specialize=["offset", "id_shift", "least", "depth"])
def _draft_inputs(
    rows_ptr, num_drafts_ptr, token_ids_ptr, num_known_ptr, block_tables_ptr,
    input_ids_ptr, positions_ptr, slot_mapping_ptr, seq_lens_ptr,
    offset, id_shift, least, depth, token_stride, table_stride,
    LEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, SIDE_BY_SIDE: tl.constexpr, FOLLOWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0)
    row = tl.load(rows_ptr + seq).to(tl.int64)
    asks = (row >= 0) & (tl.load(num_drafts_ptr + seq) >= least)
    has_any = (row >= 0) if FOLLOWS else asks
    known = tl.load(num_known_ptr + row, mask=has_any, other=0)
    begin = known + offset
    tl.store(seq_lens_ptr + seq, tl.where(has_any, begin + LEN, 0))
    for index in tl.static_range(LEN):
        position = begin + index
        is_token = (has_any if index == 0 else asks) & (position >= 0)
        token = tl.load(token_ids_ptr + row * token_stride + position + id_shift, mask=is_token, other=0)
        block = tl.load(block_tables_ptr + row * table_stride + position // BLOCK_SIZE, mask=is_token, other=0)
        at = seq * LEN + index
        tl.store(input_ids_ptr + at, token.to(tl.int64))
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        if SIDE_BY_SIDE:
            position = known + depth
        tl.store(positions_ptr + at, tl.where(is_token, position, 0).to(tl.int64))
        tl.store(slot_mapping_ptr + at, tl.where(is_token, slot, -1))


def draft_inputs(
    rows: torch.Tensor,
    num_drafts: torch.Tensor,
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    num_tokens: int,
    offset: int,
    id_shift: int = 0,
    least: int = 1,
    depth: int | None = None,
    follows: bool = False,
) -> None:
    """Fill the last four positional arguments with `num_tokens` tokens per sequence; elsewhere ids are 0 and slots -1.

    Args:
        rows: [num_seqs] int32; -1 is padding.
        num_drafts: [num_seqs] int32, the drafts each sequence asks for; one that asks for fewer than `least` gets none.
        token_ids, num_known, block_tables: the rows, as in `step_inputs`.
        input_ids, positions, slot_mapping: [num_seqs * num_tokens] int64, written.
        seq_lens: [num_seqs] int32, written: tokens of each sequence including these; 0 for a sequence that gets none.
        offset: position of the first token, counted from the first token that is not known.
        id_shift: the ids are those of the tokens this many further on.
        depth: the tokens are nodes of a tree, side by side: their position, counted from the first token that is not
            known; None: they follow one another.
        follows: a sequence that asks for fewer drafts still gets the first token.
    """
    _draft_inputs[(rows.shape[0],)](
        rows_ptr=rows,
        num_drafts_ptr=num_drafts,
        token_ids_ptr=token_ids,
        num_known_ptr=num_known,
        block_tables_ptr=block_tables,
        input_ids_ptr=input_ids,
        positions_ptr=positions,
        slot_mapping_ptr=slot_mapping,
        seq_lens_ptr=seq_lens,
        offset=offset,
        id_shift=id_shift,
        least=least,
        depth=depth or 0,
        token_stride=token_ids.stride(0),
        table_stride=block_tables.stride(0),
        LEN=num_tokens,
        BLOCK_SIZE=block_size,
        SIDE_BY_SIDE=depth is not None,
        FOLLOWS=follows,
        num_warps=1,
        **launch_options(rows.device),
    )


@triton.jit(do_not_specialize=["index", "num_seqs"])
def _push_drafts(
    rows_ptr, num_drafts_ptr, drafted_ptr, token_ids_ptr, num_known_ptr, num_real_ptr,
    index, num_seqs, token_stride,
    SEQS: tl.constexpr, NUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.arange(0, SEQS)
    row = tl.load(rows_ptr + seq, mask=seq < num_seqs, other=-1).to(tl.int64)
    num_asked = tl.load(num_drafts_ptr + seq, mask=row >= 0, other=0)
    known = tl.load(num_known_ptr + row, mask=row >= 0, other=0)
    for i in tl.static_range(NUM):
        token = tl.load(drafted_ptr + seq * NUM + i, mask=num_asked > index + i, other=0)
        tl.store(token_ids_ptr + row * token_stride + known + index + i, token.to(tl.int32), mask=num_asked > index + i)
    tl.store(num_real_ptr + row, tl.minimum(num_asked, index + NUM), mask=num_asked > index)


def push(
    rows: torch.Tensor,
    num_drafts: torch.Tensor,
    drafted: torch.Tensor,
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    num_real: torch.Tensor,
    index: int,
) -> None:
    """Write drafts after the known tokens of every sequence that asks for that many.

    Args:
        drafted: [num_seqs] or [num_seqs, num] ids, of draft `index` and the drafts after it.
        num_real: [max_rows] int32, written: the number of drafts that a row has now.
        The others are those of `draft_inputs`.
    """
    num_seqs = rows.shape[0]
    _push_drafts[(1,)](
        rows_ptr=rows,
        num_drafts_ptr=num_drafts,
        drafted_ptr=drafted,
        token_ids_ptr=token_ids,
        num_known_ptr=num_known,
        num_real_ptr=num_real,
        index=index,
        num_seqs=num_seqs,
        token_stride=token_ids.stride(0),
        SEQS=triton.next_power_of_2(num_seqs),
        NUM=1 if drafted.dim() == 1 else drafted.shape[1],
        **launch_options(rows.device),
    )


@triton.jit
def _following(
    rows_ptr, query_start_ptr, seq_lens_ptr, token_ids_ptr, following_ptr, positions_ptr,
    token_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0)
    row = tl.load(rows_ptr + seq).to(tl.int64)
    begin, end = tl.load(query_start_ptr + seq), tl.load(query_start_ptr + seq + 1)
    before = tl.load(seq_lens_ptr + seq) - (end - begin)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside, is_token = at < end, (at < end) & (row >= 0)
        position = before + at - begin
        token = tl.load(token_ids_ptr + row * token_stride + position + 1, mask=is_token, other=0)
        tl.store(following_ptr + at, token.to(tl.int64), mask=inside)
        tl.store(positions_ptr + at, tl.where(is_token, position, 0).to(tl.int64), mask=inside)


def following_ids(
    rows: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    token_ids: torch.Tensor,
    following: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Return the id after each token of a flat batch, and the tokens' positions, one after the other.

    Args:
        rows, query_start, seq_lens, token_ids: as in `step_inputs`; no sequence fills its row.
        following, positions: [num_tokens] int64, written; 0 for padding.
    """
    _following[(rows.shape[0],)](
        rows_ptr=rows,
        query_start_ptr=query_start,
        seq_lens_ptr=seq_lens,
        token_ids_ptr=token_ids,
        following_ptr=following,
        positions_ptr=positions,
        token_stride=token_ids.stride(0),
        BLOCK=_BLOCK,
        **launch_options(rows.device),
    )


def cost(num_seqs: int, num_drafts: int) -> tuple[int, int]:
    """Return (bytes, FLOPs) of pushing `num_drafts` drafts per sequence: each id in and out. Latency-bound."""
    return num_seqs * num_drafts * (8 + 4), 0
