"""Medusa heads: one for every token ahead, each a small layer on the target's last hidden state.

No head sees what the others guess, nor even the token just sampled, so all guess in one go and soon go astray
(https://arxiv.org/abs/2401.10774). Their logits come from the target's own lm_head.

The names of modules and settings are those that vLLM reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from drafting import NUM_DRAFTS, TrainingBatch, distil, lesson, load_heads, read_config, save_heads
from torch import Tensor, nn

CONFIG: dict[str, Any] = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": 256,
    "num_heads": NUM_DRAFTS,
    "num_hidden_layers": 2,
    "medusa_fc_bias": True,
    "vocab_size": 4096,
    "truncated_vocab_size": 4096,
    "original_lm_head": True,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}


class MedusaBlock(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, bias = config["hidden_size"], config["medusa_fc_bias"]
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(config["num_hidden_layers"]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class TrainedMedusa(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(MedusaBlock(config) for _ in range(config["num_heads"]))

    @classmethod
    def fresh(cls, target: Any, config: dict[str, Any] = CONFIG) -> TrainedMedusa:
        return cls(config)

    @classmethod
    def load(cls, folder: Path) -> TrainedMedusa:
        medusa = cls(read_config(folder))
        load_heads(folder, medusa)
        return medusa

    def loss(self, batch: TrainingBatch) -> Tensor:
        total = torch.zeros((), device=batch.ids.device)
        for head, block in enumerate(self.blocks):
            wanted, target_logits = lesson(batch, head + 2)
            total = total + distil(F.linear(block(batch.hidden[-1][wanted]), batch.embedding), target_logits)
        return total

    def drafts(self, batch: TrainingBatch) -> Tensor:
        guesses = [F.linear(block(batch.hidden[-1]), batch.embedding).argmax(dim=-1) for block in self.blocks]
        return torch.stack(guesses, dim=-1)

    def save(self, folder: Path) -> None:
        save_heads(folder, self, self.config)
