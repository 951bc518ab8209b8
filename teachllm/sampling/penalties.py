"""Repetition, presence and frequency penalties: tokens that were already used become less (or more) likely.

Repetition (Keskar et al., "CTRL", 2019) looks at prompt and output and scales the logit towards less likely.
Presence and frequency (OpenAI's API) look at the output alone and subtract, once or once per occurrence.
The histories are counted on the device from the sequences themselves: no per-request counters to keep in step
with drafts that are rejected and requests that are preempted.
"""

from __future__ import annotations

import torch


def apply_penalties(
    logits: torch.Tensor,
    histories: torch.Tensor,
    lengths: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    repetition_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
) -> torch.Tensor:
    """The penalised logits.

    Args:
        logits: [P, vocab_size] float32.
        histories: [P, width] token ids of each sequence, valid before `lengths`; those outside of the vocabulary, as
            the tokens of other ranks are, count for nothing.
        lengths: [P] int64, tokens before the one being sampled.
        num_prompt_tokens: [P] int64.
        repetition_penalty, presence_penalty, frequency_penalty: [P] float32; 1, 0 and 0 change nothing.

    Returns:
        [P, vocab_size] float32.
    """
    column = torch.arange(histories.shape[1], device=logits.device)
    known = column < lengths[:, None]  # [P, width]
    in_output = known & (column >= num_prompt_tokens[:, None])
    output_counts = _count(histories, in_output, logits.shape[1])
    in_prompt = _count(histories, known & ~in_output, logits.shape[1]) > 0
    in_output_ids = output_counts > 0

    # A positive logit is divided and a negative one multiplied: both move the same way.
    repetition = repetition_penalty[:, None]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | in_output_ids, scaled, logits)
    return logits - frequency_penalty[:, None] * output_counts - presence_penalty[:, None] * in_output_ids


def _count(histories: torch.Tensor, included: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[P, vocab_size] float32: how often each id occurs among the included positions."""
    # Excluded positions are counted in one more column, which is cut off: no shape depends on the data.
    included = included & (histories >= 0) & (histories < vocab_size)
    ids = torch.where(included, histories.long(), vocab_size)
    counts = torch.zeros((histories.shape[0], vocab_size + 1), device=histories.device)
    return counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.float32))[:, :vocab_size]
