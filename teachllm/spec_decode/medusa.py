"""Medusa: further heads on the model's last hidden state, each guessing one token further ahead.

The state from which the model predicts the next token knows something of the ones after it. Head h turns it into a
guess of the (h + 2)th: x + silu(W x + b), a few times, then an output head. One small product a head, no layer, no KV;
but a head does not know what the others guess.

Checkpoints: vLLM's form (`blocks.*`, `lm_heads.*`) and the authors' (`0.0.linear.weight`, pickled).

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from teachllm.layers.embedding import Embedding
from teachllm.layers.linear import Linear
from teachllm.models.registry import ModelError
from teachllm.spec_decode.drafter import DraftBatch, logits_of


@dataclass(frozen=True)
class MedusaConfig:
    """What a config.json of Medusa heads says; `shares_head`: all use the model's own output head."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int
    has_bias: bool
    shares_head: bool

    @staticmethod
    def parse(raw: dict[str, Any], hidden_size: int, vocab_size: int) -> MedusaConfig:
        """Reads it; what the authors' form leaves out is the model's.

        Raises:
            ModelError: the heads are for another model, or have a vocabulary of their own.
        """
        is_authors = "medusa_num_heads" in raw
        found = MedusaConfig(
            hidden_size=hidden_size if is_authors else raw.get("hidden_size", hidden_size),
            vocab_size=vocab_size if is_authors else raw.get("vocab_size", vocab_size),
            num_heads=raw.get("medusa_num_heads", raw.get("num_heads", 0)),
            num_layers=raw.get("medusa_num_layers", raw.get("num_hidden_layers", 1)),
            has_bias=is_authors or raw.get("medusa_fc_bias", False),
            shares_head=raw.get("original_lm_head", False),
        )
        if found.num_heads < 1:
            raise ModelError("config.json describes no Medusa heads: it lacks 'num_heads' and 'medusa_num_heads'")
        for name, theirs, ours in (
            ("hidden_size", found.hidden_size, hidden_size),
            ("vocab_size", found.vocab_size, vocab_size),
        ):
            if theirs != ours:
                raise ModelError(f"the Medusa heads have {name}={theirs} and the model has {ours}: take its own heads")
        if raw.get("truncated_vocab_size", vocab_size) != vocab_size:
            raise ModelError("Medusa heads with a truncated vocabulary are not supported: take heads with a whole one")
        return found


class MedusaHeads(nn.Module):
    """The heads; `lm_heads` is empty where they share the model's."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(Linear(size, {"linear": size}, config.has_bias) for _ in range(config.num_layers))
            for _ in range(config.num_heads)
        )
        num_own = 0 if config.shares_head else config.num_heads
        self.lm_heads = nn.ModuleList(Embedding(config.vocab_size, size) for _ in range(num_own))

    def head(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> the same, for the output head."""
        block = self.blocks[index]
        assert isinstance(block, nn.ModuleList)
        for layer in block:
            hidden = hidden + F.silu(layer(hidden))
        return hidden

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, destination) of every tensor of a checkpoint in vLLM's form."""
        for index, block in enumerate(self.blocks):
            assert isinstance(block, nn.ModuleList)
            for number, layer in enumerate(block):
                assert isinstance(layer, Linear)
                for name, destination in layer.parts():
                    yield f"blocks.{index}.layers.{number}.{name.removeprefix('linear.')}", destination
        for index, lm_head in enumerate(self.lm_heads):
            assert isinstance(lm_head, Embedding)
            yield f"lm_heads.{index}.weight", lm_head.weight.data


class Medusa:
    """The drafter.

    Args:
        heads: filled.
        model: whose output head they share, unless they have their own.
    """

    feature_layers: tuple[int, ...] = ()
    follows_always = False
    has_layers = False
    reads_all_hidden = False

    def __init__(self, heads: MedusaHeads, model: Any) -> None:
        self.heads = heads
        self.model = model

    def propose(self, batch: DraftBatch) -> None:
        if not batch.num_levels:
            return
        hidden = batch.hidden.index_select(0, batch.newest)
        own = self.heads.lm_heads
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        for level in range(batch.num_levels):
            logits = logits_of(own[level] if len(own) else self.model, self.heads.head(level, hidden))
            batch.push(level, logits.index_select(0, rows))  # whatever was drawn before, the guess is the same
            if level + 1 < batch.num_levels:
                rows = rows.index_select(0, batch.parents(level))
