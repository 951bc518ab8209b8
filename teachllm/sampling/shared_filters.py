"""min-p, top-k and top-p, where each rank has the logits of some tokens: every rank cuts its own columns.

What it needs of the others are the best logit of a row for min-p, and for top-k and top-p their own best logits: the
k best of all are among the k best of each. A nucleus is nearly always among the best `MOST_CANDIDATES` of all; the sum
of all tokens' exponentials, of which each rank tells its part, says how likely those are.

Rows whose nucleus or k is larger, or unknown, are gathered whole, and what that sends depends on their numbers. With
top-p alone the sum's order is another than with all logits in one place: a token is then in the nucleus or not by
rounding, if those before it come so close to p.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from teachllm.sampling.filters import apply_filters, best_of, count_kept, cut_min_p, largest
from teachllm.sampling.shared_vocabulary import Columns

MOST_CANDIDATES = 1024
_MINUS_INFINITY = float("-inf")


def apply_shared_filters(
    logits: torch.Tensor,
    parameters: Mapping[str, torch.Tensor],
    num_candidates: int,
    columns: Columns,
) -> torch.Tensor:
    """Do the same as `apply_filters`, of [F, width] logits; all ranks with the same rows."""
    group, top_k, top_p = columns.group, parameters["top_k"], parameters["top_p"]
    scaled = logits / parameters["temperature"][:, None]
    best = group.all_gather(scaled.amax(dim=-1, keepdim=True)).amax(dim=0)  # [F, 1]
    scaled = cut_min_p(scaled, parameters["min_p"], best)
    num_own = num_told(num_candidates, columns)
    own = torch.topk(scaled, num_own, dim=-1).values
    own_sum = (scaled - best).exp().sum(dim=-1, keepdim=True)
    told = group.all_gather(torch.cat([own, own_sum], dim=1))  # [size, F, num_own + 1]
    of_ranks, whole_sum = told[..., :-1], told[..., -1].sum(dim=0)

    every = of_ranks.transpose(0, 1).flatten(1)  # [F, size * num_own]
    # Behind the first `num_own` of all may come those that a rank has not told, unless it has told all.
    count = every.shape[1] if num_own == columns.width else num_own
    candidates = best_of(every, min(count, num_candidates), top_k)
    is_complete = (top_k <= candidates.shape[1]) | (candidates[:, -1] == _MINUS_INFINITY)
    share = (candidates - best).exp().sum(dim=-1) / whole_sum  # of all tokens' probability
    probabilities = candidates.softmax(dim=-1) * torch.where(is_complete, 1.0, share)[:, None]
    num_kept = count_kept(candidates, probabilities, top_p)
    smallest = candidates.gather(1, num_kept - 1)
    cuts_no_more = ~is_complete & (top_k >= columns.vocab_size) & (top_p >= 1.0)  # min-p alone has cut already
    smallest = smallest.masked_fill(cuts_no_more[:, None], _MINUS_INFINITY)

    # Of equal logits the lowest ids stay, and those are at the ranks before.
    num_above = (of_ranks > smallest).sum(dim=-1, keepdim=True)  # [size, F, 1]
    num_tied = (of_ranks == smallest).sum(dim=-1, keepdim=True)
    num_elsewhere = num_above.sum(dim=0) - num_above[group.rank] + num_tied[: group.rank].sum(dim=0)
    filtered = logits.masked_fill(~largest(scaled, smallest, num_kept - num_elsewhere), _MINUS_INFINITY)

    is_in_sight = (top_k >= columns.vocab_size) & (share >= top_p)
    unsettled = (~(is_complete | is_in_sight | cuts_no_more)).nonzero()[:, 0]
    if unsettled.numel():
        whole = apply_filters(
            columns.gathered(logits[unsettled]),
            {name: values[unsettled] for name, values in parameters.items()},
            num_candidates,
        )
        filtered[unsettled] = columns.own(whole)
    return filtered


def num_told(num_candidates: int, columns: Columns) -> int:
    """Return how many logits of a row each rank tells the others."""
    return min(num_candidates, MOST_CANDIDATES, columns.width)
