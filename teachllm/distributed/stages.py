"""A stage of a pipeline as if it were the whole model: it waits for what the one before computed, and hands its own on.

Only hidden states travel, [num_tokens, hidden_size] a step, so a slow network between stages will do where tensor
parallelism would need a fast one. One step is no faster by it: every token goes through all layers all the same. Stages
work at the same time on different steps, each on its own.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from teachllm.distributed.ranks import Ranks


class Stage(nn.Module):
    """One stage's layers.

    Args:
        model: them; called as a whole model is, and with `receive`, which waits for what the stage before returned.
        dtype: of hidden states.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.model: Any = model
        self._ranks, self._hidden_size, self._dtype = ranks, hidden_size, dtype

    @property
    def fuses_decodes(self) -> bool:
        """Pass on to the model."""
        fuses: bool = self.model.fuses_decodes
        return fuses

    def forward(self, input_ids: torch.Tensor, *where: Any, **more: Any) -> torch.Tensor:
        """Run the stage's layers. What a stage that is not the last returns has been sent."""
        coords = self._ranks.coords

        def receive() -> torch.Tensor:
            shape = (input_ids.shape[0], self._hidden_size)
            room = torch.empty(shape, dtype=self._dtype, device=input_ids.device)
            return self._ranks.world.recv(room, coords.before)

        hidden: torch.Tensor = self.model(input_ids, *where, receive=None if coords.is_first_stage else receive, **more)
        if not coords.is_last_stage:
            self._ranks.world.send(hidden, coords.behind)
        return hidden

    def execute_dummy_step(self) -> None:
        """Run the model's dummy step, which hands no hidden states on."""
        self.model.execute_dummy_step()

    def count_load(self) -> torch.Tensor:
        """Pass on to the model."""
        load: torch.Tensor = self.model.count_load()
        return load

    def logits(self, hidden: torch.Tensor, **form: bool) -> torch.Tensor:
        """Return the model's logits; only the last stage has an output head."""
        logits: torch.Tensor = self.model.logits(hidden, **form)
        return logits
