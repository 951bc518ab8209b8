"""A small model drafts for a large one: the first kind of speculation, and still the one that needs no training.

It must have the same vocabulary. Its layers are further layers under the same block ids: a block of a request holds K
and V of both models, so what is shared, evicted or preempted is so for both. Like the model's, its computed tokens
catch up with the known ones; only that drafting goes on from there, one token at a time, on its own guesses.

Source: Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
"""

from __future__ import annotations

from typing import Any

from teachllm.spec_decode.drafter import DraftBatch, FlatTokens, KVCache, logits_of


class DraftModel:
    """Any causal model that the engine runs.

    Args:
        model: from token ids to logits, as `LlamaForCausalLM`.
        kv_caches: its own, per layer (K, V).
    """

    feature_layers: tuple[int, ...] = ()
    follows_always = False
    has_layers = True
    reads_all_hidden = False

    def __init__(self, model: Any, kv_caches: KVCache) -> None:
        self.model = model
        self.kv_caches = kv_caches

    def propose(self, batch: DraftBatch) -> None:
        hidden = self.model(*self._arguments(batch.behind()))
        if batch.num_levels:
            hidden = hidden.index_select(0, batch.last)
        for level in range(batch.num_levels):
            batch.push(level, logits_of(self.model, hidden))
            if level + 1 < batch.num_levels:
                hidden = self.model(*self._arguments(batch.pushed(level)))

    def _arguments(self, tokens: FlatTokens) -> tuple[Any, ...]:
        input_ids, positions, metadata = tokens
        return input_ids, positions, self.kv_caches, metadata
