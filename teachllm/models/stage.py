"""A stage of a pipeline as if it were the whole model: it waits for what the one before computed, and hands its own on.

Only hidden states travel, [num_tokens, hidden_size] a step, so a slow network between stages will do where tensor
parallelism would need a fast one. One step is no faster by it: every token goes through all layers all the same. Stages
work at the same time on different steps, each on its own.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from teachllm.distributed.ranks import Ranks
from teachllm.layers.attention import AttentionMetadata
from teachllm.models.base import AuxOut, Model, PagedKV


class Stage:
    """One stage's layers. It satisfies `Model`, and passes on to them what is not about hidden states.

    Args:
        model: the layers; called as a whole model is, and with `receive`, which waits for what the stage before
            returned.
        dtype: of hidden states.
    """

    def __init__(self, model: Model, ranks: Ranks, hidden_size: int, dtype: torch.dtype) -> None:
        self.model = model
        self.implementation, self.fuses_decodes, self.experts = model.implementation, model.fuses_decodes, model.experts
        self._ranks, self._hidden_size, self._dtype = ranks, hidden_size, dtype

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[PagedKV],
        metadata: AttentionMetadata,
        aux_hidden_states: Mapping[int, AuxOut] | None = None,
        receive: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run the stage's layers. A stage that is not the last has sent on what it returns."""
        coords = self._ranks.coords

        def receive_hidden() -> torch.Tensor:
            shape = (input_ids.shape[0], self._hidden_size)
            room = torch.empty(shape, dtype=self._dtype, device=input_ids.device)
            return self._ranks.world.recv(room, coords.before)

        if receive is None and not coords.is_first_stage:
            receive = receive_hidden
        hidden = self.model(input_ids, positions, kv_caches, metadata, aux_hidden_states, receive)
        if not coords.is_last_stage:
            self._ranks.world.send(hidden, coords.behind)
        return hidden

    def logits(self, hidden: torch.Tensor, *, sharded: bool = False, in_float32: bool = True) -> torch.Tensor:
        """Return the model's logits; only the last stage has an output head."""
        return self.model.logits(hidden, sharded=sharded, in_float32=in_float32)

    def execute_dummy_step(self) -> None:
        """Run the model's dummy step, which hands no hidden states on."""
        self.model.execute_dummy_step()

    def count_load(self) -> torch.Tensor:
        """Count the tokens that the stage's experts get."""
        return self.model.count_load()

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules of the stage's layers."""
        return self.model.modules()
