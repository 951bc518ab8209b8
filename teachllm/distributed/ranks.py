"""This process among the ranks of its engine: its place, and the groups that it computes in."""

from __future__ import annotations

from dataclasses import dataclass

from teachllm.distributed import group, layout
from teachllm.distributed.group import Group
from teachllm.distributed.layout import Place
from teachllm.distributed.slices import ALL, Slice, of_kv_heads


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's view.

    Attributes:
        place: where it stands.
        tensor: the ranks that share its stage's layers.
        world: all ranks of the engine.
    """

    place: Place = layout.ALONE
    tensor: Group = group.ALONE
    world: Group = group.ALONE

    def share(self, num_kv_heads: int) -> Share:
        """This rank's part of each layer of a model with so many KV heads."""
        rank, size = self.place.tensor_rank, self.place.layout.tensor
        kv_heads = of_kv_heads(rank, size, num_kv_heads)
        return Share(Slice(rank, size), kv_heads, self.tensor, self.place.layout.spreads_experts)


ALONE = Ranks()


@dataclass(frozen=True, slots=True)
class Share:
    """What is a rank's own of a layer, and the ranks that have the rest.

    Attributes:
        part: of heads, widths and the vocabulary.
        kv_heads: which may be fewer than ranks.
        spreads_experts: as of `Layout`.
    """

    part: Slice = ALL
    kv_heads: Slice = ALL
    group: Group = group.ALONE
    spreads_experts: bool = False


WHOLE = Share()
