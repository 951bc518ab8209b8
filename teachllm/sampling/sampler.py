"""Sampler (lesson 07): from logits to token ids, each row by its own request's parameters.

The order is vLLM's, so that the same parameters mean the same:

    raw log-probabilities             logprobs.py      from untouched logits
    allowed ids, bad words, bias,     constraints.py
      min_tokens
    repetition, presence, frequency   penalties.py     greedy rows stop here: argmax
    temperature                                        random rows only, from here on
    min_p, top_k, top_p               filters.py
    Gumbel noise, argmax              teachllm_kernels/sampling/random_sample.py

Each stage gathers only the rows that ask for it: a plain request pays one argmax, whatever runs beside it. On a GPU one
kernel does what comes after the penalties, for all rows. Where ranks have some columns of the logits each, all of them
sample the same rows, each its columns, and tell each other what `shared_vocabulary.py` and `shared_filters.py` say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from teachllm.core.scheduler_output import NewRow, TokenLogprobs
from teachllm.distributed.group import ALONE, Group
from teachllm.sampling.device_parameters import Parameters
from teachllm.sampling.filters import CountNucleus, apply_filters, count_nucleus
from teachllm.sampling.logprobs import PendingLogprobs, token_logprobs
from teachllm.sampling.penalties import apply_penalties
from teachllm.sampling.shared_filters import apply_shared_filters
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.sampling.state import SamplingState, Selection
from teachllm.sampling.verify import Proposals
from teachllm.sampling_params import FILTERS
from teachllm_kernels.sampling.philox import STREAM_DRAFT
from teachllm_kernels.sampling.random_sample import gumbel_scores_reference
from teachllm_kernels.speculation.rejection_reference import (
    Judge,
    draft_sample_reference,
    judge,
    rejection_sample_reference,
)


def draws_by_kernel(device: torch.device) -> bool:
    """Return whether kernels filter and draw all rows. On other devices torch does, for the rows that need it."""
    return device.type == "cuda"


@dataclass(slots=True)
class SamplerOutput:
    """Describe what was sampled.

    Attributes:
        token_ids: [R] int64, on the device.
        asked: the logits rows that asked for logprobs.
        pending: theirs; None if no row did.
    """

    token_ids: torch.Tensor
    asked: Sequence[int] = ()
    pending: PendingLogprobs | None = None

    @property
    def logprobs(self) -> list[TokenLogprobs | None] | None:
        """One entry per logits row, None for rows that did not ask; None if no row did. Waits for them."""
        if self.pending is None:
            return None
        entries = dict(zip(self.asked, self.pending.result(), strict=True))
        return [entries.get(i) for i in range(len(self.token_ids))]


class Sampler:
    """Samples one token per logits row.

    Args:
        max_num_rows: requests that can be open at once.
        vocab_size: width of the logits, those of all ranks together.
        device: where the logits are.
        group: ranks of which each has some columns of them, on a CPU.
        nucleus, judge: say how many tokens top-p keeps, and whether a draft is accepted; on a CPU in one process.
    """

    def __init__(
        self,
        max_num_rows: int,
        vocab_size: int,
        device: torch.device,
        group: Group = ALONE,
        *,
        nucleus: CountNucleus = count_nucleus,
        judge: Judge = judge,
    ) -> None:
        self._nucleus, self._judge = nucleus, judge
        self._columns = Columns(vocab_size, group)
        self._state = SamplingState(max_num_rows, self._columns, device)

    def open_rows(self, opened: Sequence[tuple[int, NewRow]]) -> None:
        """Takes over the parameters of requests, each into its row.

        Raises:
            ValueError: a token id outside the vocabulary, or constraints that could forbid every token.
        """
        self._state.open_rows(opened)

    def close_row(self, row: int) -> None:
        """Forgets the request in `row`."""
        self._state.close_row(row)

    def sample(
        self,
        logits: torch.Tensor,
        rows: list[int],
        lengths: torch.Tensor,
        token_ids: torch.Tensor,
        proposals: Proposals | None = None,
        histories: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Sample the next token of each logits row, without waiting for the device.

        Args:
            logits: [R, vocab_size] float32; overwritten. The columns that this rank has.
            rows: [R] the request row of each logits row; a request verifying drafts has several in a row.
            lengths: [R] int64, on the device: tokens of the sequence before the one being sampled.
            token_ids: [max_num_rows, max_model_len] on the device: each request row's sequence, valid before
                `lengths`.
            proposals: what the tokens of random rows may be, see `verify.py`.
            histories: [R, longest], what each logits row's own sequence is, where they differ: in a tree. Only rows
                with penalties or bad words are read.
        """
        if self.is_plain_greedy(rows):
            return SamplerOutput(self._columns.argmax(logits))
        selection = self._state.select(rows)
        asked = selection.asked
        raw = None if asked is None else logits.index_select(0, asked)  # a copy: what follows writes into the logits

        parameters = self._state.parameters(selection.rows)
        places = selection.rows
        if histories is not None:
            token_ids, places = histories, torch.arange(len(rows), device=logits.device)
        logits = self._constrain_and_penalize(logits, selection, parameters, lengths, token_ids, places)
        sampled = self._draw(logits, selection, parameters, lengths, proposals)
        if raw is None or asked is None:
            return SamplerOutput(sampled)
        num_top = [each for _, each in selection.logprobs]
        pending = PendingLogprobs(raw, sampled.index_select(0, asked), num_top, self._columns)
        return SamplerOutput(sampled, [i for i, _ in selection.logprobs], pending)

    def is_plain_greedy(self, rows: list[int]) -> bool:
        """Return whether all of these rows ask for the most likely token and nothing else."""
        return self._state.is_plain_greedy(rows)

    def plain_variant(self, rows: list[int]) -> tuple[bool, bool] | None:
        """(any row is random, any is filtered) if `sample_plain` can sample these rows, else None."""
        return self._state.plain_variant(rows)

    def sample_plain(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        num_known: torch.Tensor,
        variant: tuple[bool, bool],
        columns: Columns | None = None,
    ) -> torch.Tensor:
        """Sample rows that ask for no more than temperature and filters, like `sample`; on a GPU, and in a CUDA graph.

        Args:
            logits: [R, vocab_size] any float dtype; not changed.
            rows: [R] int32 request rows, on the device; -1 is padding.
            num_known: [max_num_rows] int32, on the device: tokens of each row's sequence.
            variant: of `plain_variant`; a wider one gives the same tokens, slower.
            columns: which the logits are, where other ranks have the others, and no row is filtered; None: all.

        Returns:
            [R] int64 token ids.
        """
        any_random, any_filtered = variant
        return self._state.sample_plain(logits, rows, num_known, any_random, any_filtered, columns)

    def sample_positions(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        variant: tuple[bool, bool],
        proposals: Proposals | None,
    ) -> torch.Tensor:
        """Sample any number of logits rows per request row, like `sample_plain`; the position says which one it is.

        Args:
            positions: [R] int64, of the token that each logits row follows.
            proposals: on the device, its integers int32.
        """
        any_random, any_filtered = variant
        output_index = self._state.output_index(rows, positions + 1) if any_random else rows
        if proposals is None or not any_random:
            return self._state.draw(logits, rows, output_index, any_random, any_filtered)
        return self._state.verify(logits, rows, output_index, any_filtered, proposals)

    def draw_drafts_plain(
        self, logits: torch.Tensor, rows: torch.Tensor, num_known: torch.Tensor, index: int, any_random: bool
    ) -> torch.Tensor:
        """Draw draft `index` of each row, like `draw_drafts`, on a GPU. Arguments as of `sample_plain`."""
        output_index = rows
        if any_random:
            output_index = self._state.output_index(rows, num_known.index_select(0, rows.clamp(min=0)) + index)
        return self._state.draw(logits, rows, output_index, any_random, any_filtered=False, stream=STREAM_DRAFT)

    def prompt_logprobs(self, logits: torch.Tensor, target_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens: row i of `logits` [R, vocab_size], the columns that this rank has,
        predicts `target_ids[i]`."""
        targets = torch.tensor(target_ids, dtype=torch.int64, device=logits.device)
        return token_logprobs(logits, targets, [num_top] * len(target_ids), self._columns)

    def _constrain_and_penalize(
        self,
        logits: torch.Tensor,
        selection: Selection,
        parameters: Parameters,
        lengths: torch.Tensor,
        token_ids: torch.Tensor,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """Apply what changes greedy rows too; return `logits`, changed in place. Shapes as in `sample`.

        Args:
            places: [R], the row of `token_ids` that holds each logits row's sequence.
        """
        num_prompt_tokens = parameters["num_prompt_tokens"]
        if selection.constraints is not None:
            selection.constraints.apply(logits, places, lengths, token_ids, num_prompt_tokens, parameters["min_tokens"])
        chosen = selection.penalized
        if chosen is not None:
            histories = token_ids[places[chosen]]
            if lengths.device.type == "cpu":  # the length is known without waiting: count no further than it
                histories = histories[:, : int(lengths.max())]
            logits[chosen] = apply_penalties(
                logits[chosen],
                histories - self._columns.first_id,
                lengths[chosen],
                num_prompt_tokens[chosen],
                parameters["repetition_penalty"][chosen],
                parameters["presence_penalty"][chosen],
                parameters["frequency_penalty"][chosen],
            )
        return logits

    def draw_drafts(self, logits: torch.Tensor, rows: list[int], lengths: torch.Tensor, num: int = 1) -> torch.Tensor:
        """A drafter's tokens, [R, num] int64: the most likely of greedy rows, of others drawn at their temperature.

        All of a row are different; -1 where there are no more. Arguments as in `sample`; the logits are left as they
        are.
        """
        best = logits.topk(num, dim=-1).indices if num > 1 else logits.argmax(dim=-1, keepdim=True)
        chosen = self._state.select(rows).random
        if chosen is None:
            return best
        parameters = self._state.parameters(self._state.select(rows).rows[chosen])
        drawn = draft_sample_reference(
            logits[chosen],
            parameters["temperature"],
            parameters["seed"],
            lengths[chosen] - parameters["num_prompt_tokens"],
            parameters["child_index"],
            num=num,
        )
        return best.index_copy_(0, chosen, drawn)

    def is_random(self, row: int) -> bool:
        """Return whether a request samples at random."""
        return self._state.is_random(row)

    def _draw(
        self,
        logits: torch.Tensor,
        selection: Selection,
        parameters: Parameters,
        lengths: torch.Tensor,
        proposals: Proposals | None,
    ) -> torch.Tensor:
        """[R] int64: the best token of greedy rows, a random one of the others."""
        output_indices = lengths - parameters["num_prompt_tokens"]
        if not draws_by_kernel(self._state.device):
            return self._draw_by_torch(logits, selection, parameters, output_indices, proposals)
        # The same call for every mixture of rows: what a neighbour asks for changes no row's token.
        rows = selection.rows.int()
        if proposals is None:
            return self._state.draw(logits, rows, output_indices, any_random=True, any_filtered=True)
        return self._state.verify(logits, rows, output_indices, True, proposals)

    def _draw_by_torch(
        self,
        logits: torch.Tensor,
        selection: Selection,
        parameters: Parameters,
        output_indices: torch.Tensor,
        proposals: Proposals | None,
    ) -> torch.Tensor:
        """Do the same as the kernels, with torch: only random rows get noise, and only rows with a filter are cut."""
        chosen, columns = selection.random, self._columns
        if chosen is None:
            return columns.argmax(logits)
        if proposals is not None and not columns.are_all:  # what a rejection leaves to draw from is no rank's own
            logits, columns = columns.gathered(logits), Columns(columns.vocab_size)
        drawn = logits[chosen]  # [num_random, width]
        filtered = selection.filtered
        if filtered is not None:
            among = chosen[filtered]
            theirs = {name: parameters[name][among] for name in ("temperature", *FILTERS)}
            if columns.are_all:
                apply = partial(apply_filters, nucleus=self._nucleus)
            else:
                apply = partial(apply_shared_filters, columns=columns)
            drawn[filtered] = apply(drawn[filtered], theirs, selection.num_candidates)
        temperature = parameters["temperature"][chosen]
        seeds = parameters["seed"][chosen]
        child_indices = parameters["child_index"][chosen]
        if proposals is None:
            logits[chosen] = gumbel_scores_reference(
                drawn,
                temperature=temperature,
                seeds=seeds,
                output_indices=output_indices[chosen],
                child_indices=child_indices,
                first_id=columns.first_id,
            )
            return columns.argmax(logits)
        ids = rejection_sample_reference(
            drawn,
            temperature=temperature,
            draft_logits=proposals.draft_logits,
            draft_rows=proposals.draft_rows[chosen],
            siblings=proposals.siblings[chosen],
            seeds=seeds,
            output_indices=output_indices[chosen],
            child_indices=child_indices,
            judge=self._judge,
        )
        return ids if len(ids) == len(logits) else logits.argmax(dim=-1).index_copy_(0, chosen, ids)
