"""Verify the drafts in the rows of a batch on the device: what was proposed, which drafts hold, and what is reported.

A row's known tokens end at `num_known`, and its drafts, which a step has just computed, lie after them. The host
assumes that all of them hold and never waits to learn how many did:

    token_ids   | prompt and output | d0 d1 d2 |        num_known points at d0
    accept      the tokens sampled at each position are compared with the drafts after it. The tokens on the path that
                holds are written after the known ones, then the token sampled at its end, and `num_known` advances

Drafts are a tree: node i is d_i. Places also count the newest token, at place 0; node i is at place i + 1. In a chain
each node comes after the one before it. `DraftTree` makes the tensors that describe a tree.

Sources of the rules: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023; Miao et
al., "SpecInfer", ASPLOS 2024.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton


@triton.jit
def _draft_proposals(
    first_ptr, rows_ptr, token_ids_ptr, num_known_ptr, num_drawn_ptr, children_ptr, kept_ptr,
    siblings_ptr, draft_rows_ptr,
    token_stride, num_kept,
    WIDTH: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0)
    begin, end = tl.load(first_ptr + seq), tl.load(first_ptr + seq + 1)
    row = tl.load(rows_ptr + begin).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = begin + place < end
    known = tl.load(num_known_ptr + row, mask=row >= 0, other=0)
    count = tl.minimum(tl.load(num_drawn_ptr + row, mask=row >= 0, other=0), end - begin - 1)
    number = tl.load(kept_ptr + place, mask=inside, other=-1)
    for i in tl.static_range(MOST):
        node = tl.load(children_ptr + place * MOST + i, mask=inside, other=-1)
        drawn = (node >= 0) & (node < count)
        draft = tl.load(token_ids_ptr + row * token_stride + known + node, mask=drawn, other=-1)
        tl.store(siblings_ptr + (begin + place) * MOST + i, draft, mask=inside)
        if i == 0:
            tl.store(
                draft_rows_ptr + begin + place, tl.where(drawn, row * num_kept + number, -1).to(tl.int32), mask=inside
            )


def draft_proposals(
    first: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    num_drawn: torch.Tensor,
    children: torch.Tensor,
    kept: torch.Tensor,
    siblings: torch.Tensor,
    draft_rows: torch.Tensor,
    num_kept: int,
) -> None:
    """Write what rejection sampling needs to know about the drafts after each logits row's token.

    Args:
        first, rows, token_ids, num_known: as in `accept`, before it.
        num_drawn: [max_rows] int32, the number of each row's drafts that were drawn from logits that were kept.
        children, kept: of the tree, see `TreeTensors`.
        siblings, draft_rows: [R, most children] and [R] int32, written for all rows of a sequence: the drafts, and
            the row of the kept logits they were drawn from, `row * num_kept + kept[place]`; -1: none.
    """
    _draft_proposals[(first.shape[0] - 1,)](
        first_ptr=first,
        rows_ptr=rows,
        token_ids_ptr=token_ids,
        num_known_ptr=num_known,
        num_drawn_ptr=num_drawn,
        children_ptr=children,
        kept_ptr=kept,
        siblings_ptr=siblings,
        draft_rows_ptr=draft_rows,
        token_stride=token_ids.stride(0),
        num_kept=num_kept,
        WIDTH=triton.next_power_of_2(children.shape[0]),
        MOST=children.shape[1],
        num_warps=1,
        **launch_options(rows.device),
    )


@triton.jit(do_not_specialize=["threshold"])
def _synthetic_drafts(
    first_ptr, rows_ptr, sampled_ptr, token_ids_ptr, num_known_ptr, children_ptr,
    token_stride, threshold,
    WIDTH: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0)
    begin, end = tl.load(first_ptr + seq), tl.load(first_ptr + seq + 1)
    row = tl.load(rows_ptr + begin).to(tl.int64)
    place = tl.arange(0, WIDTH)
    node = tl.load(children_ptr + place * MOST, mask=begin + place < end, other=-1)
    is_draft = (row >= 0) & (node >= 0) & (node < end - begin - 1)
    known = tl.load(num_known_ptr + row, mask=row >= 0, other=0)
    draft = tl.load(token_ids_ptr + row * token_stride + known + node, mask=is_draft, other=-1).to(tl.int64)
    token = tl.load(sampled_ptr + begin + place, mask=is_draft, other=0)
    coin, _, _, _ = tl.philox(0, known + place, row.to(tl.int32), 0, 0)
    other = tl.where(token == draft, (token == 0).to(tl.int64), token)
    holds = (coin >> 8).to(tl.int32) < threshold
    tl.store(sampled_ptr + begin + place, tl.where(holds, draft, other), mask=is_draft)


def synthetic_verdict(
    first: torch.Tensor,
    rows: torch.Tensor,
    sampled: torch.Tensor,
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    children: torch.Tensor,
    rate: float,
) -> None:
    """For benchmarks: let a seeded coin decide whether the first draft after each token holds; the text is meaningless.

    Args:
        sampled: [R] int64, changed in place.
        children: of the tree, see `TreeTensors`.
        rate: the average fraction that holds. The others are those of `accept`, before it.
    """
    _synthetic_drafts[(first.shape[0] - 1,)](
        first_ptr=first,
        rows_ptr=rows,
        sampled_ptr=sampled,
        token_ids_ptr=token_ids,
        num_known_ptr=num_known,
        children_ptr=children,
        token_stride=token_ids.stride(0),
        threshold=int(rate * 2**24),
        WIDTH=triton.next_power_of_2(children.shape[0]),
        MOST=children.shape[1],
        num_warps=1,
        **launch_options(rows.device),
    )


@triton.jit
def _accept_drafts(
    first_ptr, rows_ptr, logit_index_ptr, sampled_ptr, token_ids_ptr, num_known_ptr, num_real_ptr, parents_ptr,
    last_ptr, last_token_ptr, path_ptr, places_ptr, outputs_ptr, output_row_ptr,
    token_stride, output_stride, num_nodes,
    WIDTH: tl.constexpr, LEVELS: tl.constexpr, HAS_PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0)
    begin = tl.load(first_ptr + seq)
    num_drafts = tl.load(first_ptr + seq + 1) - begin - 1
    row = tl.load(rows_ptr + begin).to(tl.int64)
    path_ptr += seq * LEVELS
    if (row < 0) | (num_drafts < 0):
        tl.store(last_ptr + seq, 0)
        tl.store(last_token_ptr + seq, 0)
        for level in tl.static_range(LEVELS):
            tl.store(path_ptr + level, -1)
        return
    newest, known = tl.load(logit_index_ptr + begin), tl.load(num_known_ptr + row)
    num_drafts = tl.minimum(num_drafts, tl.load(num_real_ptr + row))  # tokens after these are not drafts of the drafter
    index = tl.arange(0, WIDTH)
    behind_ptr = token_ids_ptr + row * token_stride + known
    token = tl.load(sampled_ptr + begin + index, mask=index <= num_drafts, other=-1).to(tl.int32)
    draft = tl.load(behind_ptr + index, mask=index < num_drafts, other=-2)
    parent = tl.load(parents_ptr + index, mask=index < num_nodes, other=-1)
    told_ptr = outputs_ptr + tl.load(output_row_ptr) * output_stride + seq * (3 + 2 * LEVELS)
    place, num_held = 0, 0
    for level in range(LEVELS + 1):
        said = tl.sum(tl.where(index == place, token, 0))
        is_reached = num_held == level
        tl.store(behind_ptr + level, said, mask=is_reached)
        tl.store(told_ptr + 2 + level, said, mask=is_reached)
        # Siblings are all different, except placeholders where nothing more could be drawn.
        node = tl.min(tl.where((parent == place) & (draft == said), index, WIDTH))
        holds = node < WIDTH
        is_level = level < LEVELS
        tl.store(path_ptr + level, tl.where(holds, node, -1), mask=is_level)
        tl.store(told_ptr + 3 + LEVELS + level, node, mask=holds & is_level)
        if HAS_PLACES:
            tl.store(places_ptr + newest + 1 + level, (newest + 1 + node).to(tl.int64), mask=holds)
        place = tl.where(holds, node + 1, place)
        num_held += holds.to(tl.int32)
    tl.store(num_known_ptr + row, known + num_held + 1)
    tl.store(num_real_ptr + row, 0)
    tl.store(last_ptr + seq, begin + place)
    tl.store(last_token_ptr + seq, newest + num_held)
    tl.store(told_ptr, num_held + 1)
    tl.store(told_ptr + 1, num_drafts)


def accept(
    first: torch.Tensor,
    rows: torch.Tensor,
    logit_index: torch.Tensor,
    sampled: torch.Tensor,
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    num_real: torch.Tensor,
    parents: torch.Tensor,
    last: torch.Tensor,
    last_token: torch.Tensor,
    path: torch.Tensor,
    places: torch.Tensor | None,
    outputs: torch.Tensor,
    output_row: torch.Tensor,
) -> None:
    """Keep the drafts that hold, and the one token after them; a sequence with one logits row keeps that token.

    Args:
        first: [num_seqs + 1] int32, the first logits row of each sequence that samples; its drafts are one fewer than
            its logits rows. A sequence of padding begins at a row of padding.
        rows: [R + 1] int32, the request row of each logits row; -1 is padding.
        logit_index: [R + 1] int32, the flat token of the step that each logits row belongs to.
        sampled: [R] int64, the token of each logits row.
        token_ids: [max_rows, max_len] int32, drafts after the known tokens.
        num_known: [max_rows] int32, advanced in place.
        num_real: [max_rows] int32, the number of each row's drafts that the drafter proposed; set to 0.
        parents: [num_nodes] int32, the place before each node.
        last: [num_seqs] int32, written: the logits row after whose token the known ones end.
        last_token: [num_seqs] int32, written: the flat token before the newest one, once the accepted tokens are
            compacted.
        path: [num_seqs, num_levels] int32, written: the nodes that hold, then -1.
        places: [num_tokens] int64 or None, written where drafts hold: for each flat token after compaction, its flat
            token in the step.
        outputs: [num_steps, size] int32, on the device or in the host's pinned memory. Per sequence 3 + 2 * num_levels
            numbers: how many tokens it gained, how many drafts were verified, those tokens, and from number
            3 + num_levels on the path.
        output_row: [1] int32, the row of `outputs` to write to.
    """
    num_nodes = parents.shape[0]
    _accept_drafts[(first.shape[0] - 1,)](
        first_ptr=first,
        rows_ptr=rows,
        logit_index_ptr=logit_index,
        sampled_ptr=sampled,
        token_ids_ptr=token_ids,
        num_known_ptr=num_known,
        num_real_ptr=num_real,
        parents_ptr=parents,
        last_ptr=last,
        last_token_ptr=last_token,
        path_ptr=path,
        places_ptr=places,
        outputs_ptr=outputs,
        output_row_ptr=output_row,
        token_stride=token_ids.stride(0),
        output_stride=outputs.stride(0),
        num_nodes=num_nodes,
        WIDTH=triton.next_power_of_2(num_nodes + 1),
        LEVELS=path.shape[1],
        HAS_PLACES=places is not None,
        num_warps=1,
        **launch_options(rows.device),
    )


def cost(num_seqs: int, num_drafts: int) -> tuple[int, int]:
    """Return (bytes, FLOPs) of accepting `num_drafts` drafts per sequence. Latency-bound.

    Per token its sampled id and its draft in, and an id out to the row and to the host; per sequence its row and its
    length.
    """
    return num_seqs * ((num_drafts + 1) * (8 + 4 + 2 * 4) + 16), 0
