"""A small model drafts for a large one: the first kind of speculation, and still the one that needs no training.

It must have the same vocabulary, though rows of padding at its end may be more or fewer. Its layers are further layers
under the same block ids: a block of a request holds K and V of both models, so what is shared, evicted or preempted is
so for both. Like the model's, its computed tokens catch up with the known ones; only that drafting goes on from there,
one token at a time, on its own guesses.

Source: Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from teachllm.layers.attention import AttentionMetadata
from teachllm.models.base import Model
from teachllm.models.draft_heads.base import draft_logits
from teachllm.spec_decode.drafter import DraftBatch, FlatTokens, KVCache


class DraftModel:
    """Any causal model that the engine runs.

    Args:
        model: from token ids to logits, as `models.base.Model`.
        kv_caches: its own, per layer (K, V).
        num_ids: that it knows.
        vocab_size: of the model that it drafts for.
        max_len: positions that it has, if they are fewer than that model's.
    """

    feature_layers: tuple[int, ...] = ()
    follows_always = False
    has_layers = True
    reads_all_hidden = False

    def __init__(
        self, model: Model, kv_caches: KVCache, num_ids: int, vocab_size: int, max_len: int | None = None
    ) -> None:
        self.module = self.model = model
        self.kv_caches = kv_caches
        self._num_ids, self._vocab_size, self._max_len = num_ids, vocab_size, max_len

    def propose(self, batch: DraftBatch) -> None:
        hidden = self.model(*self._arguments(batch.behind()))
        if batch.num_levels:
            hidden = hidden.index_select(0, batch.last)
        for level in range(batch.num_levels):
            batch.push(level, self._logits(hidden))
            if level + 1 < batch.num_levels:
                hidden = self.model(*self._arguments(batch.pushed(level)))

    def _arguments(self, tokens: FlatTokens) -> tuple[torch.Tensor, torch.Tensor, KVCache, AttentionMetadata]:
        input_ids, positions, metadata = tokens
        if self._num_ids < self._vocab_size:
            input_ids = input_ids.clamp(max=self._num_ids - 1)
        if self._max_len is not None:  # a GPU may compute also requests that do not ask, whose results are not read
            positions = positions.clamp(max=self._max_len - 1)
        return input_ids, positions, self.kv_caches, metadata

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, hidden_size] to [num_rows, vocab_size]; ids unknown to the draft model are never drawn."""
        logits = draft_logits(self.model, hidden)
        if self._num_ids < self._vocab_size:
            return F.pad(logits, (0, self._vocab_size - self._num_ids), value=-torch.inf)
        return logits[:, : self._vocab_size].contiguous()
