"""The sampling parameters of every open row, kept on the device between steps.

A decode step must not build tensors per request, so a request's numbers are written once, when its row opens,
and gathered by row afterwards. They are written into tables on the host, which go to the device whole: one copy
each, however many rows open in a step. Which rows need what is kept on the host in sets: the sampler asks once per
batch composition (`select`), and a step that repeats the last one reuses the answer.

    floats [max_num_rows, 6]   temperature, top_p, min_p, repetition, presence, frequency
    ints   [max_num_rows, 5]   seed, child index, prompt length, top_k, min_tokens
    constraints {row: ...}     id lists, only for rows that have any
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from teachllm.core.scheduler_output import NewRow
from teachllm.sampling.constraints import BatchConstraints, RowConstraints, join_constraints
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.sampling.transfers import to_device
from teachllm.sampling.validation import check_some_token_allowed
from teachllm.sampling.verify import Proposals
from teachllm.sampling_params import SamplingParams
from teachllm_kernels.sampling.philox import STREAM_SAMPLE
from teachllm_kernels.sampling.random_sample import sample_triton
from teachllm_kernels.speculation.rejection import rejection_sample_triton

_SIGN = 1 << 63
_MOST_SELECTIONS = 64  # batches change from step to step; the last ones are kept
_MOST_IDS = 1 << 19  # of constraints, in all of them together: 32 bytes each


@dataclass(slots=True, frozen=True)
class Parameters:
    """The parameters of some rows, gathered: each [num_rows], float32 or int64."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    seed: torch.Tensor
    child_index: torch.Tensor
    num_prompt_tokens: torch.Tensor
    top_k: torch.Tensor
    min_tokens: torch.Tensor


@dataclass(slots=True, frozen=True)
class Selection:
    """Describe which rows of a batch's logits need what; an index tensor is None where none do.

    Attributes:
        rows: [R] the request row of each logits row.
        random: logits rows with a temperature.
        penalized: logits rows with a repetition, presence or frequency penalty.
        filtered: positions *within `random`* that have top_k, top_p or min_p.
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
        self._host_floats = torch.zeros((max_num_rows, 6), dtype=torch.float32)
        self._host_ints = torch.zeros((max_num_rows, 5), dtype=torch.int64)
        self._floats, self._ints = self._host_floats.to(device, copy=True), self._host_ints.to(device, copy=True)
        self._random: set[int] = set()
        self._penalized: set[int] = set()
        self._top_k: dict[int, int] = {}  # of the filtered rows; the vocabulary's size where top_k is off
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
        for table, host in ((self._floats, self._host_floats), (self._ints, self._host_ints)):
            # A GPU reads pinned memory when it comes to it, without the host waiting.
            table.copy_(host.pin_memory() if table.is_cuda else host, non_blocking=True)

    def _open(self, row: int, new_row: NewRow) -> None:
        self.close_row(row)
        params, vocab_size = new_row.sampling_params, self.columns.vocab_size
        constraints = self._constraints_of(new_row)
        top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        temperature = 0.0 if params.greedy else params.temperature  # what is all but 0 is greedy beside others, too
        self._host_floats.numpy()[row] = (temperature, params.top_p, params.min_p, *penalties)
        seed = (new_row.seed + _SIGN) % (2 * _SIGN) - _SIGN  # the same 64 bits, read as signed
        ints = (seed, new_row.child_index, new_row.num_prompt_tokens, top_k, params.min_tokens)
        self._host_ints.numpy()[row] = ints
        if not params.greedy:
            self._random.add(row)
            if top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0:
                self._top_k[row] = top_k
        if penalties != (1.0, 0.0, 0.0):
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
        for by_row in (self._top_k, self._constraints, self._num_logprobs):
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
        return not self._random.isdisjoint(rows), not self._top_k.keys().isdisjoint(rows)

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
            output_index = (num_known - self._ints[:, 2]).index_select(0, rows.clamp(min=0))
        return self.draw(logits, rows, output_index, any_random, any_filtered, columns=columns)

    def output_index(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """[R] int64, how many tokens requests have sampled, of which `lengths` are known."""
        return lengths - self._ints[:, 2].index_select(0, rows.clamp(min=0))

    def verify(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        output_index: torch.Tensor,
        any_filtered: bool,
        proposals: Proposals,
    ) -> torch.Tensor:
        """Do the same as `draw`, where tokens were proposed."""
        every = Parameters(*self._floats.unbind(1), *self._ints.unbind(1))
        return rejection_sample_triton(
            logits,
            rows,
            temperature=every.temperature,
            top_k=every.top_k,
            top_p=every.top_p,
            min_p=every.min_p,
            seed=every.seed,
            child_index=every.child_index,
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
        every = Parameters(*self._floats.unbind(1), *self._ints.unbind(1))
        sampled = sample_triton(
            logits if columns is None else logits[:, : columns.num_own],
            rows,
            temperature=every.temperature,
            top_k=every.top_k,
            top_p=every.top_p,
            min_p=every.min_p,
            seed=every.seed,
            child_index=every.child_index,
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
        filtered = [i for i, index in enumerate(random) if rows[index] in self._top_k]
        logprobs = [(i, self._num_logprobs[row]) for i, row in enumerate(rows) if row in self._num_logprobs]
        constrained = [(i, self._constraints[row]) for i, row in enumerate(rows) if row in self._constraints]
        return Selection(
            rows=to_device(rows, torch.int64, self.device),
            random=self._indices(random),
            penalized=self._indices(i for i, row in enumerate(rows) if row in self._penalized),
            filtered=self._indices(filtered),
            num_candidates=max((self._top_k[rows[random[i]]] for i in filtered), default=0),
            constraints=join_constraints(constrained, self.device) if constrained else None,
            logprobs=logprobs,
            asked=self._indices(i for i, _ in logprobs),
        )

    def parameters(self, rows: torch.Tensor) -> Parameters:
        """The parameters of these request rows, [num_rows] each."""
        return Parameters(*self._floats[rows].unbind(1), *self._ints[rows].unbind(1))

    def _indices(self, indices: Iterable[int]) -> torch.Tensor | None:
        listed = list(indices)
        return to_device(listed, torch.int64, self.device) if listed else None
