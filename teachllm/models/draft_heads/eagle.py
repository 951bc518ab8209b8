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

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from teachllm.distributed.ranks import WHOLE
from teachllm.errors import ModelError
from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.checkpoint_tensors import Destination, checkpoint_tensors, destination
from teachllm.layers.embedding import Embedding
from teachllm.layers.linear import Linear
from teachllm.layers.norm import RMSNorm
from teachllm.layers.rotary import Rotary
from teachllm.layers.weights.scheme import UNQUANTIZED
from teachllm.models.base import Angles, PagedKV
from teachllm.models.decoder import added_up
from teachllm.models.draft_heads.base import HasLogits, draft_logits
from teachllm.models.draft_heads.eagle_config import EagleConfig
from teachllm.models.families.llama import LlamaAttention, LlamaMLP


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
        self.self_attn = LlamaAttention(
            llama, llama.windows[0], schemes=UNQUANTIZED, shard=WHOLE, input_size=input_size
        )
        self.post_attention_layernorm = RMSNorm(llama.hidden_size, eps=llama.norm_eps)
        self.mlp = LlamaMLP(llama, schemes=UNQUANTIZED, shard=WHOLE)

    def forward(
        self,
        embeddings: torch.Tensor,
        x: torch.Tensor,
        angles: Angles,
        kv_cache: PagedKV,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Run the layer on `embeddings` and the feature `x`, [num_tokens, hidden_size]; EAGLE's `x` has both mixed."""
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
        kv_caches: Sequence[PagedKV],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return the next features, [num_tokens, hidden_size].

        Args:
            embeddings: [num_tokens, hidden_size] of the tokens one further on.
            features, positions: of the tokens themselves.
        """
        x = features
        if not self.config.is_third:
            x = self.fc(torch.cat((embeddings, features), dim=-1))
        x = self.layer(embeddings, x, self.rotary(positions), kv_caches[0], metadata)
        return self.norm(x)[0] if self.norm is not None and self.config.norm_output else x

    def logits(self, features: torch.Tensor, model: HasLogits) -> torch.Tensor:
        """Map [num_rows, hidden_size] to [num_rows, vocab_size] with the head's own output head or the model's."""
        hidden = features if self.norm is None or self.config.norm_output else self.norm(features)[0]
        logits = draft_logits(model if self.lm_head is None else self.lm_head, hidden)
        if self.d2t is None or self.lm_head is None:
            return logits
        whole = logits.new_full((logits.shape[0], self.config.llama.vocab_size), -torch.inf)
        ids = self.d2t + torch.arange(self.config.draft_vocab_size, device=logits.device)
        return whole.index_copy_(1, ids, logits)

    def checkpoint_tensors(self, path: str = "") -> Iterator[tuple[str, Destination]]:
        """Yield (name, destination) of every tensor of a checkpoint."""
        for name, module in self.named_children():
            yield from checkpoint_tensors(module, self.config.layer_name if module is self.layer else name)
        if self.d2t is not None:
            yield "d2t", destination(self.d2t, constant=0.0)

    def check(self, folder: Path) -> None:
        """Check what was read from a checkpoint.

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
