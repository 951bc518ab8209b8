"""What is left of p after some tokens that were drawn from q have been rejected: the arithmetic of `rejection.py`.

    p_0 = softmax(logits / temperature), without what the filters cut      q_0 = softmax(draft logits / temperature)
    p_j = max(p_(j-1) - q_(j-1), 0) / its sum                              q_j = q_(j-1) without the j-th token

Nothing as wide as the vocabulary is kept: a program works p_j out again from the logits and a few sums. Those are per
tile of the vocabulary, so that the order in which they are added up, and with it a row's token, does not depend on how
many rows there are. q_j's sum adds up what it still has: the difference to what it had would be nothing but rounding
where the drafter was sure of its token.

Source: Jeon et al., "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement",
2024.
"""

from __future__ import annotations

from teachllm_kernels._triton import tl, triton
from teachllm_kernels.sampling.filtered_draw import is_kept
from teachllm_kernels.sampling.philox import STREAM_ACCEPT, uniform_numbers

_STREAM = tl.constexpr(STREAM_ACCEPT)
_ROUNDING = tl.constexpr(2.0**-20)  # p and q of the same logits may differ by so much of either, and are the same


@triton.jit
def tile_masses(
    logits_ptr, first, end, scale, left_out_ptr, tops_ptr, masses_ptr, BLOCK: tl.constexpr, NUM_LEFT_OUT: tl.constexpr
):
    """Notes of each tile of the tokens `first` up to `end` the largest logit, and the sum of 2^((x - it) * scale).

    As if the ids in `left_out`, a pointer to NUM_LEFT_OUT of them, did not exist.
    """
    for start in range(first, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
        for j in tl.static_range(NUM_LEFT_OUT):
            x = tl.where(ids == tl.load(left_out_ptr + j), float("-inf"), x)
        top = tl.maximum(tl.max(x), -3.4e38)  # minus infinity stays out of the differences, where it would make a NaN
        tl.store(tops_ptr + start // BLOCK, top)
        tl.store(masses_ptr + start // BLOCK, tl.sum(tl.exp2((x - top) * scale)))


@triton.jit
def joined(tops_ptr, masses_ptr, num_tiles, scale, NUM_TILES_PADDED: tl.constexpr):
    """The largest logit and the sum of all tiles."""
    tile = tl.arange(0, NUM_TILES_PADDED)
    top = tl.load(tops_ptr + tile, mask=tile < num_tiles, other=-3.4e38)
    mass = tl.load(masses_ptr + tile, mask=tile < num_tiles, other=0.0)
    highest = tl.max(top)
    return highest, tl.sum(mass * tl.exp2((top - highest) * scale))


@triton.jit
def inverse(mass):
    """1 / `mass`, which is at least 1 by the largest logit's own share, unless there is none."""
    return 1.0 / tl.maximum(mass, 1e-30)


@triton.jit
def probability(x, ids, top, inverse_mass, scale, threshold, last_tied):
    return tl.where(is_kept(x, ids, threshold, last_tied), tl.exp2((x - top) * scale) * inverse_mass, 0.0)


@triton.jit
def draft_levels(y, top, mass, scale, NEVER_SHRINKS: tl.constexpr):
    """[siblings] the largest logit, and 1 / the sum, of what q_0, q_1, ... have left.

    Args:
        y: [siblings] their logits, in the order drawn.
        top, mass: of the vocabulary without them; or, where q never shrinks, of all of it.
    """
    tops = tl.zeros_like(y) + top
    masses = tl.zeros_like(y) + mass
    if not NEVER_SHRINKS:
        k = tl.arange(0, y.shape[0])
        is_left = k[None, :] >= k[:, None]  # [level, sibling]
        tops = tl.maximum(tops, tl.max(tl.where(is_left, y[None, :], float("-inf")), axis=1))
        weights = tl.exp2((y[None, :] - tops[:, None]) * scale)
        masses = mass * tl.exp2((top - tops) * scale) + tl.sum(tl.where(is_left, weights, 0.0), axis=1)
    return tops, inverse(masses)


@triton.jit
def left(p, y, ids, num_rejected, siblings, tops, inverses, sums, scale):
    """p_j of some tokens, j = `num_rejected`.

    Args:
        p, y, ids: p_0, the drafter's logits and the ids of the tokens.
        siblings, tops, inverses, sums: [siblings] ids; of q_0, q_1, ...; by what p_1, p_2, ... are divided.

    Returns:
        p_j, and p_(j-1).
    """
    before = p
    for j in range(num_rejected):
        token, total = _at(siblings, j), _at(sums, j)
        q = tl.exp2((y - _at(tops, j)) * scale) * _at(inverses, j)
        # A token that was rejected has p < q, and nothing left: also where rounding says otherwise. So what q says of
        # it from here on, nobody asks.
        rest = tl.where((ids == token) | (p - q <= p * _ROUNDING), 0.0, p - q)
        before = p
        # Where nothing is left of anything, it was rejected by rounding alone: p stays as it was.
        p = tl.where(total > 0.0, rest * (1.0 / tl.where(total > 0.0, total, 1.0)), p)
    return p, before


@triton.jit
def walk(
    logits_ptr, draft_logits_ptr, siblings_ptr,
    most, seed, output_index, child_index, scale, top, inverse_mass, threshold, last_tied, draft_top, draft_mass,
    partial_sums_ptr, num_tiles,
    NUM_SIBLINGS: tl.constexpr, PADDED: tl.constexpr, REPLACED: tl.constexpr, NUM_TILES_PADDED: tl.constexpr,
):  # fmt: skip
    """Tries a row's siblings, in their order, until one is accepted or `most` are rejected.

    Args:
        logits, draft_logits, siblings: pointers to this row's.
        top, inverse_mass, threshold, last_tied: what makes p_0, see `probability`.
        draft_top, draft_mass: see `draft_levels`.
        partial_sums: [NUM_SIBLINGS - 1, num_tiles] of max(p_(j-1) - q_(j-1), 0), of which `most` - 1 are there.

    Returns:
        the accepted id or -1, how many were rejected, and what `left` takes: siblings, tops, inverses, sums.
    """
    k, tile = tl.arange(0, PADDED), tl.arange(0, NUM_TILES_PADDED)
    tried = tl.load(siblings_ptr + k, mask=k < NUM_SIBLINGS, other=-1)
    x = tl.load(logits_ptr + tried, mask=tried >= 0, other=float("-inf")).to(tl.float32)
    y = tl.load(draft_logits_ptr + tried, mask=tried >= 0, other=float("-inf")).to(tl.float32)
    p = probability(x, tried, top, inverse_mass, scale, threshold, last_tied)
    tops, inverses = draft_levels(y, draft_top, draft_mass, scale, REPLACED or NUM_SIBLINGS == 1)
    q = tl.exp2((y - tops) * scale) * inverses  # of each sibling when its turn comes
    coins = uniform_numbers(tl.arange(0, PADDED // 4), seed, output_index, child_index, _STREAM)

    most = tl.minimum(most, tl.sum((tried >= 0).to(tl.int32)))
    sums = tl.full([PADDED], 1.0, tl.float32)
    accepted, j = -1, 0
    while (accepted < 0) & (j < most):
        if NUM_SIBLINGS > 1:
            is_summed = (tile < num_tiles) & (j > 0)
            total = tl.sum(tl.load(partial_sums_ptr + (j - 1) * num_tiles + tile, mask=is_summed, other=0.0))
            sums = tl.where(k == j - 1, total, sums)
        p_here, _ = left(p, y, tried, j, tried, tops, inverses, sums, scale)
        # Not p / q, where q may be 0.
        wins = tl.sum(((k == j) & (coins * q < p_here)).to(tl.int32)) > 0
        accepted = tl.where(wins, _at(tried, j), -1)
        j += tl.where(wins, 0, 1)
    return accepted, j, tried, tops, inverses, sums


@triton.jit
def _at(values, j):
    """`values[j]`."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == j, values, 0))
