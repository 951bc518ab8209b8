"""Constraints that name token ids: allowed ids, bad words, biases, and no stop token before `min_tokens`.

Each is a short list per request. For a batch the lists are joined end to end, every entry with the logits row
it belongs to, so that one indexed addition serves all rows: a bias adds its value, a ban adds minus infinity.
A row without constraints appears in none of the lists, and a step costs as much as there are ids in them: a long
bad word beside a thousand short ones makes no wide table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from teachllm.core.scheduler_output import NewRow
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.sampling.transfers import to_device
from teachllm.sampling.validation import check_ids

_MINUS_INFINITY = float("-inf")
_Ids = NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class RowConstraints:
    """One request's constraints, on the host, as arrays of int64.

    Attributes:
        allowed: [A] columns of the logits whose tokens may be sampled; None is all.
        word_ends: [W] columns of the bad words' last ids; each is banned when the output ends with the ids before it.
        beginnings: [3, S] the ids before them, of all words: its word, its place from the end (1 is the last), and it.
        bias_ids, bias_values: [B] columns, and what is added to their logits (float32).
        stop_token_ids: [T] columns that are banned before `min_tokens` outputs.
    """

    allowed: _Ids | None
    word_ends: _Ids
    beginnings: _Ids
    bias_ids: _Ids
    bias_values: NDArray[np.float32]
    stop_token_ids: _Ids

    @classmethod
    def of(cls, new_row: NewRow, columns: Columns) -> RowConstraints | None:
        """Return what a request constrains of these columns, or None if nothing.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        params, vocab_size, first = new_row.sampling_params, columns.vocab_size, columns.first_id
        allowed = params.allowed_token_ids
        bad_words = [word for word in new_row.bad_word_token_ids if word]
        bias = params.logit_bias or {}
        # A stop id beyond the logits (a checkpoint may declare one) cannot be sampled, so it needs no ban.
        stops = [i for i in sorted(new_row.stop_token_ids) if i < vocab_size] if params.min_tokens > 0 else []
        check_ids("allowed_token_ids", allowed or (), vocab_size)
        check_ids("bad_words", (token_id for word in bad_words for token_id in word), vocab_size)
        check_ids("logit_bias", bias, vocab_size)
        if not columns.are_all:
            allowed = None if allowed is None else [each for each in allowed if columns.has(each)]
            bad_words = [word for word in bad_words if columns.has(word[-1])]
            bias = {each: value for each, value in bias.items() if columns.has(each)}
            stops = list(filter(columns.has, stops))
        if allowed is None and not (bad_words or bias or stops):
            return None
        beginnings = [
            (number, len(word) - 1 - place, token_id)
            for number, word in enumerate(bad_words)
            for place, token_id in enumerate(word[:-1])
        ]
        return cls(
            allowed=None if allowed is None else _ids(allowed) - first,
            word_ends=_ids(word[-1] for word in bad_words) - first,
            beginnings=np.array(beginnings, dtype=np.int64).reshape(-1, 3).T,
            bias_ids=_ids(bias) - first,
            bias_values=np.fromiter(bias.values(), dtype=np.float32),
            stop_token_ids=_ids(stops) - first,
        )


@dataclass(slots=True, frozen=True)
class BatchConstraints:
    """The constraints of all logits rows, joined; `*_rows` are indices of logits rows.

    Attributes:
        allowed_rows: [A]; `entry_rows`, `entry_ids`: [N] which of the A rows allows which id.
        word_rows, word_ends: [W].
        beginning_rows, beginning_words, beginning_places, beginning_ids: [S] of which row and word each id is, how far
            from the end of the text it has to stand (1 is the last), and it.
        bias_rows, bias_ids, bias_values: [B].
        stop_rows, stop_ids: [T].
    """

    allowed_rows: torch.Tensor
    entry_rows: torch.Tensor
    entry_ids: torch.Tensor
    word_rows: torch.Tensor
    word_ends: torch.Tensor
    beginning_rows: torch.Tensor
    beginning_words: torch.Tensor
    beginning_places: torch.Tensor
    beginning_ids: torch.Tensor
    bias_rows: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    stop_rows: torch.Tensor
    stop_ids: torch.Tensor

    @property
    def num_ids(self) -> int:
        """Return how many ids a step looks at."""
        return sum(ids.numel() for ids in (self.entry_ids, self.word_ends, self.beginning_ids, self.bias_ids))

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        token_ids: torch.Tensor,
        num_prompt_tokens: torch.Tensor,
        min_tokens: torch.Tensor,
    ) -> None:
        """Applies all constraints to `logits`, in place.

        Args:
            logits: [R, vocab_size] float32.
            rows: [R] the row of `token_ids` that holds each one's sequence.
            lengths: [R] tokens before the one being sampled.
            token_ids: [max_num_rows, max_model_len].
            num_prompt_tokens, min_tokens: [R].
        """
        if self.allowed_rows.numel():
            kept = logits[self.entry_rows, self.entry_ids]
            logits.index_fill_(0, self.allowed_rows, _MINUS_INFINITY)
            logits.index_put_((self.entry_rows, self.entry_ids), kept)
        if self.word_rows.numel():
            complete = self._about_to_complete(rows, lengths, token_ids, num_prompt_tokens)
            _add(logits, self.word_rows, self.word_ends, torch.where(complete, _MINUS_INFINITY, 0.0))
        if self.bias_rows.numel():
            _add(logits, self.bias_rows, self.bias_ids, self.bias_values)
        if self.stop_rows.numel():
            too_early = (lengths - num_prompt_tokens < min_tokens)[self.stop_rows]
            _add(logits, self.stop_rows, self.stop_ids, torch.where(too_early, _MINUS_INFINITY, 0.0))

    def _about_to_complete(
        self, rows: torch.Tensor, lengths: torch.Tensor, token_ids: torch.Tensor, num_prompt_tokens: torch.Tensor
    ) -> torch.Tensor:
        """[W] bool: whether the output ends with all of the word but its last id."""
        columns = lengths[self.beginning_rows] - self.beginning_places  # [S]
        in_output = columns >= num_prompt_tokens[self.beginning_rows]
        recent = token_ids[rows[self.beginning_rows], columns.clamp(min=0)]
        differs = ~(in_output & (recent == self.beginning_ids))
        num_different = torch.zeros_like(self.word_rows, dtype=torch.int32)
        return num_different.index_add_(0, self.beginning_words, differs.to(torch.int32)) == 0


def join_constraints(constrained: Sequence[tuple[int, RowConstraints]], device: torch.device) -> BatchConstraints:
    """Joins the constraints of (logits row, its constraints) pairs into tensors on the device."""

    def joined(of: Callable[[RowConstraints], NDArray[Any] | None]) -> tuple[Any, Any]:
        """Return the logits row of each entry, and the entries."""
        parts = [(row, part) for row, each in constrained if (part := of(each)) is not None]
        rows = np.repeat(_ids(row for row, _ in parts), [len(part) for _, part in parts])
        return on_device(rows), on_device(np.concatenate([part for _, part in parts]) if parts else rows)

    def on_device(values: NDArray[Any]) -> torch.Tensor:
        dtype = torch.float32 if values.dtype == np.float32 else torch.int64
        return to_device(values, dtype, device)

    entry_rows, entry_ids = joined(lambda each: each.allowed)
    word_rows, word_ends = joined(lambda each: each.word_ends)
    beginning_rows, beginning_places = joined(lambda each: each.beginnings[1])
    words_before = np.cumsum([0, *(len(each.word_ends) for _, each in constrained)])
    words = [each.beginnings[0] + first for (_, each), first in zip(constrained, words_before, strict=False)]
    bias_rows, bias_ids = joined(lambda each: each.bias_ids)
    stop_rows, stop_ids = joined(lambda each: each.stop_token_ids)
    return BatchConstraints(
        allowed_rows=on_device(_ids(row for row, each in constrained if each.allowed is not None)),
        entry_rows=entry_rows,
        entry_ids=entry_ids,
        word_rows=word_rows,
        word_ends=word_ends,
        beginning_rows=beginning_rows,
        beginning_words=on_device(np.concatenate(words)),
        beginning_places=beginning_places,
        beginning_ids=joined(lambda each: each.beginnings[2])[1],
        bias_rows=bias_rows,
        bias_ids=bias_ids,
        bias_values=joined(lambda each: each.bias_values)[1],
        stop_rows=stop_rows,
        stop_ids=stop_ids,
    )


def _ids(values: Iterable[int]) -> _Ids:
    return np.fromiter(values, dtype=np.int64)


def _add(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """logits[rows, ids] += values, also where a (row, id) pair occurs more than once."""
    logits.index_put_((rows, ids), values, accumulate=True)
