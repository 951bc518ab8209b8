"""Describe this process among the ranks of its engine: its coordinates, and the groups that it computes in."""

from __future__ import annotations

from dataclasses import dataclass

from teachllm.distributed import group, layout
from teachllm.distributed.group import Group
from teachllm.distributed.layout import RankCoords
from teachllm.distributed.shards import ALL, Shard, of_kv_heads


@dataclass(frozen=True, slots=True)
class Ranks:
    """Hold one rank's view.

    Attributes:
        coords: its place in the grid.
        tensor: the ranks that share its stage's layers.
        world: all ranks of the engine.
        experts: the ranks that have its stage's experts, of all replicas that share them.
    """

    coords: RankCoords = layout.ALONE
    tensor: Group = group.ALONE
    world: Group = group.ALONE
    experts: Group = group.ALONE

    def shard_spec(self, num_kv_heads: int) -> ShardSpec:
        """Return this rank's part of each layer of a model with `num_kv_heads` KV heads."""
        rank, size = self.coords.tensor_rank, self.coords.layout.tensor
        kv_heads = of_kv_heads(rank, size, num_kv_heads)
        experts = Shard(self.coords.expert_rank, self.coords.layout.num_expert_ranks)
        return ShardSpec(Shard(rank, size), kv_heads, self.tensor, experts, self.experts)


ALONE = Ranks()
_NO_OTHERS = group.ALONE


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Describe a rank's shard of a layer, and the ranks that have the rest.

    Attributes:
        part: of heads, widths and the vocabulary.
        kv_heads: which may be fewer than ranks.
        group: the ranks that have the other parts, and the same tokens.
        experts: which of a mixture's, whole; all: a part of each.
        expert_group: the ranks that have the others; those of `group`, and of other replicas with tokens of their own.
    """

    part: Shard = ALL
    kv_heads: Shard = ALL
    group: Group = group.ALONE
    experts: Shard = ALL
    expert_group: Group = _NO_OTHERS


WHOLE = ShardSpec()
