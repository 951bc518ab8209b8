"""Constraints that name token ids: allowed ids, bad words, biases, and no stop token before `min_tokens`.

Each is a short list per request. For a batch the lists are joined end to end, every entry with the logits row
it belongs to, so that one indexed addition serves all rows: a bias adds its value, a ban adds minus infinity.
A row without constraints appears in none of the lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from teachllm.core.scheduler_output import NewRow
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.sampling.transfers import to_device
from teachllm.sampling.validation import check_ids

_ANY = -1  # in a bad word's padded beginning: matches whatever stands there
_MINUS_INFINITY = float("-inf")


@dataclass(slots=True, frozen=True)
class RowConstraints:
    """One request's constraints, on the host.

    Attributes:
        allowed: columns of the logits whose tokens may be sampled; None is all.
        bad_words: id sequences, the last as its column, which is banned when the output ends with the ids before it.
        bias: {column: what is added to its logit}.
        stop_token_ids: columns that are banned before `min_tokens` outputs.
    """

    allowed: tuple[int, ...] | None
    bad_words: tuple[tuple[int, ...], ...]
    bias: dict[int, float]
    stop_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, new_row: NewRow, columns: Columns) -> RowConstraints | None:
        """Return what a request constrains of these columns, or None if nothing.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        params, vocab_size, first = new_row.sampling_params, columns.vocab_size, columns.first_id
        allowed = None if params.allowed_token_ids is None else tuple(params.allowed_token_ids)
        bad_words = tuple(word for word in new_row.bad_word_token_ids if word)
        bias = dict(params.logit_bias or {})
        # A stop id beyond the logits (a checkpoint may declare one) cannot be sampled, so it needs no ban.
        stops = tuple(i for i in sorted(new_row.stop_token_ids) if i < vocab_size) if params.min_tokens > 0 else ()
        check_ids("allowed_token_ids", allowed or (), vocab_size)
        check_ids("bad_words", (token_id for word in bad_words for token_id in word), vocab_size)
        check_ids("logit_bias", bias, vocab_size)
        if not columns.are_all:
            allowed = None if allowed is None else tuple(each for each in allowed if columns.has(each))
            bad_words = tuple(word for word in bad_words if columns.has(word[-1]))
            bias = {each: value for each, value in bias.items() if columns.has(each)}
            stops = tuple(filter(columns.has, stops))
        if allowed is None and not (bad_words or bias or stops):
            return None
        return cls(
            None if allowed is None else tuple(each - first for each in allowed),
            tuple((*word[:-1], word[-1] - first) for word in bad_words),
            {each - first: value for each, value in bias.items()},
            tuple(each - first for each in stops),
        )


@dataclass(slots=True, frozen=True)
class BatchConstraints:
    """The constraints of all logits rows, joined; `*_rows` are indices of logits rows.

    Attributes:
        allowed_rows: [A]; `allowed_entries`, `allowed_ids`: [N] which of the A rows allows which id.
        word_rows: [W]; `word_beginnings`: [W, longest - 1], padded on the left; `word_ends`: [W].
        bias_rows, bias_ids, bias_values: [B].
        stop_rows, stop_ids: [S].
    """

    allowed_rows: torch.Tensor
    allowed_entries: torch.Tensor
    allowed_ids: torch.Tensor
    word_rows: torch.Tensor
    word_beginnings: torch.Tensor
    word_ends: torch.Tensor
    bias_rows: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    stop_rows: torch.Tensor
    stop_ids: torch.Tensor

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
            allowed = torch.zeros((self.allowed_rows.numel(), logits.shape[1]), dtype=torch.bool, device=logits.device)
            # `allowed[...] = True` would copy a True from the host, and wait.
            allowed.index_put_((self.allowed_entries, self.allowed_ids), allowed.new_ones(()))
            logits[self.allowed_rows] = logits[self.allowed_rows].masked_fill(~allowed, _MINUS_INFINITY)
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
        width = self.word_beginnings.shape[1]
        # The last `width` tokens of each word's sequence, aligned with its padded beginning.
        columns = lengths[self.word_rows, None] + torch.arange(-width, 0, device=rows.device)  # [W, width]
        in_output = columns >= num_prompt_tokens[self.word_rows, None]
        recent = token_ids[rows[self.word_rows, None], columns.clamp(min=0)]
        return ((self.word_beginnings == _ANY) | (in_output & (recent == self.word_beginnings))).all(dim=1)


def join_constraints(constrained: Sequence[tuple[int, RowConstraints]], device: torch.device) -> BatchConstraints:
    """Joins the constraints of (logits row, its constraints) pairs into tensors on the device."""

    def ids(values: list[int]) -> torch.Tensor:
        return to_device(values, torch.int64, device)

    allowed = [(i, c.allowed) for i, c in constrained if c.allowed is not None]
    words = [(i, word) for i, c in constrained for word in c.bad_words]
    biases = [(i, token_id, value) for i, c in constrained for token_id, value in c.bias.items()]
    stops = [(i, token_id) for i, c in constrained for token_id in c.stop_token_ids]
    width = max((len(word) - 1 for _, word in words), default=0)
    beginnings = [[_ANY] * (width + 1 - len(word)) + list(word[:-1]) for _, word in words]
    return BatchConstraints(
        allowed_rows=ids([i for i, _ in allowed]),
        allowed_entries=ids([entry for entry, (_, listed) in enumerate(allowed) for _ in listed]),
        allowed_ids=ids([token_id for _, listed in allowed for token_id in listed]),
        word_rows=ids([i for i, _ in words]),
        word_beginnings=to_device(beginnings, torch.int64, device).view(len(words), width),
        word_ends=ids([word[-1] for _, word in words]),
        bias_rows=ids([i for i, _, _ in biases]),
        bias_ids=ids([token_id for _, token_id, _ in biases]),
        bias_values=to_device([value for _, _, value in biases], torch.float32, device),
        stop_rows=ids([i for i, _ in stops]),
        stop_ids=ids([token_id for _, token_id in stops]),
    )


def _add(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """logits[rows, ids] += values, also where a (row, id) pair occurs more than once."""
    logits.index_put_((rows, ids), values, accumulate=True)
