"""Compute what is left of p after some tokens drawn from q have been rejected: the arithmetic of `rejection.py`.

    p_0 = softmax(logits / temperature), without what the filters cut      q_0 = softmax(draft logits / temperature)
    p_j = max(p_(j-1) - q_(j-1), 0) / its sum                              q_j = q_(j-1) without the j-th token

Nothing as wide as the vocabulary is stored: a program recomputes p_j from the logits and a few sums. The sums are per
tile of the vocabulary, so that the order of the additions, and with it a row's token, does not depend on the number of
rows. q_j's sum adds up what q_j still has: subtracting from the earlier sum would leave nothing but rounding errors
where the drafter was sure of its token.

Source: Jeon et al., "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement",
2024.
"""

from __future__ import annotations

from teachllm_kernels._triton import tl, triton
from teachllm_kernels.sampling.filtered_draw import is_kept
from teachllm_kernels.sampling.philox import STREAM_ACCEPT, uniform_numbers

_STREAM = tl.constexpr(STREAM_ACCEPT)
_ROUNDING = tl.constexpr(2.0**-20)  # p and q of the same logits may differ by this fraction and still count as equal


@triton.jit
def tile_masses(
    logits_ptr, first, end, scale, left_out_ptr, tops_ptr, masses_ptr, BLOCK: tl.constexpr, NUM_LEFT_OUT: tl.constexpr
):
    """Record, per tile of the tokens `first` up to `end`, the largest logit and the sum of 2^((x - largest) * scale).

    The NUM_LEFT_OUT ids at `left_out_ptr` are skipped.
    """
    for start in range(first, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
        for j in tl.static_range(NUM_LEFT_OUT):
            x = tl.where(ids == tl.load(left_out_ptr + j), float("-inf"), x)
        top = tl.maximum(tl.max(x), -3.4e38)  # keeps minus infinity out of the differences, where it would make NaN
        tl.store(tops_ptr + start // BLOCK, top)
        tl.store(masses_ptr + start // BLOCK, tl.sum(tl.exp2((x - top) * scale)))


@triton.jit
def joined(tops_ptr, masses_ptr, num_tiles, scale, NUM_TILES_PADDED: tl.constexpr):
    """Return the largest logit and the sum over all tiles."""
    tile = tl.arange(0, NUM_TILES_PADDED)
    top = tl.load(tops_ptr + tile, mask=tile < num_tiles, other=-3.4e38)
    mass = tl.load(masses_ptr + tile, mask=tile < num_tiles, other=0.0)
    highest = tl.max(top)
    return highest, tl.sum(mass * tl.exp2((top - highest) * scale))


@triton.jit
def inverse(mass):
    """Return 1 / `mass`, which is at least 1 because of the largest logit, unless there is none."""
    return 1.0 / tl.maximum(mass, 1e-30)


@triton.jit
def probability(x, ids, top, inverse_mass, scale, threshold, last_tied):
    return tl.where(is_kept(x, ids, threshold, last_tied), tl.exp2((x - top) * scale) * inverse_mass, 0.0)


@triton.jit
def draft_levels(y, top, mass, scale, NEVER_SHRINKS: tl.constexpr):
    """Return [siblings] the largest logit, and 1 / the sum, of what is left of q_0, q_1, ...

    Args:
        y: [siblings] their logits, in the order drawn.
        top, mass: of the vocabulary without the siblings; or, if q never shrinks, of all of it.
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
    """Return p_j of some tokens, where j = `num_rejected`.

    Args:
        p, y, ids: p_0, the drafter's logits and the ids of the tokens.
        siblings, tops, inverses, sums: [siblings] ids; largest logits and inverse sums of q_0, q_1, ...; the sums that
            divide p_1, p_2, ...

    Returns:
        p_j, and p_(j-1).
    """
    before = p
    for j in range(num_rejected):
        token, total = _at(siblings, j), _at(sums, j)
        q = tl.exp2((y - _at(tops, j)) * scale) * _at(inverses, j)
        # A rejected token has p < q, so nothing of it is left, even if rounding says otherwise. From here on its
        # value in q does not matter.
        rest = tl.where((ids == token) | (p - q <= p * _ROUNDING), 0.0, p - q)
        before = p
        # If nothing is left at all, the rejection was due to rounding alone: p stays as it was.
        p = tl.where(total > 0.0, rest * (1.0 / tl.where(total > 0.0, total, 1.0)), p)
    return p, before


@triton.jit
def walk(
    logits_ptr, draft_logits_ptr, siblings_ptr,
    most, seed, output_index, child_index, scale, top, inverse_mass, threshold, last_tied, draft_top, draft_mass,
    partial_sums_ptr, num_tiles,
    NUM_SIBLINGS: tl.constexpr, PADDED: tl.constexpr, REPLACED: tl.constexpr, NUM_TILES_PADDED: tl.constexpr,
):  # fmt: skip
    """Try a row's siblings in order until one is accepted or `most` are rejected.

    Args:
        logits_ptr, draft_logits_ptr, siblings_ptr: pointers to this row's values.
        top, inverse_mass, threshold, last_tied: what defines p_0, see `probability`.
        draft_top, draft_mass: see `draft_levels`.
        partial_sums_ptr: [NUM_SIBLINGS - 1, num_tiles] of max(p_(j-1) - q_(j-1), 0); the first `most` - 1 are filled.

    Returns:
        The accepted id or -1, the number rejected, and the arguments of `left`: siblings, tops, inverses, sums.
    """
    k, tile = tl.arange(0, PADDED), tl.arange(0, NUM_TILES_PADDED)
    tried = tl.load(siblings_ptr + k, mask=k < NUM_SIBLINGS, other=-1)
    x = tl.load(logits_ptr + tried, mask=tried >= 0, other=float("-inf")).to(tl.float32)
    y = tl.load(draft_logits_ptr + tried, mask=tried >= 0, other=float("-inf")).to(tl.float32)
    p = probability(x, tried, top, inverse_mass, scale, threshold, last_tied)
    tops, inverses = draft_levels(y, draft_top, draft_mass, scale, REPLACED or NUM_SIBLINGS == 1)
    q = tl.exp2((y - tops) * scale) * inverses  # each sibling's q when its turn comes
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
    """Return `values[j]`."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == j, values, 0))
