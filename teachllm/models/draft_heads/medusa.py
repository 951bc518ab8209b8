"""Medusa: further heads on the model's last hidden state, each guessing one token further ahead.

The state from which the model predicts the next token knows something of the ones after it. Head h turns it into a
guess of the (h + 2)th: x + silu(W x + b), a few times, then an output head. One small product per head, no layer, no
KV; but a head does not know what the others guess.

Checkpoints: vLLM's form (`blocks.*`, `lm_heads.*`) and the authors' (`0.0.linear.weight`, pickled). Text Generation
Inference leaves out the output heads in its second version: all use the model's.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from teachllm.checkpoint.json_values import JsonObject
from teachllm.errors import ModelError
from teachllm.layers.embedding import Embedding
from teachllm.layers.linear import Linear
from teachllm.models.shape import Shape
from teachllm.models.spec import PagedSpec


@dataclass(frozen=True)
class MedusaConfig:
    """Describe what Medusa heads are.

    Attributes:
        num_heads: that are used; a checkpoint may hold more.
        num_lm_heads: output heads of their own: one each, one for all, or none, where all use the model's.
        feature_layers, kept: they read the model's last hidden state alone, and keep nothing per token.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int
    has_bias: bool
    num_lm_heads: int
    feature_layers: ClassVar[tuple[int, ...]] = ()
    kept: ClassVar[PagedSpec | None] = None

    @property
    def num_ids(self) -> int:
        """Return the number of ids that they can guess among."""
        return self.vocab_size

    @staticmethod
    def parse(settings: JsonObject, stored: Collection[str], model: Shape, num_drafts: int) -> MedusaConfig:
        """Read the configuration; take from the model what the authors' form leaves out.

        Args:
            settings: config.json.
            stored: names of the checkpoint's tensors; none, if there are no weights.
            model: the model that the heads were made for.
            num_drafts: levels of drafts, each of which takes a head.

        Raises:
            ModelError: the heads are for another model or too few, or have a vocabulary of their own, or a value has a
                wrong type.
        """
        is_authors = "medusa_num_heads" in settings
        names = {_in_one_form(name) for name in stored}
        has_heads = any(name.startswith("lm_heads.") for name in names)
        shares_head = settings.flag("original_lm_head", bool(names) and not has_heads)
        num_said = settings.integer("medusa_num_heads", settings.integer("num_heads", 0))
        if not num_said:
            raise ModelError("config.json describes no Medusa heads: it lacks 'num_heads' and 'medusa_num_heads'")
        # The authors' config.json says 2 beside 5 stored heads.
        found = [int(match[1]) for name in names if (match := re.match(r"blocks\.(\d+)\.", name))]
        num_heads = max(found) + 1 if found else num_said
        if num_heads < num_drafts:
            raise ModelError(
                f"it has {num_heads} heads, one for each draft: set num_speculative_tokens to {num_heads} or less, not "
                f"to {num_drafts}"
            )
        for name, ours in (("hidden_size", model.hidden_size), ("vocab_size", model.vocab_size)):
            if (theirs := settings.integer(name, ours)) != ours and not is_authors:
                raise ModelError(f"the Medusa heads have {name}={theirs} and the model has {ours}: take its own heads")
        if settings.integer("truncated_vocab_size", model.vocab_size) != model.vocab_size:
            raise ModelError("Medusa heads with a truncated vocabulary are not supported: take heads with a whole one")
        layers_key = "medusa_num_layers" if "medusa_num_layers" in settings else "num_hidden_layers"
        num_layers = settings.integer(layers_key, 1)
        layers = [int(match[1]) for name in names if (match := re.match(r"blocks\.\d+\.layers\.(\d+)\.", name))]
        if layers and num_layers > max(layers) + 1:
            raise settings.refusal(layers_key, f"at most {max(layers) + 1}, the number of layers that are stored")
        return MedusaConfig(
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            num_heads=num_drafts,
            num_layers=num_layers,
            has_bias=is_authors or settings.flag("medusa_fc_bias", False),
            num_lm_heads=int("lm_heads.0.weight" in names) if shares_head else num_drafts,
        )

    def tensor_name(self, name: str) -> str | None:
        """Return a tensor's name in vLLM's form; None: it is not read, like the tensors of further heads."""
        name = _in_one_form(name)
        match = re.match(r"(blocks|lm_heads)\.(\d+)\.", name)
        num_read = {"blocks": self.num_heads, "lm_heads": self.num_lm_heads}
        is_read = name != "token_map" if match is None else int(match[2]) < num_read[match[1]]
        return name if is_read else None


def _in_one_form(name: str) -> str:
    """Return a tensor's name in vLLM's form; the only output head becomes the first."""
    name = re.sub(r"^(medusa_heads?|model)\.", "", name)
    if found := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):  # as Medusa's authors write
        return f"blocks.{found[1]}.layers.{found[2]}.{found[3]}"
    if found := re.fullmatch(r"(\d+)\.\d+\.weight", name):
        return f"lm_heads.{found[1]}.weight"
    return "lm_heads.0.weight" if name == "lm_head.weight" else name


class MedusaBlock(nn.Module):
    """Some layers that turn the model's hidden state into a head's."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self._layers = [Linear(size, {str(index): size}, config.has_bias) for index in range(config.num_layers)]
        self.layers = nn.ModuleList(self._layers)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, hidden_size] to the same shape, as input of the output head."""
        for layer in self._layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class MedusaHeads(nn.Module):
    """The heads, and their output heads. Their tensors are named as in vLLM's form.

    Attributes:
        own_heads: the output heads: one each, one for all, or none.
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MedusaBlock(config) for _ in range(config.num_heads))
        self.own_heads = [Embedding(config.vocab_size, config.hidden_size) for _ in range(config.num_lm_heads)]
        self.lm_heads = nn.ModuleList(self.own_heads)

    def check(self, folder: Path) -> None:
        """Accept whatever was read from a checkpoint."""

    def head(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, hidden_size] to the same shape, as input of the output head."""
        turned: torch.Tensor = self.blocks[index](hidden)
        return turned
