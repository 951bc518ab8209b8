"""Drafts in the rows of a batch on the device, from where they are guessed to where they hold or fall.

A row's known tokens end at `num_known`; behind them lie its drafts, which the next step computes and verifies. The host
counts on all of them and never waits to learn how many held:

    token_ids   | prompt and output | d1 d2 d3 |        num_known points at d1
    accept      the tokens sampled at each position are compared with the drafts: those that hold are there already,
                the first that differs is written over its draft, and `num_known` moves behind it
    push        a drafted token is written behind the known ones
    inputs      the flat tokens of a drafter's next forward pass: the newest known ones, or the last draft

Source of the rule: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton

_BLOCK = 64


@triton.jit
def _accept_drafts(
    first, rows, sampled, token_ids, num_known, num_real, last, outputs, output_row, token_stride, output_stride,
    WIDTH: tl.constexpr, FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0)
    begin = tl.load(first + seq)
    num_drafts = tl.load(first + seq + 1) - begin - 1
    row = tl.load(rows + begin).to(tl.int64)
    if (row < 0) | (num_drafts < 0):
        tl.store(last + seq, 0)
        return
    known = tl.load(num_known + row)
    index = tl.arange(0, WIDTH)
    behind = token_ids + row * token_stride + known + index
    token = tl.load(sampled + begin + index, mask=index <= num_drafts, other=-1).to(tl.int32)
    draft = tl.load(behind, mask=index < num_drafts, other=-2)
    num_held = tl.min(tl.where(token == draft, WIDTH, index))
    tl.store(behind, token, mask=index == num_held)
    tl.store(num_known + row, known + num_held + 1)
    num_verified = tl.minimum(tl.load(num_real + row), num_drafts)
    tl.store(num_real + row, 0)
    tl.store(last + seq, begin + num_held)
    told = outputs + tl.load(output_row) * output_stride + seq * FIELDS
    tl.store(told, num_held + 1)
    tl.store(told + 1, num_verified)
    tl.store(told + 2 + index, token, mask=index <= num_held)


def accept(
    first: torch.Tensor,
    rows: torch.Tensor,
    sampled: torch.Tensor,
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    num_real: torch.Tensor,
    last: torch.Tensor,
    outputs: torch.Tensor,
    output_row: torch.Tensor,
    num_fields: int,
) -> None:
    """Keeps the drafts that hold, and the one token after them; for one logits row of each, that one.

    Args:
        first: [num_seqs + 1] int32, the first logits row of each sequence that samples; its drafts are one fewer than
            its logits rows. A sequence of padding begins at a row of padding.
        rows: [R + 1] int32, the request row of each logits row; -1 is padding.
        sampled: [R] int64, the token of each logits row.
        token_ids: [max_rows, max_len] int32, drafts behind the known tokens.
        num_known: [max_rows] int32, counted up in place.
        num_real: [max_rows] int32, how many drafts of each row its drafter stood behind; set to 0.
        last: [num_seqs] int32, written: the logits row after whose token the known ones end.
        outputs: [num_steps, size] int32, on the device or in the host's pinned memory. Of each sequence `num_fields`
            numbers: how many tokens it gained, how many drafts were verified, those tokens.
        output_row: [1] int32, the row of `outputs` to write to.
    """
    _accept_drafts[(first.shape[0] - 1,)](
        *(first, rows, sampled, token_ids, num_known, num_real, last, outputs, output_row),
        *(token_ids.stride(0), outputs.stride(0)),
        WIDTH=triton.next_power_of_2(num_fields - 2),
        FIELDS=num_fields,
        num_warps=1,
        **launch_options(rows.device),
    )


@triton.jit(do_not_specialize=["offset", "id_shift", "least"])
def _draft_inputs(
    rows, num_drafts, token_ids, num_known, block_tables, input_ids, positions, slot_mapping, seq_lens,
    offset, id_shift, least, token_stride, table_stride,
    LEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0)
    row = tl.load(rows + seq).to(tl.int64)
    asks = (row >= 0) & (tl.load(num_drafts + seq) >= least)
    begin = tl.load(num_known + row, mask=asks, other=0) + offset
    tl.store(seq_lens + seq, tl.where(asks, begin + LEN, 0))
    for index in tl.static_range(LEN):
        position = begin + index
        is_token = asks & (position >= 0)
        token = tl.load(token_ids + row * token_stride + position + id_shift, mask=is_token, other=0)
        block = tl.load(block_tables + row * table_stride + position // BLOCK_SIZE, mask=is_token, other=0)
        at = seq * LEN + index
        tl.store(input_ids + at, token.to(tl.int64))
        tl.store(positions + at, tl.where(is_token, position, 0).to(tl.int64))
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(slot_mapping + at, tl.where(is_token, slot, -1))


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
) -> None:
    """Fills the last four positional ones with `num_tokens` tokens of each sequence; of others ids 0 and slots -1.

    Args:
        rows: [num_seqs] int32; -1 is padding.
        num_drafts: [num_seqs] int32, how many each asks for; one that asks for fewer than `least` gets none.
        token_ids, num_known, block_tables: the rows, as in `step_inputs`.
        input_ids, positions, slot_mapping: [num_seqs * num_tokens] int64, written.
        seq_lens: [num_seqs] int32, written: tokens of each sequence with these; 0 for who gets none.
        offset: of the first one's position, from the first token that is not known.
        id_shift: the ids are those of the tokens so many places further on.
    """
    _draft_inputs[(rows.shape[0],)](
        *(rows, num_drafts, token_ids, num_known, block_tables, input_ids, positions, slot_mapping, seq_lens),
        *(offset, id_shift, least, token_ids.stride(0), block_tables.stride(0)),
        LEN=num_tokens,
        BLOCK_SIZE=block_size,
        num_warps=1,
        **launch_options(rows.device),
    )


@triton.jit(do_not_specialize=["index", "num_seqs"])
def _push_drafts(
    rows, num_drafts, drafted, token_ids, num_known, num_real, index, num_seqs, token_stride,
    SEQS: tl.constexpr, NUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.arange(0, SEQS)
    row = tl.load(rows + seq, mask=seq < num_seqs, other=-1).to(tl.int64)
    num_asked = tl.load(num_drafts + seq, mask=row >= 0, other=0)
    known = tl.load(num_known + row, mask=row >= 0, other=0)
    for i in tl.static_range(NUM):
        token = tl.load(drafted + seq * NUM + i, mask=num_asked > index + i, other=0)
        tl.store(token_ids + row * token_stride + known + index + i, token.to(tl.int32), mask=num_asked > index + i)
    tl.store(num_real + row, tl.minimum(num_asked, index + NUM), mask=num_asked > index)


def push(
    rows: torch.Tensor,
    num_drafts: torch.Tensor,
    drafted: torch.Tensor,
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    num_real: torch.Tensor,
    index: int,
) -> None:
    """Writes drafts of every sequence that asks for so many behind its known tokens.

    Args:
        drafted: [num_seqs] or [num_seqs, num] ids, of draft `index` and those after it.
        num_real: [max_rows] int32, written: drafts that a row has by now.
        The others as of `draft_inputs`.
    """
    num_seqs = rows.shape[0]
    _push_drafts[(1,)](
        *(rows, num_drafts, drafted, token_ids, num_known, num_real, index, num_seqs, token_ids.stride(0)),
        SEQS=triton.next_power_of_2(num_seqs),
        NUM=1 if drafted.dim() == 1 else drafted.shape[1],
        **launch_options(rows.device),
    )


@triton.jit
def _following(
    rows, query_start, positions, token_ids, following, token_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0)
    row = tl.load(rows + seq).to(tl.int64)
    begin, end = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        place = tl.load(positions + at, mask=at < end, other=0) + 1
        token = tl.load(token_ids + row * token_stride + place, mask=(at < end) & (row >= 0), other=0)
        tl.store(following + at, token.to(tl.int64), mask=at < end)


def following_ids(
    rows: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    following: torch.Tensor,
) -> None:
    """The id that stands after each token of a flat batch.

    Args:
        rows, query_start, token_ids: as of `step_inputs`.
        positions: [num_tokens] int64; no token is the last of a full row.
        following: [num_tokens] int64, written; 0 for padding.
    """
    _following[(rows.shape[0],)](
        *(rows, query_start, positions, token_ids, following, token_ids.stride(0)),
        BLOCK=_BLOCK,
        **launch_options(rows.device),
    )


@triton.jit
def _draft_proposals(
    first, rows, token_ids, num_known, num_drawn, siblings, draft_rows, token_stride, max_drafts,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0)
    begin, end = tl.load(first + seq), tl.load(first + seq + 1)
    row = tl.load(rows + begin).to(tl.int64)
    index = tl.arange(0, WIDTH)
    inside = begin + index < end
    drawn = (row >= 0) & (begin + index < end - 1)
    drawn = drawn & (index < tl.load(num_drawn + row, mask=row >= 0, other=0))
    known = tl.load(num_known + row, mask=row >= 0, other=0)
    draft = tl.load(token_ids + row * token_stride + known + index, mask=drawn, other=-1)
    tl.store(siblings + begin + index, draft, mask=inside)
    tl.store(draft_rows + begin + index, tl.where(drawn, row * max_drafts + index, -1).to(tl.int32), mask=inside)


def draft_proposals(
    first: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    num_drawn: torch.Tensor,
    siblings: torch.Tensor,
    draft_rows: torch.Tensor,
    max_drafts: int,
) -> None:
    """What rejection sampling needs to know of each logits row's draft.

    Args:
        first, rows, token_ids, num_known: as of `accept`, before it.
        num_drawn: [max_rows] int32, how many drafts of each row were drawn from logits that were kept.
        siblings, draft_rows: [R] int32, written for all rows of a sequence: the draft, and which row of the kept logits
            it was drawn from, `row * max_drafts + index`; -1: none.
    """
    _draft_proposals[(first.shape[0] - 1,)](
        *(first, rows, token_ids, num_known, num_drawn, siblings, draft_rows, token_ids.stride(0), max_drafts),
        WIDTH=triton.next_power_of_2(max_drafts + 1),
        num_warps=1,
        **launch_options(rows.device),
    )


@triton.jit(do_not_specialize=["threshold"])
def _synthetic_drafts(
    first, rows, sampled, token_ids, num_known, token_stride, threshold, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0)
    begin, end = tl.load(first + seq), tl.load(first + seq + 1)
    row = tl.load(rows + begin).to(tl.int64)
    index = tl.arange(0, WIDTH)
    is_draft = (row >= 0) & (begin + index < end - 1)
    known = tl.load(num_known + row, mask=row >= 0, other=0)
    draft = tl.load(token_ids + row * token_stride + known + index, mask=is_draft, other=-1).to(tl.int64)
    token = tl.load(sampled + begin + index, mask=is_draft, other=0)
    coin, _, _, _ = tl.philox(0, known + index, row.to(tl.int32), 0, 0)
    other = tl.where(token == draft, (token == 0).to(tl.int64), token)
    holds = (coin >> 8).to(tl.int32) < threshold
    tl.store(sampled + begin + index, tl.where(holds, draft, other), mask=is_draft)


def synthetic_verdict(
    first: torch.Tensor,
    rows: torch.Tensor,
    sampled: torch.Tensor,
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    rate: float,
    max_drafts: int,
) -> None:
    """For benchmarks: makes each draft hold by a seeded coin, in the mean `rate` of them; the text means nothing.

    Args:
        sampled: [R] int64, changed in place. The others as of `accept`, before it.
    """
    _synthetic_drafts[(first.shape[0] - 1,)](
        *(first, rows, sampled, token_ids, num_known, token_ids.stride(0), int(rate * 2**24)),
        WIDTH=triton.next_power_of_2(max_drafts + 1),
        num_warps=1,
        **launch_options(rows.device),
    )


def cost(num_seqs: int, num_drafts: int) -> tuple[int, int]:
    """(bytes, FLOPs) of accepting and pushing again so many drafts of each sequence. It is latency.

    Of each token its sampled id and its draft in, and an id out to the row and to the host; of each draft its id in and
    out, of each sequence its row and its length.
    """
    return num_seqs * ((num_drafts + 1) * (8 + 4 + 2 * 4) + num_drafts * (8 + 4) + 16), 0
