"""The drafter that guesses with Medusa heads, see `models/draft_heads/medusa.py`."""

from __future__ import annotations

import torch

from teachllm.models.base import Model
from teachllm.models.draft_heads.base import draft_logits
from teachllm.models.draft_heads.medusa import MedusaHeads
from teachllm.spec_decode.drafter import DraftBatch


class Medusa:
    """The drafter.

    Args:
        heads: filled.
        model: whose output head they use, unless they have their own.
    """

    feature_layers: tuple[int, ...] = ()
    follows_always = False
    has_layers = False
    reads_all_hidden = False

    def __init__(self, heads: MedusaHeads, model: Model) -> None:
        self.module = self.heads = heads
        self.model = model

    def propose(self, batch: DraftBatch) -> None:
        if not batch.num_levels:
            return
        hidden = batch.hidden.index_select(0, batch.newest)
        own = self.heads.own_heads
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        for level in range(batch.num_levels):
            lm_head = own[min(level, len(own) - 1)] if len(own) else self.model
            logits = draft_logits(lm_head, self.heads.head(level, hidden))
            batch.push(level, logits.index_select(0, rows))  # whatever was drawn before, the guess is the same
            if level + 1 < batch.num_levels:
                rows = rows.index_select(0, batch.parents(level))
