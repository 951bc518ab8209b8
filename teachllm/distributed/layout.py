"""Lay out an engine's ranks as a grid, stages by tensor-parallel ranks.

    rank                 tensor_rank 0   1        Neighbours in a row share every layer and talk most, two all-reduces a
    stage 0   layers 0-17         0   1        layer; so they have neighbouring numbers, as GPUs with fast links between
    stage 1   layers 18-35        2   3        them have. Rows hand on hidden states, once per step.

Replicas have a grid each and know nothing of each other, unless a mixture's experts are spread over all of them: then
the same stage's ranks of all replicas are one group, replica by replica.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

from teachllm.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """Describe the grid.

    Attributes:
        tensor: ranks that share a layer.
        pipeline: stages.
        spreads_experts: a mixture's experts are whole, each at one of the ranks that share a layer; otherwise all have
            a part of each.
        replicas: whose ranks share experts; 1: each replica has all of them.
    """

    tensor: int = 1
    pipeline: int = 1
    spreads_experts: bool = False
    replicas: int = 1

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of one engine."""
        return self.tensor * self.pipeline

    @property
    def num_connected(self) -> int:
        """Return the number of ranks of all engines that exchange anything."""
        return self.replicas * self.num_ranks

    @property
    def num_expert_ranks(self) -> int:
        """Return the number of ranks that hold some of a layer's experts each; 1: they are not spread."""
        return self.replicas * self.tensor if self.spreads_experts else 1

    def coords(self, rank: int, replica: int = 0) -> RankCoords:
        """Return the coordinates of an engine's rank."""
        assert 0 <= rank < self.num_ranks and 0 <= replica < self.replicas
        return RankCoords(self, rank, replica)

    def stage(self, stage: int) -> list[int]:
        """Return the ranks that share a stage's layers."""
        return list(range(stage * self.tensor, (stage + 1) * self.tensor))


def layout_of(config: EngineConfig) -> Layout:
    """Return the layout of a configuration."""
    replicas = config.data_parallel_size if config.shares_experts else 1
    return Layout(config.tensor_parallel_size, config.pipeline_parallel_size, config.enable_expert_parallel, replicas)


@dataclass(frozen=True, slots=True)
class RankCoords:
    """Locate one rank in the grid."""

    layout: Layout
    rank: int
    replica: int = 0

    @property
    def number(self) -> int:
        """Return its rank among all that are connected."""
        return self.replica * self.layout.num_ranks + self.rank

    @property
    def engine_ranks(self) -> list[int]:
        """Return the numbers of its engine's ranks."""
        first = self.replica * self.layout.num_ranks
        return list(range(first, first + self.layout.num_ranks))

    @property
    def expert_ranks(self) -> list[int]:
        """Return the numbers of the ranks that have its stage's experts, replica by replica."""
        starts = range(0, self.layout.num_connected, self.layout.num_ranks)
        return [start + rank for start in starts for rank in self.layout.stage(self.stage)]

    @property
    def expert_rank(self) -> int:
        """Return the index of its part of its stage's experts; 0 where they are not spread."""
        return self.replica * self.layout.tensor + self.tensor_rank if self.layout.spreads_experts else 0

    @property
    def tensor_rank(self) -> int:
        """Return the index of its part of its stage's layers."""
        return self.rank % self.layout.tensor

    @property
    def stage(self) -> int:
        """Return its stage, which decides its layers."""
        return self.rank // self.layout.tensor

    @property
    def is_first_stage(self) -> bool:
        """Return whether it embeds token ids."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Return whether it has the output head, and samples."""
        return self.stage == self.layout.pipeline - 1

    @property
    def before(self) -> int:
        """Return the rank that it gets hidden states from."""
        return self.rank - self.layout.tensor

    @property
    def behind(self) -> int:
        """Return the rank that gets hidden states from it."""
        return self.rank + self.layout.tensor

    @property
    def is_output_rank(self) -> bool:
        """Return whether it reports the sampled tokens: all ranks of the last stage know them."""
        return self.is_last_stage and self.tensor_rank == 0


ALONE = Layout().coords(0)
