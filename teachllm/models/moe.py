"""A mixture of experts in the place of a layer's MLP: Qwen3-MoE's and Mixtral's.

Source: Jiang et al., "Mixtral of Experts", 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import torch
from torch import nn

from teachllm.distributed.ranks import WHOLE, ShardSpec
from teachllm.distributed.shards import ALL, spread
from teachllm.layers.checkpoint_tensors import Destination, destination
from teachllm.layers.expert_parallel import AllToAll, SameTokens
from teachllm.layers.linear import Linear, Rows
from teachllm.layers.moe import Experts, route
from teachllm.models.moe_config import ExpertNames, MoeConfig

_STACKED_GATE_UP, _STACKED_DOWN, _STACKED_ROUTER = "experts.gate_up_proj", "experts.down_proj", "gate.weight"


class SparseMLP(nn.Module):
    """Router and experts: the weighted sum of what a token's experts make of it.

    Ranks that share a layer have some of its experts each, or a part of every expert's width; either way what they make
    of a token are parts of a sum. Experts may lie with other replicas' ranks, too: see `layers/expert_parallel.py`.

    Args:
        config: of all experts.
        shard: a rank's.

    Attributes:
        load: [num_experts] int64, how many of this replica's tokens each expert has got, wherever it is; None: not
            counted. On a GPU, steps that were recorded before it was set go on without.
    """

    input_quantization = None
    fuses_one_row = False

    def __init__(self, hidden_size: int, config: MoeConfig, shard: ShardSpec = WHOLE) -> None:
        super().__init__()
        self._config, self._hidden_size = config, hidden_size
        self.gate = Linear(hidden_size, {"gate": config.num_experts})
        self._width = ALL if shard.experts.count > 1 else shard.part
        holders = spread(config.num_experts, shard.experts.count)
        width = self._width.equal(config.intermediate_size)
        self.experts = Experts(hidden_size, holders[shard.experts.index], width)
        self._exchange: SameTokens | AllToAll = SameTokens(shard.group)
        if shard.expert_group.size > shard.group.size:
            self._exchange = AllToAll(shard.expert_group, holders, twins=shard.group)
        self.load: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, hidden_size]."""
        routes = route(self.gate(x), self._config.top_k, self._config.renormalizes)
        if self.load is not None:
            chosen = routes.experts.flatten().long()
            self.load.scatter_add_(0, chosen, torch.ones_like(chosen))
        return self._exchange(self.experts, x, routes)

    def execute_dummy_step(self) -> None:
        """Take part in a step of other replicas, without tokens."""
        self(self.experts.gate_up.new_empty((0, self._hidden_size)))

    def add_to_residual(self, residual: torch.Tensor, x: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is to be added to the residual, and the residual, as `Linear.add_to_residual` does."""
        assert isinstance(x, torch.Tensor)
        return self(x), residual

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, Destination]]:
        """Yield the tensors of the router and of the experts that are here."""
        names = self._config.names
        yield from self.gate.checkpoint_tensors(f"{path}.gate")
        met = Fraction(self._config.top_k, self._config.num_experts)
        for index, expert in enumerate(self.experts.held):
            gate, up, down = self.experts.parts(index)
            for name, target, shards in (
                (names.gate, gate, (self._width, ALL)),
                (names.up, up, (self._width, ALL)),
                (names.down, down, (ALL, self._width)),
            ):
                yield f"{path}.experts.{expert}.{name}.weight", destination(target, *shards, share_met=met)


def unstacked(
    tensors: Iterator[tuple[str, torch.Tensor, Path]], names: ExpertNames
) -> Iterator[tuple[str, torch.Tensor, Path]]:
    """Yield a checkpoint's tensors as they lie on the hub, each expert's apart.

    transformers keeps experts stacked in memory, below "mlp" whatever the family, and can write them so
    (`save_original_format=False`).
    """
    for name, tensor, file in tensors:
        layer, _, rest = name.partition(".mlp.")
        block = f"{layer}.{names.block}"
        if rest == _STACKED_GATE_UP and tensor.dim() == 3:
            for expert, gate_up in enumerate(tensor):
                gate, up = gate_up.chunk(2)
                yield f"{block}.experts.{expert}.{names.gate}.weight", gate, file
                yield f"{block}.experts.{expert}.{names.up}.weight", up, file
        elif rest == _STACKED_DOWN and tensor.dim() == 3:
            for expert, down in enumerate(tensor):
                yield f"{block}.experts.{expert}.{names.down}.weight", down, file
        else:
            yield f"{block}.{rest}" if rest == _STACKED_ROUTER else name, tensor, file
