"""One row's draw among the tokens that min-p, top-k and top-p keep, without sorting its 150,000 logits.

What the filters keep is described by a threshold: all logits above it, and of those equal to it the lowest ids.
Bisection finds it on the logits read as integers of the same order, so at most 32 steps reach the exact float. A step
counts and weighs the logits above a guess. It is fast because it has to look at few of them:

    1. the vocabulary is divided into groups of 64. While `group_stats` reads all logits, it records each group's
       largest logit and its mass (the sum of exp(logit / temperature), relative to the largest)
    2. these alone bound the threshold from below: the k-th largest of some of the logits is no larger than the k-th
       largest of all; tokens that together have less than (1 - p) of the mass are outside the nucleus; min-p is a
       bound as it is
    3. groups whose largest logit is below the bound are skipped. The others are usually a few dozen, which stay in
       the L1 cache; if all groups remain, the search is slower and equally right
    4. once no more than CANDIDATES logits lie between a guess that is too low and one that is too high, they stay in
       registers

Sources: those of `teachllm/sampling/filters.py`, whose `apply_filters` keeps the same tokens except for rounding: it
compares logits after division by the temperature, which can make neighbouring floats equal, and it adds up
probabilities in another order, which matters for a token on whose very edge the sum reaches p.
"""

from __future__ import annotations

from teachllm_kernels._triton import tl, triton
from teachllm_kernels.sampling.parameter_table import CHILD_INDEX, MIN_P, SEED, TEMPERATURE, TOP_K, TOP_P
from teachllm_kernels.sampling.philox import gumbel_noise

_NO_BOUND = tl.constexpr(-3.3e38)  # below every logit but minus infinity


@triton.jit
def ordered(x):
    """Map floats to int32 of the same order: a negative float's magnitude bits count the other way round."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def best_packed(score, ids):
    """Pack the largest score and, among equal ones, the lowest id into one int64, whose maximum is the winner."""
    score = tl.where(score == 0.0, 0.0, score)  # -0 equals 0, but would be ordered below it
    return tl.max((ordered(score).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64))


@triton.jit
def unpacked_id(packed):
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def group_stats(
    logits_ptr, first, end, temperature, group_max_ptr, group_mass_ptr, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    """Record the largest logit and the mass of each group of the tokens `first` up to `end`."""
    scale = 1.4426950408889634 / temperature  # of logits, for a power of 2 where exp is meant
    for start in range(first, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
        x = tl.reshape(x, [BLOCK // GROUP, GROUP])
        # Minus infinity stays out of the differences, where it would make a NaN.
        largest = tl.maximum(tl.max(x, axis=1), -3.4e38)
        mass = tl.sum(tl.exp2((x - largest[:, None]) * scale), axis=1)
        group = start // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(group_max_ptr + group, largest, mask=group * GROUP < end)
        tl.store(group_mass_ptr + group, mass, mask=group * GROUP < end)


@triton.jit
def filtered_draw(
    logits_ptr, floats_ptr, ints_ptr, output_index,
    group_max_ptr, group_mass_ptr, listed_ptr, candidates_ptr,
    vocab_size, num_groups,
    STREAM: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS_PADDED: tl.constexpr, TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the token id, int64. The pointers are to this row's values, `floats_ptr` and `ints_ptr` to its parameters.

    `listed_ptr` [num_groups] and `candidates_ptr` [CANDIDATES] point to scratch memory.
    """
    threshold, last_tied, num_listed, _ = filtered_cut(
        logits_ptr, floats_ptr, ints_ptr, group_max_ptr, group_mass_ptr, listed_ptr, candidates_ptr,
        vocab_size, num_groups, GROUP, NUM_GROUPS_PADDED, TILE, CANDIDATES,
    )  # fmt: skip
    return kept_draw(
        logits_ptr, floats_ptr, ints_ptr, threshold, last_tied, output_index,
        listed_ptr, num_listed, vocab_size, STREAM, GROUP, TILE,
    )  # fmt: skip


@triton.jit
def filtered_cut(
    logits_ptr, floats_ptr, ints_ptr,
    group_max_ptr, group_mass_ptr, listed_ptr, candidates_ptr,
    vocab_size, num_groups,
    GROUP: tl.constexpr, NUM_GROUPS_PADDED: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return what the filters keep, for `is_kept`.

    Returns:
        The threshold, the last id kept among those equal to it, the number of groups listed, and the largest logit.
    """
    temperature = tl.load(floats_ptr + TEMPERATURE)
    top_k, top_p = tl.load(ints_ptr + TOP_K).to(tl.int32), tl.load(floats_ptr + TOP_P)
    scale = 1.4426950408889634 / temperature  # of logits, for a power of 2 where exp is meant
    group = tl.arange(0, NUM_GROUPS_PADDED)
    largest = tl.load(group_max_ptr + group, mask=group < num_groups, other=-3.4e38)
    top = tl.max(largest)
    top = tl.where(top == 0.0, 0.0, top)  # not -0, after which the next integer is a 0 as large
    bound = _likelihood_bound(floats_ptr, temperature, top)
    mass = 0.0
    only_top_p = (top_p < 1.0) & (top_k >= vocab_size) & (bound <= _NO_BOUND)
    if only_top_p:
        group_weight = tl.load(group_mass_ptr + group, mask=group < num_groups, other=0.0)
        group_weight *= tl.exp2((largest - top) * scale)
        mass = tl.sum(group_weight)
        bound = _nucleus_bound(largest, group_weight, mass, top, top_p, scale, vocab_size, GROUP)
    else:
        bound = _top_k_bound(largest, bound, top, top_k)

    has_candidates = largest >= bound
    place = tl.cumsum(has_candidates.to(tl.int32), axis=0) - 1
    tl.store(listed_ptr + place, group, mask=has_candidates)
    num_listed = tl.sum(has_candidates.to(tl.int32))
    tl.debug_barrier()  # other threads read what one thread stored

    threshold = bound
    num_at_least, mass_at_least = _weigh(logits_ptr, listed_ptr, num_listed, vocab_size, bound, top, scale, GROUP, TILE)
    num_kept, num_above = num_at_least, 0
    if not only_top_p:
        mass = mass_at_least
    if top_k < num_at_least:
        threshold, num_at_least, mass_at_least, num_above, num_kept = _search(
            logits_ptr, listed_ptr, num_listed, vocab_size, threshold, num_at_least, mass_at_least, top, scale,
            top_k, 0.0, candidates_ptr, False, GROUP, TILE, CANDIDATES,
        )  # fmt: skip
        mass = mass_at_least - (num_at_least - num_kept) * tl.exp2((threshold - top) * scale)
    if top_p < 1.0:
        num_in_top_k = num_kept
        threshold, num_at_least, mass_at_least, num_above, num_kept = _search(
            logits_ptr, listed_ptr, num_listed, vocab_size, threshold, num_at_least, mass_at_least, top, scale,
            0, top_p * mass, candidates_ptr, True, GROUP, TILE, CANDIDATES,
        )  # fmt: skip
        num_kept = tl.minimum(num_kept, num_in_top_k)

    last_tied = vocab_size
    if num_kept < num_at_least:
        last_tied = _find_tied(
            logits_ptr, listed_ptr, num_listed, vocab_size, threshold, num_kept - num_above, GROUP, TILE
        )
    return threshold, last_tied, num_listed, top


@triton.jit
def is_kept(x, ids, threshold, last_tied):
    return (x > threshold) | ((x == threshold) & (ids <= last_tied))


@triton.jit
def kept_draw(
    logits_ptr, floats_ptr, ints_ptr, threshold, last_tied, output_index, listed_ptr, num_listed, vocab_size,
    STREAM: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the token id, int64, drawn from what `filtered_cut` keeps."""
    temperature = tl.load(floats_ptr + TEMPERATURE)
    seed, child_index = tl.load(ints_ptr + SEED), tl.load(ints_ptr + CHILD_INDEX)
    best = tl.full([TILE * GROUP], float("-inf"), tl.float32)
    best_id = tl.zeros([TILE * GROUP], tl.int32)
    for start in range(0, num_listed, TILE):
        x, ids = _candidates(logits_ptr, listed_ptr, start, num_listed, vocab_size, GROUP, TILE)
        x, ids = tl.reshape(x, [TILE * GROUP]), tl.reshape(ids, [TILE * GROUP])
        quads = tl.min(tl.reshape(ids // 4, [TILE * GROUP // 4, 4]), axis=1)  # four neighbours share a number
        score = x + temperature * gumbel_noise(quads, seed, output_index, child_index, STREAM)
        is_better = is_kept(x, ids, threshold, last_tied) & (score > best)
        best = tl.where(is_better, score, best)
        best_id = tl.where(is_better, ids, best_id)
    return unpacked_id(best_packed(best, best_id))


@triton.jit
def kept_mass(
    logits_ptr, temperature, threshold, last_tied, top, listed_ptr, num_listed, vocab_size,
    GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the sum of exp((logit - top) / temperature) over what `filtered_cut` keeps."""
    scale = 1.4426950408889634 / temperature
    mass = tl.zeros([TILE, GROUP], tl.float32)
    for start in range(0, num_listed, TILE):
        x, ids = _candidates(logits_ptr, listed_ptr, start, num_listed, vocab_size, GROUP, TILE)
        mass += tl.where(is_kept(x, ids, threshold, last_tied), tl.exp2((x - top) * scale), 0.0)
    return tl.sum(mass)


@triton.jit
def _likelihood_bound(floats_ptr, temperature, top):
    """Return the smallest logit kept by filters that compare a token with the most likely one, which has `top`."""
    min_p = tl.load(floats_ptr + MIN_P)
    return tl.maximum(top + temperature * tl.log(min_p), _NO_BOUND)  # log(0) is minus infinity


@triton.jit
def _top_k_bound(largest, bound, top, top_k):
    """Return the largest number, at least `bound`, such that `top_k` groups' largest logits are at or above it."""
    low, high = ordered(bound).to(tl.int64), ordered(top).to(tl.int64) + 1
    count = tl.sum((largest >= bound).to(tl.int32))
    while (high - low > 1) & (count > top_k):
        middle = (low + high) >> 1
        count_here = tl.sum((largest >= _float(middle)).to(tl.int32))
        is_enough = count_here >= top_k
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
        count = tl.where(is_enough, count_here, count)
    return _float(low)


@triton.jit
def _nucleus_bound(largest, group_weight, mass, top, top_p, scale, vocab_size, GROUP: tl.constexpr):
    """Return a number such that all tokens below it together have less than 1 - `top_p` of the mass."""
    outside = (1.0 - top_p) * mass * 0.999  # clear of the sums' rounding
    # A valid first bound: tokens of at most (1 - p) / vocabulary each.
    low = top + tl.log2((1.0 - top_p) / vocab_size) / scale
    high = top
    for _ in range(12):
        middle = (low + high) * 0.5
        weight = tl.exp2((middle - top) * scale)
        # A group whose largest logit is above has at most its other tokens below.
        others = tl.minimum(group_weight - tl.exp2((largest - top) * scale), (GROUP - 1) * weight)
        is_below = tl.sum(tl.where(largest < middle, group_weight, others)) <= outside
        low = tl.where(is_below, middle, low)
        high = tl.where(is_below, high, middle)
    return low


@triton.jit
def _search(
    logits_ptr, listed_ptr,
    num_listed, vocab_size, threshold, num_low, mass_low, top, scale, target_count, target_mass, candidates_ptr,
    BY_MASS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the largest threshold with enough tokens at or above it, given one with `num_low` tokens and `mass_low`.

    Returns:
        The threshold, the number of tokens at least as large, their mass, the number above it, and how many are enough.
    """
    # Enough at `low`; not at `high`.
    low, high = ordered(threshold).to(tl.int64), ordered(top).to(tl.int64) + 1
    num_high, mass_high = 0, 0.0
    is_exact = (mass_low <= target_mass) if BY_MASS else (num_low <= target_count)
    while (high - low > 1) & (num_low - num_high > CANDIDATES) & (not is_exact):
        middle = (low + high) >> 1
        num, mass = _weigh(logits_ptr, listed_ptr, num_listed, vocab_size, _float(middle), top, scale, GROUP, TILE)
        is_enough = (mass >= target_mass) if BY_MASS else (num >= target_count)
        low, num_low, mass_low = _either(is_enough, middle, num, mass, low, num_low, mass_low)
        high, num_high, mass_high = _either(is_enough, high, num_high, mass_high, middle, num, mass)
        is_exact = (mass_low <= target_mass) if BY_MASS else (num_low <= target_count)

    # Of what lies between `low` and `high`, few enough are left to hold them in registers from here on.
    num_to_read = tl.where((num_low - num_high > 1) & (not is_exact), num_listed, 0)
    x = _between(
        logits_ptr,
        listed_ptr,
        num_to_read,
        vocab_size,
        _float(low),
        _float(high),
        candidates_ptr,
        GROUP,
        TILE,
        CANDIDATES,
    )
    weight = tl.exp2((x - top) * scale)
    num_above, mass_above = num_high, mass_high
    # Two tokens apart are told apart long before the integers between them run out: stop when one is left between.
    while (high - low > 1) & (num_low - num_high > 1) & (not is_exact):
        middle = (low + high) >> 1
        is_inside = x >= _float(middle)
        num = num_above + tl.sum(is_inside.to(tl.int32))
        mass = mass_above + tl.sum(tl.where(is_inside, weight, 0.0))
        is_enough = (mass >= target_mass) if BY_MASS else (num >= target_count)
        low, num_low, mass_low = _either(is_enough, middle, num, mass, low, num_low, mass_low)
        high, num_high, mass_high = _either(is_enough, high, num_high, mass_high, middle, num, mass)
        is_exact = (mass_low <= target_mass) if BY_MASS else (num_low <= target_count)

    threshold = _float(low)
    num_kept = num_low
    if (num_low - num_high > 1) & (not is_exact):  # ties: all those between are equal to the threshold
        if BY_MASS:
            num_tied = tl.ceil((target_mass - mass_high) / tl.exp2((threshold - top) * scale)).to(tl.int32)
            num_kept = tl.minimum(num_high + tl.maximum(num_tied, 1), num_low)
        else:
            num_kept = target_count
    return threshold, num_low, mass_low, num_high, num_kept


@triton.jit
def _either(condition, a, b, c, otherwise_a, otherwise_b, otherwise_c):
    return tl.where(condition, a, otherwise_a), tl.where(condition, b, otherwise_b), tl.where(condition, c, otherwise_c)


@triton.jit
def _between(
    logits_ptr, listed_ptr, num_listed, vocab_size, low, high, candidates_ptr,
    GROUP: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return [CANDIDATES] the logits from `low` up to below `high`, via memory at `candidates_ptr`.

    Past the last one the values are minus infinity.
    """
    num_found = 0
    for start in range(0, num_listed, TILE):
        x, _ = _candidates(logits_ptr, listed_ptr, start, num_listed, vocab_size, GROUP, TILE)
        x = tl.reshape(x, [TILE * GROUP])
        is_between = (x >= low) & (x < high)
        place = num_found + tl.cumsum(is_between.to(tl.int32), axis=0) - 1
        is_written = is_between & (place < CANDIDATES)  # there are more only if all of them are equal: not needed then
        tl.store(candidates_ptr + place, x, mask=is_written)
        num_found += tl.sum(is_between.to(tl.int32))
    tl.debug_barrier()
    place = tl.arange(0, CANDIDATES)
    return tl.load(candidates_ptr + place, mask=place < num_found, other=float("-inf"))


@triton.jit
def _weigh(
    logits_ptr, listed_ptr, num_listed, vocab_size, threshold, top, scale,
    GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the number of tokens that are at least `threshold`, and their mass, where the mass of `top` is 1."""
    count = tl.zeros([TILE, GROUP], tl.int32)
    mass = tl.zeros([TILE, GROUP], tl.float32)
    for start in range(0, num_listed, TILE):
        x, _ = _candidates(logits_ptr, listed_ptr, start, num_listed, vocab_size, GROUP, TILE)
        is_inside = x >= threshold
        count += is_inside.to(tl.int32)
        mass += tl.where(is_inside, tl.exp2((x - top) * scale), 0.0)
    return tl.sum(count), tl.sum(mass)


@triton.jit
def _find_tied(
    logits_ptr, listed_ptr, num_listed, vocab_size, threshold, num_tied,
    GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the id of the `num_tied`-th token, counted from 1, that equals `threshold`."""
    found = vocab_size
    before = 0
    for start in range(0, num_listed, TILE):
        x, ids = _candidates(logits_ptr, listed_ptr, start, num_listed, vocab_size, GROUP, TILE)
        is_tied = (tl.reshape(x, [TILE * GROUP]) == threshold).to(tl.int32)  # in the order of their ids
        is_it = (is_tied > 0) & (before + tl.cumsum(is_tied, axis=0) == num_tied)
        found = tl.minimum(found, tl.min(tl.where(is_it, tl.reshape(ids, [TILE * GROUP]), vocab_size)))
        before += tl.sum(is_tied)
    return found


@triton.jit
def _candidates(logits_ptr, listed_ptr, start, num_listed, vocab_size, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Return [TILE, GROUP] logits and ids of the groups listed from `start` on; minus infinity past the last."""
    place = start + tl.arange(0, TILE)
    group = tl.load(listed_ptr + place, mask=place < num_listed, other=vocab_size)  # which is past the vocabulary
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    return x.to(tl.float32), ids


@triton.jit
def _float(integer):
    """Return the float that `ordered` maps to this integer."""
    bits = integer.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
