"""EAGLE: one layer that continues the model's own hidden states, and so guesses what the model will say.

A draft model has to understand the text by itself. EAGLE is handed the model's understanding: of every position i the
hidden state there (its feature) and the token that was chosen after it, i + 1. From these one layer makes an estimate
of the next feature, whose output head gives token i + 2; then it goes on from its own estimates.

    EAGLE     feature: what the model's output head reads           x = fc([embedding, feature])
    EAGLE-3   three layers' residual streams, low, middle, high     g = fc([low, middle, high]), and the layer's
                                                                    attention reads [norm(embedding), norm(g)]

Its K and V at i depend on token i + 1, so where a prefix was found in the cache the last block is computed again, to
have the features that it starts from.

Sources: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", ICML 2024, and "EAGLE-3:
Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from teachllm.errors import ModelError
from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.embedding import Embedding
from teachllm.layers.linear import Destination, Linear
from teachllm.layers.norm import RMSNorm
from teachllm.layers.rotary import Rotary
from teachllm.models.base import Angles
from teachllm.models.llama import LlamaAttention, LlamaMLP, added_up
from teachllm.spec_decode.drafter import DraftBatch, KVCache, logits_of
from teachllm.spec_decode.eagle_config import EagleConfig


class EagleLayer(nn.Module):
    """The one block. EAGLE's has no norm before attention; EAGLE-3's attention reads embedding and feature."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        llama = config.llama
        self.is_third, self.norm_before_residual = config.is_third, config.norm_before_residual
        if config.is_third:
            self.input_layernorm = RMSNorm(llama.hidden_size, eps=llama.norm_eps)
            self.hidden_norm = RMSNorm(llama.hidden_size, eps=llama.norm_eps)
        input_size = llama.hidden_size * (2 if config.is_third else 1)
        self.self_attn = LlamaAttention(llama, llama.windows[0], input_size=input_size)
        self.post_attention_layernorm = RMSNorm(llama.hidden_size, eps=llama.norm_eps)
        self.mlp = LlamaMLP(llama)

    def forward(
        self,
        embeddings: torch.Tensor,
        x: torch.Tensor,
        angles: Angles,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """embeddings, x: [num_tokens, hidden_size]; x is the feature, for EAGLE already mixed with the embedding."""
        h, residual = x, x
        if self.is_third:
            normed, _ = self.hidden_norm(x)
            residual = normed if self.norm_before_residual else x
            h = torch.cat((self.input_layernorm(embeddings)[0], normed), dim=-1)
        h = self.self_attn(h, angles, kv_cache, metadata)
        y, residual = self.self_attn.o_proj.add_to_residual(residual, h)
        h, residual = self.post_attention_layernorm(y, residual)
        y, residual = self.mlp.down_proj.add_to_residual(residual, self.mlp(h))
        return added_up(y, residual)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Destination]]:
        """(name, destination) of every tensor that a checkpoint holds for this module."""
        if self.is_third:
            yield "input_layernorm.weight", self.input_layernorm.weight.data
            yield "hidden_norm.weight", self.hidden_norm.weight.data
        yield "post_attention_layernorm.weight", self.post_attention_layernorm.weight.data
        for prefix, module in (("self_attn", self.self_attn), ("mlp", self.mlp)):
            for name, destination in module.checkpoint_tensors():
                yield f"{prefix}.{name}", destination


class EagleHead(nn.Module):
    """From features and tokens to the next features, and from those to logits."""

    def __init__(self, config: EagleConfig, max_len: int) -> None:
        super().__init__()
        llama, size = config.llama, config.llama.hidden_size
        self.config = config
        num_inputs = len(config.feature_layers) if config.is_third else 2
        self.input_norm = RMSNorm(num_inputs * size, eps=llama.norm_eps) if config.norm_before_fc else None
        num_normed = num_inputs if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(size, eps=llama.norm_eps) for _ in range(num_normed))
        self.fc = Linear(num_inputs * size, {"fc": size}, config.has_fc_bias)
        self.rotary = Rotary(llama.rotary, max_len)
        self.layer = EagleLayer(config)
        self.norm = RMSNorm(size, eps=llama.norm_eps) if config.is_third else None
        self.embed_tokens = Embedding(llama.vocab_size, size) if config.has_embedding else None
        self.lm_head = Embedding(config.draft_vocab_size, size) if config.has_head else None
        # Which id of the model each of its own stands for, as the distance from it.
        self.d2t: torch.Tensor | None
        own_ids = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if config.has_own_ids else None
        self.register_buffer("d2t", own_ids)

    def fused(self, hidden: torch.Tensor, features: list[torch.Tensor]) -> torch.Tensor:
        """Return what the model computed at some positions, as one feature each, [num_tokens, hidden_size]."""
        if not self.config.is_third:
            return hidden
        if self.fc_norm:
            features = [norm(feature)[0] for norm, feature in zip(self.fc_norm, features, strict=True)]
        fused = torch.cat(features, dim=-1)
        return self.fc(fused if self.input_norm is None else self.input_norm(fused)[0])

    def forward(
        self,
        embeddings: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """The next features, [num_tokens, hidden_size].

        Args:
            embeddings: [num_tokens, hidden_size] of the tokens one further on.
            features, positions: of the tokens themselves.
        """
        x = features
        if not self.config.is_third:
            x = self.fc(torch.cat((embeddings, features), dim=-1))
        x = self.layer(embeddings, x, self.rotary(positions), kv_caches[0], metadata)
        return self.norm(x)[0] if self.norm is not None and self.config.norm_output else x

    def logits(self, features: torch.Tensor, model: Any) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size], by its own output head or the model's."""
        hidden = features if self.norm is None or self.config.norm_output else self.norm(features)[0]
        logits = logits_of(model if self.lm_head is None else self.lm_head, hidden)
        if self.d2t is None or self.lm_head is None:
            return logits
        whole = logits.new_full((logits.shape[0], self.config.llama.vocab_size), -torch.inf)
        ids = self.d2t + torch.arange(self.config.draft_vocab_size, device=logits.device)
        return whole.index_copy_(1, ids, logits)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Destination]]:
        """(name, destination) of every tensor of a checkpoint."""
        if self.input_norm is not None:
            yield "input_norm.weight", self.input_norm.weight.data
        for index, norm in enumerate(self.fc_norm):
            assert isinstance(norm, RMSNorm)
            yield f"fc_norm.{index}.weight", norm.weight.data
        yield from self.fc.parts()
        for name, destination in self.layer.checkpoint_tensors():
            yield f"{self.config.layer_name}.{name}", destination
        if self.norm is not None:
            yield "norm.weight", self.norm.weight.data
        if self.embed_tokens is not None:
            yield "embed_tokens.weight", self.embed_tokens.weight.data
        if self.lm_head is not None:
            yield "lm_head.weight", self.lm_head.weight.data
        if self.d2t is not None:
            yield "d2t", self.d2t

    def check(self, folder: Path) -> None:
        """Looks at what was read from a checkpoint.

        Raises:
            ModelError: an id that is none of the model's.
        """
        if self.d2t is None:
            return
        ids = self.d2t + torch.arange(self.config.draft_vocab_size, device=self.d2t.device)
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.config.llama.vocab_size:
            raise ModelError(
                f"{folder}: tensor d2t leads to ids from {int(ids.min())} to {int(ids.max())}, outside the vocabulary "
                f"of {self.config.llama.vocab_size}"
            )


class Eagle:
    """The drafter.

    Args:
        head: filled.
        model: whose features it continues, and whose embedding and output head it uses unless it has its own.
        kv_caches: of its one layer.
    """

    follows_always = True
    has_layers = True

    def __init__(self, head: EagleHead, model: Any, kv_caches: KVCache) -> None:
        self.head = head
        self.model = model
        self.kv_caches = kv_caches
        self.feature_layers = head.config.feature_layers
        self.reads_all_hidden = not head.config.is_third
        self._embed = model.embed_tokens if head.embed_tokens is None else head.embed_tokens

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
        """Of the tokens at `places` of the step, [num_tokens, hidden_size]."""
        low_to_high = [batch.features[layer].index_select(0, places) for layer in self.feature_layers]
        hidden = batch.hidden.index_select(0, places) if self.reads_all_hidden else batch.hidden
        return self.head.fused(hidden, low_to_high)
