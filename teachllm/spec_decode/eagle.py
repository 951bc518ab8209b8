"""The drafter that continues a model's hidden states with an EAGLE head, see `models/draft_heads/eagle.py`."""

from __future__ import annotations

import torch

from teachllm.models.decoder import CausalLM
from teachllm.models.draft_heads.eagle import EagleHead
from teachllm.spec_decode.drafter import DraftBatch, KVCache


class Eagle:
    """The drafter.

    Args:
        head: filled.
        model: whose features it continues, and whose embedding and output head it uses unless it has its own.
        kv_caches: of its one layer.
    """

    follows_always = True
    has_layers = True

    def __init__(self, head: EagleHead, model: CausalLM, kv_caches: KVCache) -> None:
        self.module = self.head = head
        self.model = model
        self.kv_caches = kv_caches
        self.feature_layers = head.config.feature_layers
        self.reads_all_hidden = not head.config.is_third
        self._embed = model.embed if head.embed_tokens is None else head.embed_tokens

    def propose(self, batch: DraftBatch) -> None:
        places, (next_ids, positions, metadata) = batch.verified()
        x = self._features(batch, places)
        x = self.head(self._embed(next_ids), x, positions, self.kv_caches, metadata)
        if batch.num_levels:
            x = x.index_select(0, batch.last)
        for level in range(batch.num_levels):
            batch.push(level, self.head.logits(x, self.model))
            if level + 1 < batch.num_levels:
                ids, positions, metadata = batch.pushed(level, shift=-1)
                x = x.index_select(0, batch.parents(level))
                x = self.head(self._embed(ids), x, positions, self.kv_caches, metadata)

    def _features(self, batch: DraftBatch, places: torch.Tensor) -> torch.Tensor:
        """Return the features of the tokens at `places` of the step, [num_tokens, hidden_size]."""
        low_to_high = [batch.features[layer].index_select(0, places) for layer in self.feature_layers]
        hidden = batch.hidden.index_select(0, places) if self.reads_all_hidden else batch.hidden
        return self.head.fused(hidden, low_to_high)
