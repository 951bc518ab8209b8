"""What all draft heads share: how their config.json is read, and the logits that drafts are drawn from."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from teachllm.checkpoint.files import read_json
from teachllm.checkpoint.json_values import JsonObject, without_nulls
from teachllm.models.config_keys import MAY_BE_NULL


def read_settings(folder: Path) -> JsonObject:
    """Return a head's config.json without the keys that say null and mean that they are absent.

    Raises:
        ModelError: there is none, or it is no JSON object.
    """
    return JsonObject(without_nulls(read_json(folder / "config.json"), MAY_BE_NULL), f"{folder}/config.json")


class HasLogits(Protocol):
    """A model or an output head."""

    def logits(self, hidden: torch.Tensor, *, in_float32: bool) -> torch.Tensor:
        """Map [num_rows, hidden_size] to [num_rows, vocab_size]."""
        ...


def draft_logits(head: HasLogits, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of a model or an output head, in float32; on a GPU, in its own dtype.

    A drafter's logits need no more: whatever they are, drafts are verified against what they were drawn from.

    Args:
        hidden: [num_rows, hidden_size].

    Returns:
        [num_rows, vocab_size].
    """
    return head.logits(hidden, in_float32=hidden.is_cpu)
