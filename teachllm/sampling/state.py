"""The sampling parameters of every open row, kept on the device between steps.

A decode step must not build tensors per request, so a request's numbers are written once, when its row opens,
and gathered by row afterwards. They are written into tables on the host, which go to the device whole: one copy
each, however many rows open in a step (`device_parameters.py`). Which rows need what is kept on the host in sets: the
sampler asks once per batch composition (`select`), and a step that repeats the last one reuses the answer. Id lists are
kept for the rows that have any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from teachllm.core.scheduler_output import NewRow
from teachllm.sampling.constraints import BatchConstraints, RowConstraints, join_constraints
from teachllm.sampling.device_parameters import DeviceParameters, Parameters, values_of
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.sampling.transfers import to_device
from teachllm.sampling.validation import check_some_token_allowed
from teachllm.sampling.verify import Proposals
from teachllm.sampling_params import SamplingParams
from teachllm_kernels.sampling.philox import STREAM_SAMPLE
from teachllm_kernels.sampling.random_sample import sample_triton
from teachllm_kernels.speculation.rejection import rejection_sample_triton

_MOST_SELECTIONS = 64  # batches change from step to step; the last ones are kept
_MOST_IDS = 1 << 19  # of constraints, in all of them together: 32 bytes each


@dataclass(slots=True, frozen=True)
class Selection:
    """Describe which rows of a batch's logits need what; an index tensor is None where none do.

    Attributes:
        rows: [R] the request row of each logits row.
        random: logits rows with a temperature.
        penalized: logits rows with a repetition, presence or frequency penalty.
        filtered: positions *within `random`* that have a filter.
        num_candidates: the largest top_k of the filtered rows, or the vocabulary if one of them has none.
        constraints: allowed ids, bad words, biases and minimum lengths of all logits rows.
        logprobs: (logits row, how many top entries) of those that asked.
        asked: the same rows, on the device.
    """

    rows: torch.Tensor
    random: torch.Tensor | None
    penalized: torch.Tensor | None
    filtered: torch.Tensor | None
    num_candidates: int
    constraints: BatchConstraints | None
    logprobs: list[tuple[int, int]]
    asked: torch.Tensor | None


class SamplingState:
    """Parameters by row. A row belongs to one request from `open_rows` to `close_row`."""

    def __init__(self, max_num_rows: int, columns: Columns, device: torch.device) -> None:
        self.columns = columns
        self.device = device
        self._parameters = DeviceParameters(max_num_rows, device)
        self._random: set[int] = set()
        self._penalized: set[int] = set()
        self._num_candidates: dict[int, int] = {}  # of the filtered rows: how many tokens top_k leaves
        self._constraints: dict[int, RowConstraints] = {}
        self._num_logprobs: dict[int, int] = {}
        self._selections: dict[tuple[int, ...], Selection] = {}  # by the rows that were asked for
        self._num_ids = 0  # of their constraints
        self._last_constraints: (
            tuple[SamplingParams, tuple[tuple[int, ...], ...], frozenset[int], RowConstraints | None] | None
        ) = None

    def open_rows(self, opened: Sequence[tuple[int, NewRow]]) -> None:
        """Writes requests' parameters, each into its row, replacing whatever that held.

        Raises:
            ValueError: a request's constraints could forbid every token.
        """
        for row, new_row in opened:
            self._open(row, new_row)
        self._parameters.send()

    def _open(self, row: int, new_row: NewRow) -> None:
        self.close_row(row)
        params, vocab_size = new_row.sampling_params, self.columns.vocab_size
        constraints = self._constraints_of(new_row)
        self._parameters.write(row, values_of(new_row, vocab_size))
        if not params.greedy:
            self._random.add(row)
        if params.has_filter(vocab_size):
            self._num_candidates[row] = params.num_candidates(vocab_size)
        if params.has_penalty:
            self._penalized.add(row)
        if constraints is not None:
            self._constraints[row] = constraints
        if params.logprobs is not None:
            self._num_logprobs[row] = params.logprobs

    def _constraints_of(self, new_row: NewRow) -> RowConstraints | None:
        """Return a request's constraints; the completions of one prompt, which come one after another, share them."""
        params, words, stops = new_row.sampling_params, new_row.bad_word_token_ids, new_row.stop_token_ids
        known = self._last_constraints
        if known is None or known[0] is not params or known[1] != words or known[2] != stops:
            check_some_token_allowed(params, self.columns.vocab_size, stops, words)
            known = self._last_constraints = params, words, stops, RowConstraints.of(new_row, self.columns)
        return known[3]

    def close_row(self, row: int) -> None:
        """Forgets a row; its numbers stay behind but nothing reads them."""
        self._forget_selections()
        self._random.discard(row)
        self._penalized.discard(row)
        for by_row in (self._num_candidates, self._constraints, self._num_logprobs):
            by_row.pop(row, None)

    def is_random(self, row: int) -> bool:
        """Return whether the request in `row` samples at random."""
        return row in self._random

    def is_plain_greedy(self, rows: Sequence[int]) -> bool:
        """Return whether these rows ask for nothing but their most likely token."""
        special = (self._random, self._penalized, self._constraints.keys(), self._num_logprobs.keys())
        return all(those.isdisjoint(rows) for those in special)

    def plain_variant(self, rows: Sequence[int]) -> tuple[bool, bool] | None:
        """(any is random, any is filtered) of rows without penalties, constraints and logprobs, else None."""
        special = (self._penalized, self._constraints.keys(), self._num_logprobs.keys())
        if not all(those.isdisjoint(rows) for those in special):
            return None
        return not self._random.isdisjoint(rows), not self._num_candidates.keys().isdisjoint(rows)

    def sample_plain(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        num_known: torch.Tensor,
        any_random: bool,
        any_filtered: bool,
        columns: Columns | None = None,
    ) -> torch.Tensor:
        """Implement `Sampler.sample_plain`."""
        output_index = rows  # nothing reads it where nothing is random
        if any_random:
            output_index = (num_known - self._parameters.num_prompt_tokens).index_select(0, rows.clamp(min=0))
        return self.draw(logits, rows, output_index, any_random, any_filtered, columns=columns)

    def output_index(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """[R] int64, how many tokens requests have sampled, of which `lengths` are known."""
        return lengths - self._parameters.num_prompt_tokens.index_select(0, rows.clamp(min=0))

    def verify(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        output_index: torch.Tensor,
        any_filtered: bool,
        proposals: Proposals,
    ) -> torch.Tensor:
        """Do the same as `draw`, where tokens were proposed."""
        return rejection_sample_triton(
            logits,
            rows,
            self._parameters.table,
            output_index=output_index,
            draft_logits=proposals.draft_logits,
            draft_rows=proposals.draft_rows,
            siblings=proposals.siblings,
            any_filtered=any_filtered,
        )

    def draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        output_index: torch.Tensor,
        any_random: bool,
        any_filtered: bool,
        stream: int = STREAM_SAMPLE,
        columns: Columns | None = None,
    ) -> torch.Tensor:
        """[R] int64, by the kernel, from logits that nothing but temperature and filters is still to change.

        Args:
            output_index: [R] int64, how many tokens the request of each row has sampled before.
            stream: of the noise, see `philox.py`.
            The others as in `Sampler.sample_plain`.
        """
        sampled = sample_triton(
            logits if columns is None else logits[:, : columns.num_own],
            rows,
            self._parameters.table,
            output_index=output_index,
            any_random=any_random,
            any_filtered=any_filtered,
            stream=stream,
            first_id=None if columns is None else columns.first_id,
        )
        return sampled if columns is None else columns.best(sampled)

    def select(self, rows: list[int]) -> Selection:
        """Return which logits rows need what, given the request row of each."""
        key = tuple(rows)
        if key not in self._selections:
            if len(self._selections) == _MOST_SELECTIONS or self._num_ids > _MOST_IDS:
                self._forget_selections()
            self._selections[key] = selection = self._selection(rows)
            self._num_ids += 0 if selection.constraints is None else selection.constraints.num_ids
        return self._selections[key]

    def _forget_selections(self) -> None:
        self._selections.clear()
        self._num_ids = 0

    def _selection(self, rows: list[int]) -> Selection:
        random = [i for i, row in enumerate(rows) if row in self._random]
        filtered = [i for i, index in enumerate(random) if rows[index] in self._num_candidates]
        logprobs = [(i, self._num_logprobs[row]) for i, row in enumerate(rows) if row in self._num_logprobs]
        constrained = [(i, self._constraints[row]) for i, row in enumerate(rows) if row in self._constraints]
        return Selection(
            rows=to_device(rows, torch.int64, self.device),
            random=self._indices(random),
            penalized=self._indices(i for i, row in enumerate(rows) if row in self._penalized),
            filtered=self._indices(filtered),
            num_candidates=max((self._num_candidates[rows[random[i]]] for i in filtered), default=0),
            constraints=join_constraints(constrained, self.device) if constrained else None,
            logprobs=logprobs,
            asked=self._indices(i for i, _ in logprobs),
        )

    def parameters(self, rows: torch.Tensor) -> Parameters:
        """The parameters of these request rows, [num_rows] each."""
        return self._parameters.gather(rows)

    def _indices(self, indices: Iterable[int]) -> torch.Tensor | None:
        listed = list(indices)
        return to_device(listed, torch.int64, self.device) if listed else None
