"""Which rank does what: an engine's ranks as a grid, stages by tensor-parallel ranks.

    rank                 tensor_rank 0   1        Neighbours in a row share every layer and talk most, two all-reduces a
    stage 0   layers 0-17         0   1        layer; so they have neighbouring numbers, as GPUs with fast links between
    stage 1   layers 18-35        2   3        them have. Rows hand on hidden states, once a step.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

from teachllm.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """The grid.

    Attributes:
        tensor: ranks that share a layer.
        pipeline: stages.
        spreads_experts: a mixture's experts are whole, each at one of the ranks that share a layer; otherwise all have
            a part of each.
    """

    tensor: int = 1
    pipeline: int = 1
    spreads_experts: bool = False

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline

    def place(self, rank: int) -> Place:
        """Where a rank stands."""
        assert 0 <= rank < self.num_ranks
        return Place(self, rank)

    def stage(self, stage: int) -> list[int]:
        """The ranks that share a stage's layers."""
        return list(range(stage * self.tensor, (stage + 1) * self.tensor))


def layout_of(config: EngineConfig) -> Layout:
    """As the settings say."""
    return Layout(config.tensor_parallel_size, config.pipeline_parallel_size, config.enable_expert_parallel)


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place in the grid."""

    layout: Layout
    rank: int

    @property
    def tensor_rank(self) -> int:
        """Which part of its stage's layers is its own."""
        return self.rank % self.layout.tensor

    @property
    def stage(self) -> int:
        """Which layers."""
        return self.rank // self.layout.tensor

    @property
    def is_first_stage(self) -> bool:
        """It embeds token ids."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """It has the output head, and samples."""
        return self.stage == self.layout.pipeline - 1

    @property
    def before(self) -> int:
        """The rank that it gets hidden states from."""
        return self.rank - self.layout.tensor

    @property
    def behind(self) -> int:
        """The rank that gets them from it."""
        return self.rank + self.layout.tensor

    @property
    def speaks(self) -> bool:
        """Whether it is the one that tells what was sampled: all of the last stage know it."""
        return self.is_last_stage and self.tensor_rank == 0


ALONE = Layout().place(0)
