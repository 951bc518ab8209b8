"""Logits that drafts are drawn from, by a model's output head or a drafter's own."""

from __future__ import annotations

from typing import Protocol

import torch


class HasLogits(Protocol):
    """A model or an output head."""

    def logits(self, hidden: torch.Tensor, *, in_float32: bool) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size]."""
        ...


def draft_logits(head: HasLogits, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of a model or an output head, in float32; on a GPU, in its own dtype.

    A drafter's logits need no more: whatever they are, drafts are verified against what they were drawn from.

    Args:
        hidden: [num_rows, hidden_size].

    Returns:
        [num_rows, vocab_size].
    """
    return head.logits(hidden, in_float32=not hidden.is_cuda)
