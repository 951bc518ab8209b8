"""Log-probabilities of prompt tokens, for requests that ask for them.

A prompt's positions predict its own next tokens, so what scores it is there after the forward pass; only the logits
have to be computed for every position instead of the last, a few rows at a time: of a long prompt they are gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from teachllm.core.scheduler_output import NewRow, ScheduledRequest, TokenLogprobs
from teachllm.sampling.sampler import Sampler

# The number of rows that are scored together, or sampled together where the sampler's general way is taken. A row takes
# 9 MiB for a vocabulary of 150,000: with twice as many, a small model would need more to sample than to compute.
SAMPLED_AT_ONCE = 16


class PromptLogprobs:
    """Which rows ask, and what they get.

    Args:
        logits_of: the model's output head, [num_rows, hidden_size] -> the columns of the logits that `sampler` has.
    """

    def __init__(self, logits_of: Callable[[torch.Tensor], torch.Tensor], sampler: Sampler) -> None:
        self._logits_of = logits_of
        self._sampler = sampler
        self._asked: dict[int, tuple[int, int]] = {}  # row -> (prompt length, how many top entries)

    def open_rows(self, opened: Sequence[tuple[int, NewRow]]) -> None:
        """Note which of the requests, each in its row, ask."""
        for row, new_row in opened:
            num_top = new_row.sampling_params.prompt_logprobs
            if num_top is not None:
                self._asked[row] = new_row.num_prompt_tokens, num_top

    def close_row(self, row: int) -> None:
        """Forget the request in `row`."""
        self._asked.pop(row, None)

    def any_due(self, scheduled_requests: Sequence[ScheduledRequest], rows: Sequence[int]) -> bool:
        """Return whether a step computes positions that predict prompt tokens of a request that asks."""
        if not self._asked:
            return False
        return any(
            scheduled.start + 1 < self._asked.get(row, (0, 0))[0]
            for scheduled, row in zip(scheduled_requests, rows, strict=True)
        )

    def score(
        self,
        scheduled_requests: Sequence[ScheduledRequest],
        rows: Sequence[int],
        starts: Sequence[int],
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> list[list[TokenLogprobs] | None]:
        """Return entries for prompt tokens [start + 1, start + num_tokens + 1) that exist; None where not asked for.

        Args:
            starts: index in its sequence of each request's first computed token.
            hidden: [num_tokens or more, hidden_size], the requests' tokens one after the other.
            token_ids: [max_num_rows, max_model_len], each row's sequence.
        """
        scored: list[list[TokenLogprobs] | None] = []
        first = 0
        for scheduled, row, start in zip(scheduled_requests, rows, starts, strict=True):
            num_prompt_tokens, num_top = self._asked.get(row, (0, 0))
            count = min(start + scheduled.num_tokens, num_prompt_tokens - 1) - start
            entries: list[TokenLogprobs] = []
            if count > 0:
                targets = token_ids[row, start + 1 : start + 1 + count].tolist()
                for i in range(0, count, SAMPLED_AT_ONCE):
                    logits = self._logits_of(hidden[first + i : first + min(i + SAMPLED_AT_ONCE, count)])
                    entries += self._sampler.prompt_logprobs(logits, targets[i : i + SAMPLED_AT_ONCE], num_top)
            scored.append(entries or None)
            first += scheduled.num_tokens
        return scored
