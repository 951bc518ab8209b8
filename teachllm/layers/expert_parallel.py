"""Expert parallelism: experts live on several ranks, whole, and tokens come to them.

    rank 0   tokens a b c                 a b d    for experts 0-3                 a b c
                           ── dispatch ─▶            computed           ─ combine ─▶
    rank 1   tokens d e                   b c d e  for experts 4-7                 d e

A rank that has some of a token's experts gets its row, once, and gives back their weighted sum; the token's own rank
adds up these parts. How many rows go where is the router's to say, so a number for each rank goes ahead. Every
rank takes part, even one without tokens: its experts may be wanted. Where all ranks have the same tokens, as ranks that
share the other layers do, nothing has to travel before.

Source: Lepikhin et al., "GShard", 2020; one row per rank, not one per expert: DeepSeek-AI, "DeepSeek-V3", 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from teachllm.distributed.group import Group
from teachllm_kernels.moe.moe_routing import Routes

PartOf: TypeAlias = Callable[[torch.Tensor, Routes], torch.Tensor]  # what this rank's experts make of rows


class SameTokens:
    """All ranks of the group have the same tokens, and some experts or a part of each: what they make is added up."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, experts: PartOf, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size], the sum over all experts of each token."""
        return self._group.all_reduce(experts(x, routes))


class AllToAll:
    """Ranks have tokens of their own: rows go to the ranks that have their experts, and sums come back.

    Args:
        group: the ranks among which the experts are spread.
        holders: the experts of each of them.
        twins: those of them that have the same tokens as this one. Each dispatches a part of them, or an expert would
            compute them as often as there are twins.
    """

    def __init__(self, group: Group, holders: Sequence[range], twins: Group) -> None:
        self._group, self._twins = group, twins
        self._starts = [held.start for held in holders[1:]]

    def __call__(self, experts: PartOf, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Implement `SameTokens.__call__`."""
        num_each = share_of(len(x), self._twins.size)
        own = slice(self._twins.rank * num_each, (self._twins.rank + 1) * num_each)
        y = self._exchanged(experts, x[own], Routes(*(each[own] for each in routes)))
        if self._twins.size == 1 or not len(x):
            return y
        part = x.new_zeros((num_each, x.shape[1]))  # of the last twin, maybe more than it has
        part[: len(y)] = y
        return self._twins.all_gather(part).flatten(0, 1)[: len(x)]

    def _exchanged(self, experts: PartOf, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Dispatch, computation and combination."""
        group, once_each = self._group, [1] * self._group.size
        starts = torch.tensor(self._starts, dtype=routes.experts.dtype, device=x.device)
        at = torch.bucketize(routes.experts, starts, right=True)  # [num_tokens, top_k], the rank of each expert
        goes = torch.zeros((len(x), group.size), dtype=torch.bool, device=x.device).scatter_(1, at, True)
        tokens = goes.T.nonzero()[:, 1]  # [num_rows]: those that go to the first rank, those to the second, ...
        counts = goes.sum(0)  # [num_ranks]
        sends, receives = counts.tolist(), group.all_to_all(counts, once_each, once_each).tolist()

        rows = group.all_to_all(x[tokens], sends, receives)
        ids_and_weights = torch.cat([routes.experts.to(routes.weights.dtype), routes.weights], dim=1)
        ids, weights = group.all_to_all(ids_and_weights[tokens], sends, receives).chunk(2, dim=1)
        sums = experts(rows, Routes(ids.int().contiguous(), weights.contiguous()))

        parts = group.all_to_all(sums, receives, sends)
        return torch.zeros_like(x).index_add_(0, tokens, parts)


def share_of(num_tokens: int, num_twins: int) -> int:
    """Return how many of them each twin dispatches; of the last ones fewer may be left."""
    return -(-num_tokens // num_twins)
