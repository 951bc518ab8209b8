"""min-p, top-k and top-p (lesson 07): cut the unlikely tail before drawing.

All three keep the n most likely tokens of a row and differ in how they find n: top-k is given it, top-p
(nucleus sampling) takes the fewest tokens whose probability reaches p, min-p takes those at least p times as
likely as the best. So one sort of the values serves top-k and top-p, and one rule breaks ties: the lowest id stays.

Sources: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019; Nguyen et al., "Turning Up the
Heat: Min-p Sampling", 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

CountNucleus = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # as `count_nucleus`

_MINUS_INFINITY = float("-inf")


def count_nucleus(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[F, 1] int64: the fewest tokens, best first, whose probabilities reach `top_p` together; all of them at 1.

    Args:
        probabilities: [F, count], the largest first.
        top_p: [F], above 0.
    """
    # A token stays while those before it have not reached p together. At p = 1 the sum's rounding must not decide.
    before = probabilities.cumsum(dim=-1) - probabilities
    in_nucleus = (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    return in_nucleus.sum(dim=-1, keepdim=True)


def apply_filters(
    logits: torch.Tensor,
    parameters: Mapping[str, torch.Tensor],
    num_candidates: int,
    nucleus: CountNucleus = count_nucleus,
) -> torch.Tensor:
    """The logits with the cut tokens at minus infinity; every row keeps at least its best token.

    Args:
        logits: [F, vocab_size] float32.
        parameters: the rows' parameters by name, [F] each. "temperature" is above 0, and "likely" means after dividing
            by it; "top_k" is the vocabulary's size where it is off.
        num_candidates: the largest `top_k`; only this many values per row are sorted.
        nucleus: says how many tokens top-p keeps.

    Returns:
        [F, vocab_size] float32.
    """
    scaled = logits / parameters["temperature"][:, None]
    scaled = cut_min_p(scaled, parameters["min_p"], scaled.amax(dim=-1, keepdim=True))
    candidates = best_of(scaled, num_candidates, parameters["top_k"])
    num_kept = count_kept(candidates, candidates.softmax(dim=-1), parameters["top_p"], nucleus)
    return logits.masked_fill(~largest(scaled, candidates.gather(1, num_kept - 1), num_kept), _MINUS_INFINITY)


def cut_min_p(logits: torch.Tensor, min_p: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Return the logits without tokens less than `min_p`, [F], times as likely as the row's best, [F, 1]."""
    # p(token) / p(best) = exp(logit - best), so no softmax is needed.
    return logits.masked_fill(logits < best + min_p.log()[:, None], _MINUS_INFINITY)


def best_of(logits: torch.Tensor, count: int, top_k: torch.Tensor) -> torch.Tensor:
    """[F, count], the best logits of each row in order; minus infinity behind the first `top_k`, [F] int64."""
    candidates = torch.topk(logits, count, dim=-1, sorted=True).values
    position = torch.arange(count, device=logits.device)
    return candidates.masked_fill(position >= top_k[:, None], _MINUS_INFINITY)


def count_kept(
    candidates: torch.Tensor, probabilities: torch.Tensor, top_p: torch.Tensor, nucleus: CountNucleus = count_nucleus
) -> torch.Tensor:
    """[F, 1] int64: how many of the candidates, best first, are left by top-p and what came before; one at least.

    Args:
        candidates, probabilities: [F, count]; candidates that are minus infinity are cut.
        top_p: [F].
    """
    num_left = (candidates > _MINUS_INFINITY).sum(dim=-1, keepdim=True)
    return torch.minimum(nucleus(probabilities, top_p), num_left).clamp(min=1)


def largest(logits: torch.Tensor, smallest_kept: torch.Tensor, num_kept: torch.Tensor) -> torch.Tensor:
    """[F, vocab_size] bool: exactly the `num_kept` largest logits of each row, of equal ones the lowest ids.

    Args:
        logits: [F, vocab_size].
        smallest_kept: [F, 1], the value at rank `num_kept`.
        num_kept: [F, 1] int64.
    """
    above = logits > smallest_kept
    tied = logits == smallest_kept
    num_tied_kept = num_kept - above.sum(dim=-1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=-1) <= num_tied_kept))
