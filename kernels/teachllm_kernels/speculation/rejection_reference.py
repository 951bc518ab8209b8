"""Which token comes after a position, given what a drafter proposed for it: a draw from the model's own p (lesson 10).

Proposals c_1, c_2, ... come from the drafter's q. Each is accepted with probability min(1, p(c) / q(c)). Where p is
larger than q, a token is proposed too rarely; exactly what is missing, max(p - q, 0), is what a rejection draws from
(or tries the next proposal against, see `residual.py`). Together that is p, whatever q is: a bad drafter costs speed
and nothing else. A position gives one token, and its proposal counts if it is that token.

Where nothing was proposed, or without probabilities, as text that is looked up, one draws from p: a proposal is then
as likely to be that token as it would have been to be accepted.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from teachllm_kernels.sampling.philox import STREAM_ACCEPT, STREAM_DRAFT, philox_uniform_reference
from teachllm_kernels.sampling.random_sample import gumbel_noise_reference, gumbel_sample_reference

_MINUS_INFINITY = float("-inf")


def judge(
    p: torch.Tensor, q: torch.Tensor, token: torch.Tensor, coin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule: whether a proposal is accepted, and what one draws from if it is not.

    Args:
        p, q: [R, vocab_size], the model's probabilities and the drafter's.
        token: [R, 1] int64, drawn from q.
        coin: [R, 1], uniform in (0, 1).

    Returns:
        [R, 1] bool; [R, vocab_size] probabilities.
    """
    accepted = coin * q.gather(1, token) < p.gather(1, token)  # not p / q, where q may be 0
    rest = (p - q).clamp(min=0.0)
    total = rest.sum(dim=1, keepdim=True)
    # Where nothing is left, and was still rejected, that is rounding: p stays as it was.
    return accepted, torch.where(total > 0.0, rest / total, p)


Judge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def rejection_sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_rows: torch.Tensor,
    siblings: torch.Tensor,
    seeds: torch.Tensor,
    output_indices: torch.Tensor,
    child_indices: torch.Tensor,
    replaced: bool = False,
    judge: Judge = judge,
) -> torch.Tensor:
    """Draws one token per row from softmax(logits / temperature), which is a proposal as often as possible.

    Args:
        logits: [R, vocab_size] float32, minus infinity where a token is cut; not divided by the temperature.
        temperature: [R] float32, above 0.
        draft_logits: [Q, vocab_size] any float dtype; proposals were drawn from softmax(draft_logits / temperature).
        draft_rows: [R] int64, the row of `draft_logits` that a row's proposals were drawn from; -1: no proposals.
        siblings: [R, M] int64, the proposals in the order drawn, then -1. Unless `replaced`, all different.
        seeds, output_indices, child_indices: [R] int64, see `philox.py`.
        replaced: a token drawn could be drawn again.
        judge: the rule.

    Returns:
        [R] int64 token ids. A row without proposals has the token of `gumbel_sample_reference`.
    """
    tokens = torch.full_like(draft_rows, -1)
    rows = (draft_rows >= 0).nonzero()[:, 0]
    heat, siblings = temperature[rows].double()[:, None], siblings[rows]
    p = _probabilities(logits[rows], heat)
    draft = draft_logits[draft_rows[rows]]
    coins = philox_uniform_reference(
        seeds[rows], output_indices[rows], child_indices[rows], siblings.shape[1], STREAM_ACCEPT
    )
    undecided = torch.ones_like(rows, dtype=torch.bool)[:, None]
    was_rejected = torch.zeros_like(undecided)
    for sibling, coin in zip(siblings.split(1, dim=1), coins.double().split(1, dim=1), strict=True):  # [rows, 1] each
        tries, token = undecided & (sibling >= 0), sibling.clamp(min=0)
        q = _probabilities(draft, heat)
        is_good, left = judge(p, q, token, coin)
        accepted = tries & is_good
        tokens[rows[accepted[:, 0]]] = token[accepted]
        p = torch.where(tries & ~accepted, left, p)
        was_rejected |= tries & ~accepted
        undecided = undecided & ~accepted
        if not replaced:
            draft = draft.scatter(1, token, _MINUS_INFINITY)

    left = logits[rows]
    left = torch.where(was_rejected, (p.log() * heat).to(left.dtype), left)
    drawn = (tokens < 0).nonzero()[:, 0]
    among = logits.index_copy(0, rows, left)[drawn]
    tokens[drawn] = gumbel_sample_reference(
        among, temperature[drawn], seeds[drawn], output_indices[drawn], child_indices[drawn]
    )
    return tokens


def draft_sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    output_indices: torch.Tensor,
    child_indices: torch.Tensor,
    num: int,
) -> torch.Tensor:
    """Draws `num` different tokens per row from softmax(logits / temperature), one after the other.

    The largest of the logits with their noise are just that: a draw, a draw of the tokens that are left, and so on.

    Args:
        logits: [R, vocab_size] float32.
        temperature: [R] float32; 0 takes the most likely tokens, of equal ones the lowest ids.
        seeds, output_indices, child_indices: [R] int64, see `philox.py`.

    Returns:
        [R, num] int64 token ids in the order drawn; -1 once none is left that is possible.
    """
    rows = (temperature > 0.0).nonzero()[:, 0]
    noise = gumbel_noise_reference(
        seeds[rows], output_indices[rows], child_indices[rows], vocab_size=logits.shape[-1], stream=STREAM_DRAFT
    )
    scores = logits.index_copy(0, rows, logits[rows] / temperature[rows, None] + noise)
    drawn = []
    for _ in range(num):
        best = scores.argmax(dim=-1, keepdim=True)
        drawn.append(best.masked_fill(scores.gather(1, best) == _MINUS_INFINITY, -1))
        scores = scores.scatter(1, best, _MINUS_INFINITY)
    return torch.cat(drawn, dim=1)


def _probabilities(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """softmax(logits / temperature) in float64; 0 everywhere where nothing is possible."""
    logits = logits.double()
    top = logits.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weights = torch.exp((logits - top) / temperature)
    return weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-30)
