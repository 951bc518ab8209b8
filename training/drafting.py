"""Share between drafters what they see of the target, what they should guess, and how a chain of guesses attends.

A drafter guesses what the target, `teachlm`, says next, so it is taught the target's own probabilities rather than
the corpus' tokens (distillation for speculative decoding: https://arxiv.org/abs/2310.08461).

Everywhere here a guess belongs to the position i of the last token that the target has read. Token i + 1 is known
then, since the target has just sampled it; the guesses are for tokens i + 2, i + 3 and so on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_DRAFTS = 4


@dataclass(frozen=True)
class TrainingBatch:
    """Conversations as the target reads them."""

    ids: Tensor  # [rows, length]
    spoken: Tensor  # [rows, length], bool: said by the assistant
    hidden: tuple[Tensor, ...]  # [rows, length, hidden_size] each: every layer's input; last, what lm_head reads
    embedding: Tensor  # [vocab_size, hidden_size]; the target's lm_head is the same matrix


class TrainedDrafter(Protocol):
    def loss(self, batch: TrainingBatch) -> Tensor:
        """Return how far its guesses are from the target's, where the assistant speaks."""

    def drafts(self, batch: TrainingBatch) -> Tensor:
        """[rows, length, NUM_DRAFTS]: greedy guesses from every position, each chain fed with nothing but its own."""

    def save(self, folder: Path) -> None: ...


def load_target(folder: Path, device: str) -> Any:
    """The model to guess for, frozen."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval().requires_grad_(False)


@torch.no_grad()
def read(target: Any, ids: Tensor, spoken: Tensor) -> TrainingBatch:
    hidden = target.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    return TrainingBatch(ids, spoken, hidden, target.lm_head.weight)


def ahead(x: Tensor, distance: int) -> Tensor:
    """Position i gets what stands at i + distance; the last ones get zeros."""
    return torch.cat([x[:, distance:], torch.zeros_like(x[:, :distance])], dim=1)


def lesson(batch: TrainingBatch, distance: int) -> tuple[Tensor, Tensor]:
    """Positions whose next `distance` tokens are all the assistant's, and the target's logits for the last of these.

    Returns a mask [rows, length] and logits [num_positions, vocab_size].
    """
    wanted = ahead(batch.spoken, 1)
    for nearer in range(2, distance + 1):
        wanted = wanted & ahead(batch.spoken, nearer)
    return wanted, F.linear(ahead(batch.hidden[-1], distance - 1)[wanted], batch.embedding)


def distil(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Mean cross-entropy with the target's probabilities; least where both are equal."""
    return F.cross_entropy(logits.float(), target_logits.float().softmax(dim=-1))


def chain_mask(length: int, step: int, device: torch.device) -> Tensor:
    """Return the keys that a chain attends to in step `step`, when chains from all positions are drafted at once.

    Keys are those of the text, then those of each step so far. The chain from position i sees the text up to i and
    its own guesses. Returns [length, (step + 1) * length], bool.
    """
    text = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    own = torch.eye(length, dtype=torch.bool, device=device)
    return torch.cat([text, *[own] * step], dim=1)


def save_heads(folder: Path, module: torch.nn.Module, config: dict[str, Any]) -> None:
    """Weights in bfloat16 under the module's own names, and the configuration."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in module.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_heads(folder: Path, module: torch.nn.Module) -> None:
    """Raises RuntimeError where names or shapes differ."""
    from safetensors.torch import load_file

    module.load_state_dict(load_file(folder / "model.safetensors"))


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config
