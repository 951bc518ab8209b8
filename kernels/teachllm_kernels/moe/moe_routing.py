"""Mixture-of-experts routing: which experts a token goes to, which tokens an expert gets, and the sum of the results.

    route    a token's scores of all experts -> the best of them, and their weights
    group    (token, expert) pairs in the order of tokens -> sorted by expert
    combine  the pairs' results, in the order of tokens again -> one row per token

A pair's number is token * top_k + its place among the token's experts. Only the device knows how many pairs an expert
gets: shapes depend on the number of tokens alone, so that a step can be captured. A rank that holds some of the experts
groups and combines the pairs of those.

Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer", 2017.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton

_PAIRS_AT_ONCE = 2048  # per iteration of a program
_BLOCK = 1024  # columns


class Routes(NamedTuple):
    """The experts of every token.

    Attributes:
        experts: [num_tokens, top_k] int32, the best first.
        weights: [num_tokens, top_k] float32 (float64 for float64), the weight of each.
    """

    experts: torch.Tensor
    weights: torch.Tensor


class Groups(NamedTuple):
    """The pairs of every expert that is held here.

    Attributes:
        counts: [num_experts] int32, the number of pairs per expert.
        pairs: [num_tokens * top_k] int32: those of the first expert, then those of the second; entries after the last
            expert's are undefined.
    """

    counts: torch.Tensor
    pairs: torch.Tensor


def route_reference(logits: torch.Tensor, top_k: int, renormalizes: bool) -> Routes:
    """Return the `top_k` most probable experts of each token, and their probabilities.

    Args:
        logits: [num_tokens, num_experts].
        renormalizes: a token's weights are scaled to add up to 1.
    """
    probabilities = logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    weights, experts = probabilities.topk(top_k, dim=-1)
    if renormalizes:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routes(experts.int(), weights)


def group_reference(experts: torch.Tensor, held: range) -> Groups:
    """Sort the pairs of `Routes.experts` by expert, for the experts that are held; in token order per expert."""
    flat = experts.flatten() - held.start
    flat = torch.where((flat >= 0) & (flat < len(held)), flat, len(held))
    counts = torch.bincount(flat, minlength=len(held) + 1)[: len(held)]
    return Groups(counts.int(), flat.argsort(stable=True).int())


def combine_reference(y: torch.Tensor, experts: torch.Tensor, held: range) -> torch.Tensor:
    """Sum per token over the experts that are held: [num_tokens * top_k, size] by pair -> [num_tokens, size]."""
    is_held = (experts >= held.start) & (experts < held.stop)
    return y.unflatten(0, experts.shape).masked_fill(~is_held[..., None], 0.0).sum(dim=1)


@triton.jit
def _route(
    logits_ptr, experts_ptr, weights_ptr,
    num_experts,
    TOP_K: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, RENORMALIZES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, BLOCK), tl.arange(0, PLACES)
    inside = expert < num_experts
    score = tl.load(logits_ptr + token * num_experts + expert, mask=inside, other=float("-inf")).to(tl.float32)
    shares = tl.exp(score - tl.max(score))
    left = tl.where(inside, shares, -1.0)
    chosen, share = tl.zeros([PLACES], tl.int32), tl.zeros([PLACES], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.minimum(tl.argmax(left, 0), num_experts - 1)  # for NaN the index may be anything
        chosen = tl.where(place == k, best, chosen)
        share = tl.where(place == k, tl.max(left, 0), share)
        left = tl.where(expert == best, -1.0, left)
    share = share / (tl.sum(share) if RENORMALIZES else tl.sum(shares))
    at, is_place = token * TOP_K + place, place < TOP_K
    tl.store(experts_ptr + at, chosen, mask=is_place)
    tl.store(weights_ptr + at, share, mask=is_place)


@triton.jit(do_not_specialize=["num_pairs", "first"])  # num_pairs differs from batch to batch, first by rank
def _group(experts_ptr, counts_ptr, pairs_ptr, num_pairs, first, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    own = first + tl.program_id(0)
    num_before, num_own = 0, 0
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1)
        num_before += tl.sum(((expert >= first) & (expert < own)).to(tl.int32))
        num_own += tl.sum((expert == own).to(tl.int32))
    tl.store(counts_ptr + tl.program_id(0), num_own)
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        is_own = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1) == own
        place = num_before + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + place, pair, mask=is_own)
        num_before += tl.sum(is_own.to(tl.int32))


@triton.jit(do_not_specialize=["first"])
def _combine(
    y_ptr, experts_ptr, out_ptr,
    size, first, num_experts,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(experts_ptr + pair) - first
        is_held = (expert >= 0) & (expert < num_experts)
        total += tl.load(y_ptr + pair * size + column, mask=inside & is_held, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def route_triton(logits: torch.Tensor, top_k: int, renormalizes: bool) -> Routes:
    """Compute `route_reference` in float32. Of equal scores the first wins. One program per token."""
    num_tokens, num_experts = logits.shape
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    _route[(num_tokens,)](
        logits_ptr=logits,
        experts_ptr=experts,
        weights_ptr=weights,
        num_experts=num_experts,
        TOP_K=top_k,
        PLACES=triton.next_power_of_2(top_k),
        BLOCK=triton.next_power_of_2(num_experts),
        RENORMALIZES=renormalizes,
        num_warps=1,
        **launch_options(logits.device),
    )
    return Routes(experts, weights)


def group_triton(experts: torch.Tensor, held: range) -> Groups:
    """Compute `group_reference`. One program per expert, which looks through all pairs for its own."""
    counts = torch.empty(len(held), dtype=torch.int32, device=experts.device)
    pairs = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    options = launch_options(experts.device)
    _group[(len(held),)](
        experts_ptr=experts,
        counts_ptr=counts,
        pairs_ptr=pairs,
        num_pairs=experts.numel(),
        first=held.start,
        BLOCK=_PAIRS_AT_ONCE,
        **options,
    )
    return Groups(counts, pairs)


def combine_triton(y: torch.Tensor, experts: torch.Tensor, held: range) -> torch.Tensor:
    """Compute `combine_reference` in float32, the best expert's part first; parts of other experts are not read."""
    (num_tokens, top_k), size = experts.shape, y.shape[1]
    out = torch.empty((num_tokens, size), dtype=y.dtype, device=y.device)
    grid = (num_tokens, triton.cdiv(size, _BLOCK))
    options = launch_options(y.device)
    _combine[grid](
        y_ptr=y,
        experts_ptr=experts,
        out_ptr=out,
        size=size,
        first=held.start,
        num_experts=len(held),
        TOP_K=top_k,
        BLOCK=_BLOCK,
        **options,
    )
    return out


def cost(num_tokens: int, size: int, top_k: int, dtype_bytes: int = 2) -> tuple[int, int]:
    """Return (bytes, FLOPs) of `combine` that any implementation must spend: the parts in, their sums out."""
    return num_tokens * (top_k + 1) * size * dtype_bytes, num_tokens * top_k * size
