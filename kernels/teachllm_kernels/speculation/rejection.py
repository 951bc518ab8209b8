"""The rule of `rejection_reference.py` as kernels, without a transfer to the host between the logits and the token.

    _measure  per chunk of a row: sums for its p and q if there are proposals, else the best token with its noise
    _cut      per row with filters: what they keep; without proposals, the draw
    _reject   per chunk, once per proposal: tries the earlier ones, and if they were rejected sums up what is left of p;
              the last time, if all were rejected, finds the best token of it
    _settle   per row: the proposal that was accepted, or the best token of all chunks

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton
from teachllm_kernels.sampling.filtered_draw import (
    best_packed,
    filtered_cut,
    group_stats,
    kept_draw,
    kept_mass,
    unpacked_id,
)
from teachllm_kernels.sampling.parameter_table import CHILD_INDEX, IS_FILTERED, SEED, TEMPERATURE, ParameterTable
from teachllm_kernels.sampling.philox import STREAM_SAMPLE, gumbel_noise
from teachllm_kernels.sampling.random_sample import best_of_chunk, filter_scratch, filter_sizes
from teachllm_kernels.sampling.random_sample import workspace_bytes as sampling_bytes
from teachllm_kernels.speculation.residual import inverse, joined, left, probability, tile_masses, walk

_BLOCK = 1024  # tokens that a program takes at a time, and that are summed as one tile
_PROGRAMS = 2048  # about as many as a GPU holds at once
_CUT_WARPS = 8


@triton.jit
def _proposal(i, rows_ptr, draft_rows_ptr, siblings_ptr, siblings_stride, floats_ptr, floats_stride):
    """Return the request row, its temperature, and the row of the proposals' logits, or -1 if there is none."""
    row = tl.load(rows_ptr + i).to(tl.int64)
    heat = tl.load(floats_ptr + tl.maximum(row, 0) * floats_stride + TEMPERATURE)
    is_proposed = (row >= 0) & (heat > 0.0) & (tl.load(siblings_ptr + i * siblings_stride) >= 0)
    return row, heat, tl.where(is_proposed, tl.load(draft_rows_ptr + i).to(tl.int64), -1)


@triton.jit(do_not_specialize=["tiles_per_chunk"])  # it depends on the number of rows
def _measure(
    logits_ptr, draft_logits_ptr, rows_ptr, draft_rows_ptr, siblings_ptr,
    floats_ptr, ints_ptr, output_index_ptr,
    best_ptr, stats_ptr, group_max_ptr, group_mass_ptr,
    vocab_size, num_tiles, num_groups, tiles_per_chunk,
    logits_stride, draft_stride, siblings_stride, floats_stride, ints_stride,
    STREAM: tl.constexpr, NUM_LEFT_OUT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, FILTERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk, i = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, heat, source = _proposal(i, rows_ptr, draft_rows_ptr, siblings_ptr, siblings_stride, floats_ptr, floats_stride)
    if row < 0:
        return
    logits_ptr += i * logits_stride
    ints_ptr += row * ints_stride
    siblings_ptr += i * siblings_stride
    stats_ptr += i * 4 * num_tiles
    first = chunk * tiles_per_chunk * BLOCK
    end = tl.minimum(first + tiles_per_chunk * BLOCK, vocab_size)
    if source >= 0:
        draft_logits_ptr += source * draft_stride
        tops_ptr, scale = stats_ptr + 2 * num_tiles, 1.4426950408889634 / heat
        tile_masses(
            draft_logits_ptr, first, end, scale, siblings_ptr, tops_ptr, tops_ptr + num_tiles, BLOCK, NUM_LEFT_OUT
        )
    if FILTERED:
        is_filtered = tl.load(ints_ptr + IS_FILTERED) > 0
        if is_filtered:
            to = i * num_groups
            group_stats(logits_ptr, first, end, heat, group_max_ptr + to, group_mass_ptr + to, BLOCK, GROUP)
            return
    if source >= 0:
        tile_masses(
            logits_ptr, first, end, 1.4426950408889634 / heat, siblings_ptr, stats_ptr, stats_ptr + num_tiles, BLOCK, 0
        )
        return
    key, child = tl.load(ints_ptr + SEED), tl.load(ints_ptr + CHILD_INDEX)
    packed = best_of_chunk(logits_ptr, first, end, heat, key, tl.load(output_index_ptr + i), child, STREAM, BLOCK, True)
    tl.store(best_ptr + i * tl.num_programs(0) + chunk, packed)


@triton.jit
def _cut(
    logits_ptr, rows_ptr, draft_rows_ptr, siblings_ptr,
    floats_ptr, ints_ptr, output_index_ptr,
    group_max_ptr, group_mass_ptr, listed_ptr, candidates_ptr, cuts_ptr, last_tied_ptr, out_ptr,
    vocab_size, num_groups,
    logits_stride, siblings_stride, floats_stride, ints_stride,
    STREAM: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS_PADDED: tl.constexpr, TILE: tl.constexpr,
    CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    row, heat, source = _proposal(i, rows_ptr, draft_rows_ptr, siblings_ptr, siblings_stride, floats_ptr, floats_stride)
    if row < 0:
        return
    floats_ptr += row * floats_stride
    ints_ptr += row * ints_stride
    if tl.load(ints_ptr + IS_FILTERED) == 0:
        return
    logits_ptr += i * logits_stride
    listed_ptr += i * num_groups
    to = i * num_groups
    threshold, last, num_listed, top = filtered_cut(
        logits_ptr, floats_ptr, ints_ptr,
        group_max_ptr + to, group_mass_ptr + to, listed_ptr, candidates_ptr + i * CANDIDATES,
        vocab_size, num_groups, GROUP, NUM_GROUPS_PADDED, TILE, CANDIDATES,
    )  # fmt: skip
    if source >= 0:
        tl.store(cuts_ptr + 3 * i, threshold)
        tl.store(cuts_ptr + 3 * i + 1, top)
        mass = kept_mass(logits_ptr, heat, threshold, last, top, listed_ptr, num_listed, vocab_size, GROUP, TILE)
        tl.store(cuts_ptr + 3 * i + 2, mass)
        tl.store(last_tied_ptr + i, last)
    else:
        token = kept_draw(
            logits_ptr, floats_ptr, ints_ptr, threshold, last, tl.load(output_index_ptr + i),
            listed_ptr, num_listed, vocab_size, STREAM, GROUP, TILE,
        )  # fmt: skip
        tl.store(out_ptr + i, token)


@triton.jit(do_not_specialize=["most", "tiles_per_chunk"])
def _reject(
    logits_ptr, draft_logits_ptr, rows_ptr, draft_rows_ptr, siblings_ptr,
    floats_ptr, ints_ptr, output_index_ptr,
    best_ptr, stats_ptr, sums_ptr, cuts_ptr, last_tied_ptr,
    most, vocab_size, num_tiles, tiles_per_chunk,
    logits_stride, draft_stride, siblings_stride, floats_stride, ints_stride,
    STREAM: tl.constexpr, BLOCK: tl.constexpr, NUM_SIBLINGS: tl.constexpr, PADDED: tl.constexpr,
    REPLACED: tl.constexpr, NUM_TILES_PADDED: tl.constexpr, FILTERED: tl.constexpr, IS_LAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk, i = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, heat, source = _proposal(i, rows_ptr, draft_rows_ptr, siblings_ptr, siblings_stride, floats_ptr, floats_stride)
    if source < 0:
        return
    logits_ptr += i * logits_stride
    ints_ptr += row * ints_stride
    draft_logits_ptr += source * draft_stride
    siblings_ptr += i * siblings_stride
    stats_ptr += i * 4 * num_tiles
    if NUM_SIBLINGS > 1:
        sums_ptr += i * (NUM_SIBLINGS - 1) * num_tiles
    scale = 1.4426950408889634 / heat
    key, child = tl.load(ints_ptr + SEED), tl.load(ints_ptr + CHILD_INDEX)
    output = tl.load(output_index_ptr + i)
    top, mass = joined(stats_ptr, stats_ptr + num_tiles, num_tiles, scale, NUM_TILES_PADDED)
    threshold, last = float("-inf"), 0
    if FILTERED:
        is_filtered = tl.load(ints_ptr + IS_FILTERED) > 0
        if is_filtered:
            threshold, last = tl.load(cuts_ptr + 3 * i), tl.load(last_tied_ptr + i)
            top, mass = tl.load(cuts_ptr + 3 * i + 1), tl.load(cuts_ptr + 3 * i + 2)
    stats_ptr += 2 * num_tiles
    draft_top, draft_mass = joined(stats_ptr, stats_ptr + num_tiles, num_tiles, scale, NUM_TILES_PADDED)
    share = inverse(mass)
    accepted, num_rejected, tried, tops, shares, totals = walk(
        logits_ptr, draft_logits_ptr, siblings_ptr, most, key, output, child, scale, top, share, threshold, last,
        draft_top, draft_mass, sums_ptr, num_tiles, NUM_SIBLINGS, PADDED, REPLACED, NUM_TILES_PADDED,
    )  # fmt: skip
    if IS_LAST:
        best_ptr += i * tl.num_programs(0) + chunk
        if accepted >= 0:  # all programs of the row agree
            tl.store(best_ptr, (0x7FFFFFFF - accepted).to(tl.int64))
            return
    else:
        if (num_rejected < most) | (
            tl.load(siblings_ptr + most) < 0
        ):  # decided already, or this is the last one to try
            return

    first = chunk * tiles_per_chunk * BLOCK
    end = tl.minimum(first + tiles_per_chunk * BLOCK, vocab_size)
    best_score = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = first + tl.arange(0, BLOCK)
    for start in range(first, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
        y = tl.load(draft_logits_ptr + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
        before = probability(x, ids, top, share, scale, threshold, last)
        rest, before = left(before, y, ids, num_rejected, tried, tops, shares, totals, scale)
        if IS_LAST:
            # If nothing is left, the draw is from what was there before. Otherwise that is far below: logarithms of
            # what is left are above -104, and noise lies between -3 and 23.
            is_left = rest > 0.0
            score = tl.log(tl.where(is_left, rest, before)) - tl.where(is_left, 0.0, 300.0)
            score += gumbel_noise(start // 4 + tl.arange(0, BLOCK // 4), key, output, child, STREAM)
            is_better = score > best_score
            best_score = tl.where(is_better, score, best_score)
            best_id = tl.where(is_better, ids, best_id)
        else:
            tl.store(sums_ptr + (most - 1) * num_tiles + start // BLOCK, tl.sum(rest))
    if IS_LAST:
        tl.store(best_ptr, best_packed(best_score, best_id))


@triton.jit(do_not_specialize=["num_chunks"])  # it depends on the number of rows
def _settle(
    rows_ptr, draft_rows_ptr, siblings_ptr, floats_ptr, ints_ptr, best_ptr, out_ptr,
    vocab_size, num_chunks,
    siblings_stride, floats_stride, ints_stride,
    NUM_CHUNKS_PADDED: tl.constexpr, FILTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    row, _, source = _proposal(i, rows_ptr, draft_rows_ptr, siblings_ptr, siblings_stride, floats_ptr, floats_stride)
    if row < 0:
        tl.store(out_ptr + i, 0)
        return
    if FILTERED:
        is_filtered = tl.load(ints_ptr + row * ints_stride + IS_FILTERED) > 0
        if is_filtered & (source < 0):  # drawn by `_cut`
            return
    chunk = tl.arange(0, NUM_CHUNKS_PADDED)
    packed = tl.load(best_ptr + i * num_chunks + chunk, mask=chunk < num_chunks, other=-(2**63))
    tl.store(out_ptr + i, unpacked_id(tl.max(packed)))


def rejection_sample_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    table: ParameterTable,
    output_index: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_rows: torch.Tensor,
    siblings: torch.Tensor,
    *,
    any_filtered: bool,
    replaced: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply filters, verify proposals and draw: one token per row of logits, without waiting for the device.

    Args:
        logits, rows, table, output_index: as in `sample_triton`.
        draft_logits: [Q, vocab_size] any float dtype, any stride between rows; proposals were drawn from
            softmax(draft_logits / the row's temperature), whatever filters the row has.
        draft_rows: [R] int32, the row of `draft_logits` that a row's proposals were drawn from; -1: no proposals.
        siblings: [R, M] int32, the proposals in the order drawn, then -1. All different unless `replaced`.
        any_filtered: False promises that no random row has a filter.
        replaced: a token could be drawn more than once.
        out: [R] int64 to write to.

    Returns:
        [R] int64, the tokens of `apply_filters` and `rejection_sample_reference`, up to rounding. A greedy row, and
        a row without proposals, gets its token of `sample_triton`. A row's token does not depend on the other rows,
        nor on their number.

    Raises:
        ValueError: the rows of logits or proposals are not contiguous.
    """
    (num_rows, vocab_size), num_siblings = logits.shape, siblings.shape[1]
    within = {t.stride(1) for t in (logits, draft_logits, siblings) if t.shape[1] > 1}
    if within - {1}:
        raise ValueError("logits and proposals must have their rows contiguous")
    device, is_shrinking = logits.device, num_siblings > 1 and not replaced
    out = torch.empty(num_rows, dtype=torch.int64, device=device) if out is None else out
    sizes = filter_sizes(vocab_size)
    num_tiles, num_groups = triton.cdiv(vocab_size, _BLOCK), triton.cdiv(vocab_size, sizes["GROUP"])
    tiles_per_chunk = triton.cdiv(num_tiles * num_rows, max(_PROGRAMS, num_rows))
    num_chunks = triton.cdiv(num_tiles, tiles_per_chunk)
    best = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=device)
    stats = torch.empty((num_rows, 4, num_tiles), dtype=torch.float32, device=device)
    sums = group_max = group_mass = listed = few = cuts = last_tied = None
    if num_siblings > 1:
        # Zeros, since two kernels could disagree by rounding whether a sum is needed.
        sums = torch.zeros((num_rows, num_siblings - 1, num_tiles), dtype=torch.float32, device=device)
    if any_filtered:
        group_max, group_mass, listed, few = filter_scratch(num_rows, vocab_size, device)
        cuts = torch.empty((num_rows, 3), dtype=torch.float32, device=device)
        last_tied = torch.empty(num_rows, dtype=torch.int32, device=device)

    logits_stride, draft_stride, siblings_stride = logits.stride(0), draft_logits.stride(0), siblings.stride(0)
    floats_stride, ints_stride = table.floats.stride(0), table.ints.stride(0)
    padded = triton.next_power_of_2(num_tiles)
    options = launch_options(device)
    _measure[(num_chunks, num_rows)](
        logits_ptr=logits, draft_logits_ptr=draft_logits,
        rows_ptr=rows, draft_rows_ptr=draft_rows, siblings_ptr=siblings,
        floats_ptr=table.floats, ints_ptr=table.ints, output_index_ptr=output_index,
        best_ptr=best, stats_ptr=stats, group_max_ptr=group_max, group_mass_ptr=group_mass,
        vocab_size=vocab_size, num_tiles=num_tiles, num_groups=num_groups, tiles_per_chunk=tiles_per_chunk,
        logits_stride=logits_stride, draft_stride=draft_stride, siblings_stride=siblings_stride,
        floats_stride=floats_stride, ints_stride=ints_stride,
        STREAM=STREAM_SAMPLE, NUM_LEFT_OUT=num_siblings if is_shrinking else 0,
        BLOCK=_BLOCK, GROUP=sizes["GROUP"], FILTERED=any_filtered,
        num_warps=4, **options,
    )  # fmt: skip
    if any_filtered:
        _cut[(num_rows,)](
            logits_ptr=logits, rows_ptr=rows, draft_rows_ptr=draft_rows, siblings_ptr=siblings,
            floats_ptr=table.floats, ints_ptr=table.ints, output_index_ptr=output_index,
            group_max_ptr=group_max, group_mass_ptr=group_mass, listed_ptr=listed, candidates_ptr=few,
            cuts_ptr=cuts, last_tied_ptr=last_tied, out_ptr=out,
            vocab_size=vocab_size, num_groups=num_groups,
            logits_stride=logits_stride, siblings_stride=siblings_stride,
            floats_stride=floats_stride, ints_stride=ints_stride,
            STREAM=STREAM_SAMPLE, **sizes,
            num_warps=_CUT_WARPS, **options,
        )  # fmt: skip
    for most in range(1, num_siblings + 1):  # rejected
        _reject[(num_chunks, num_rows)](
            logits_ptr=logits, draft_logits_ptr=draft_logits,
            rows_ptr=rows, draft_rows_ptr=draft_rows, siblings_ptr=siblings,
            floats_ptr=table.floats, ints_ptr=table.ints, output_index_ptr=output_index,
            best_ptr=best, stats_ptr=stats, sums_ptr=sums, cuts_ptr=cuts, last_tied_ptr=last_tied,
            most=most, vocab_size=vocab_size, num_tiles=num_tiles, tiles_per_chunk=tiles_per_chunk,
            logits_stride=logits_stride, draft_stride=draft_stride, siblings_stride=siblings_stride,
            floats_stride=floats_stride, ints_stride=ints_stride,
            STREAM=STREAM_SAMPLE, BLOCK=_BLOCK, NUM_SIBLINGS=num_siblings,
            PADDED=max(4, triton.next_power_of_2(num_siblings)), REPLACED=replaced, NUM_TILES_PADDED=padded,
            FILTERED=any_filtered, IS_LAST=most == num_siblings,
            num_warps=4, **options,
        )  # fmt: skip
    _settle[(num_rows,)](
        rows_ptr=rows, draft_rows_ptr=draft_rows, siblings_ptr=siblings,
        floats_ptr=table.floats, ints_ptr=table.ints,
        best_ptr=best, out_ptr=out,
        vocab_size=vocab_size, num_chunks=num_chunks,
        siblings_stride=siblings_stride, floats_stride=floats_stride, ints_stride=ints_stride,
        NUM_CHUNKS_PADDED=padded, FILTERED=any_filtered,
        num_warps=1, **options,
    )  # fmt: skip
    return out


def workspace_bytes(num_rows: int, vocab_size: int, num_siblings: int = 1) -> int:
    """Return the most bytes that `rejection_sample_triton` allocates for rows with filters, including the result."""
    per_tile = 4 * 4 + 4 * (num_siblings - 1)
    return sampling_bytes(num_rows, vocab_size) + num_rows * (-(-vocab_size // _BLOCK) * per_tile + 4 * 4)


def cost(num_rows: int, vocab_size: int, dtype_bytes: int = 4, num_rejected: int = 0) -> tuple[int, int]:
    """(bytes, FLOPs) of a proposal per row: logits and the drafter's in, one int64 id out.

    Per id 2 x 5 operations for sums of exp(logit - largest), and in each of the `num_rejected` rows a draw from what
    is left: 70 integer operations per four ids, and 18 float ones per id.
    """
    ids, drawn = num_rows * vocab_size, num_rejected * vocab_size
    return 2 * dtype_bytes * ids + 8 * num_rows, 10 * ids + drawn * 70 // 4 + 18 * drawn
