"""Prompt lookup: a draft model that costs nothing. Earlier text predicts what comes next.

Answers repeat their prompts: names, code, whole passages. So the last tokens of a sequence are looked up earlier in it,
and what followed them there is proposed; the model verifies the proposals like any others.

    the cat sat on the mat and then the cat
    ======= ------------->          =======     the last two tokens occurred before; what followed them is proposed

Sources: Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton

if TYPE_CHECKING:
    import numpy as np

_BLOCK = 1024  # tokens that a program of `_find_matches` takes at a time
_FIND_PROGRAMS = 2048  # about as many as a GPU holds at once; a short batch of long rows is spread over all of it

# A match as an integer: larger is better, 0 is none. From the highest bits: how many tokens match, how many may be
# proposed, where the earlier occurrence ends.
_MATCHED_SHIFT = tl.constexpr(40)
_COUNT_SHIFT = tl.constexpr(32)
_MAX_DRAFTS = 255  # the most that the bits between the two can hold


def find_match(tokens: np.ndarray, max_ngram: int, min_ngram: int, num_drafts: int) -> int:
    """Return where in one sequence the proposals begin: the rule itself.

    It is the earlier position before which the most tokens match the sequence's end, at least `min_ngram` and at most
    `max_ngram`. Ties are broken by the number of tokens known after it, at most `num_drafts`, then by the latest
    position. An occurrence may overlap the sequence's end.

    Args:
        tokens: [length] integers.

    Returns:
        The index one past the earlier occurrence; `length` if nothing matches.
    """
    length, matched = len(tokens), 1
    ends = (tokens[:-1] == tokens[-1:]).nonzero()[0] + 1  # ascending, like every subset of them below
    for size in range(2, min(max_ngram, length - 1) + 1):
        longer = ends[ends.searchsorted(size) :]  # the others would begin before the sequence
        longer = longer[tokens[longer - size] == tokens[length - size]]
        if not len(longer):
            break
        ends, matched = longer, size
    if not len(ends) or matched < min_ngram:
        return length
    num_full = ends.searchsorted(length - num_drafts, side="right")
    return int(ends[max(num_full - 1, 0)])  # if the end cuts all of them short, the most tokens follow the earliest


def prompt_lookup_reference(
    token_ids: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, max_ngram: int, min_ngram: int, num_drafts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply `find_match` to several rows.

    Args:
        token_ids: [max_rows, max_len] integers.
        rows: [R] integers, the row of each sequence.
        lengths: [R] integers, the number of known tokens of each; at least 1.
        max_ngram, min_ngram, num_drafts: see `find_match`.

    Returns:
        [R, num_drafts] int64 proposals; after the last one, the sequence's last token is repeated. [R] int64, the
        number of proposals.
    """
    drafts = torch.empty((len(rows), num_drafts), dtype=torch.int64)
    counts = torch.zeros(len(rows), dtype=torch.int64)
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        tokens = token_ids[row, :length].cpu()
        begin = find_match(tokens.numpy(), max_ngram, min_ngram, num_drafts)
        proposed = tokens[begin : begin + num_drafts]
        drafts[i] = tokens[-1]
        drafts[i, : len(proposed)] = proposed
        counts[i] = len(proposed)
    return drafts.to(token_ids.device), counts.to(token_ids.device)


@triton.jit(do_not_specialize=["num_drafts"])
def _find_matches(
    token_ids_ptr, rows_ptr, num_known_ptr, best_ptr,
    num_drafts, token_stride,
    MAX_NGRAM: tl.constexpr, MIN_NGRAM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, chunk, num_chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows_ptr + i).to(tl.int64)
    if row < 0:
        return
    token_ids_ptr += row * token_stride
    length = tl.load(num_known_ptr + row)
    best_of_lanes = tl.zeros([BLOCK], tl.int64)
    for start in range(chunk * BLOCK, length - 1, num_chunks * BLOCK):
        last = start + tl.arange(0, BLOCK)  # the last token of a possible occurrence
        is_match = last < length - 1
        matched = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(MAX_NGRAM):
            wanted = tl.load(token_ids_ptr + tl.maximum(length - 1 - back, 0))
            is_match &= last >= back
            # Few lanes match a token, so all but the first of these loads read next to nothing.
            is_match &= tl.load(token_ids_ptr + last - back, mask=is_match, other=0) == wanted
            matched += is_match.to(tl.int32)
        count = tl.minimum(length - 1 - last, num_drafts).to(tl.int64)
        match = (matched.to(tl.int64) << _MATCHED_SHIFT) | (count << _COUNT_SHIFT) | (last + 1)
        best_of_lanes = tl.maximum(best_of_lanes, tl.where(matched >= MIN_NGRAM, match, 0))
    tl.store(best_ptr + i * num_chunks + chunk, tl.max(best_of_lanes))


@triton.jit(do_not_specialize=["num_drafts", "num_chunks"])  # num_chunks depends on the number of rows
def _propose(
    token_ids_ptr, rows_ptr, num_known_ptr, best_ptr, drafts_ptr, counts_ptr,
    num_drafts, num_chunks, token_stride, draft_stride,
    NUM_CHUNKS_PADDED: tl.constexpr, NUM_DRAFTS_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i).to(tl.int64)
    if row < 0:
        return
    chunk = tl.arange(0, NUM_CHUNKS_PADDED)
    match = tl.max(tl.load(best_ptr + i * num_chunks + chunk, mask=chunk < num_chunks, other=0))
    count = ((match >> _COUNT_SHIFT) & 255).to(tl.int32)
    index = tl.arange(0, NUM_DRAFTS_PADDED)
    at = tl.where(index < count, match.to(tl.int32) + index, tl.load(num_known_ptr + row) - 1)
    token = tl.load(token_ids_ptr + row * token_stride + at)
    tl.store(drafts_ptr + i * draft_stride + index, token, mask=index < num_drafts)
    tl.store(counts_ptr + i, count)


def prompt_lookup_triton(
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    num_known: torch.Tensor,
    drafts: torch.Tensor,
    counts: torch.Tensor,
    max_ngram: int,
    min_ngram: int,
) -> None:
    """Compute `prompt_lookup_reference` on the device. Launches depend on shapes alone, so a graph can hold them.

    Args:
        token_ids: [max_rows, max_len] int32.
        rows: [R] int32, the row of each sequence; -1 is padding, whose drafts and count are left as they are.
        num_known: [max_rows] int32, tokens of prompt and outputs; at least 1 in each of `rows`.
        drafts: [R, num_drafts] int32, written; num_drafts is at most 255. Rows may lie in wider ones.
        counts: [R] int32, written.
        max_ngram, min_ngram: see `find_match`.
    """
    (num_rows, num_drafts), max_len = drafts.shape, token_ids.shape[1]
    assert 1 <= min_ngram <= max_ngram and 1 <= num_drafts <= _MAX_DRAFTS
    num_blocks = triton.cdiv(max_len, _BLOCK)
    num_chunks = min(num_blocks, max(_FIND_PROGRAMS // num_rows, 1))
    best = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=rows.device)
    options = launch_options(rows.device)
    _find_matches[(num_rows, num_chunks)](
        token_ids_ptr=token_ids,
        rows_ptr=rows,
        num_known_ptr=num_known,
        best_ptr=best,
        num_drafts=num_drafts,
        token_stride=token_ids.stride(0),
        MAX_NGRAM=max_ngram,
        MIN_NGRAM=min_ngram,
        BLOCK=_BLOCK,
        num_warps=4,
        **options,
    )
    _propose[(num_rows,)](
        token_ids_ptr=token_ids,
        rows_ptr=rows,
        num_known_ptr=num_known,
        best_ptr=best,
        drafts_ptr=drafts,
        counts_ptr=counts,
        num_drafts=num_drafts,
        num_chunks=num_chunks,
        token_stride=token_ids.stride(0),
        draft_stride=drafts.stride(0),
        NUM_CHUNKS_PADDED=triton.next_power_of_2(num_blocks),
        NUM_DRAFTS_PADDED=triton.next_power_of_2(max(num_drafts, drafts.stride(0))),
        num_warps=1,
        **options,
    )


def cost(lengths: Sequence[int], num_drafts: int) -> tuple[int, int]:
    """Return (bytes, FLOPs): per sequence its row, its length and its tokens in, its drafts and their count out."""
    return 4 * (sum(lengths) + len(lengths) * (2 + num_drafts + 1)), 0
