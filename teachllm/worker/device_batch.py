"""The input batch on a GPU: rows and step tensors that stay where they are, so that CUDA graphs can name them.

As `input_batch.py`, a row per running request; but the rows live on the device, and what a step samples goes straight
into them. The host says who computes how many tokens (the header) and what a plan adds to the rows, and never needs to
know a token to plan the step after it. Between two steps the device would only wait, so crossing must be short: one
kernel reads all of this from the host's pinned memory (`write_runs`), and the one that appends sampled tokens to the
rows writes them back there (`append_tokens`). A copy takes longer to start than either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from teachllm.core.scheduler_output import ScheduledRequest, SchedulerOutput
from teachllm.worker.cuda_graphs import LARGEST_MIXED_GRAPH, padded_size
from teachllm.worker.rows import Rows
from teachllm_kernels.step_inputs import append_tokens, step_inputs, write_runs

_LARGEST_PROMPT_GRAPH = 8  # sequences in a graph of prompts alone
_NUM_STEPS = 4  # whose inputs and outputs are kept on the host: more than are in flight, one under way and one ahead


@dataclass(slots=True, frozen=True)
class DeviceStep:
    """What the host knows of a step.

    Attributes:
        rows: the request row of each scheduled request.
        query_lens: tokens that each computes.
        starts: index in its sequence of each one's first token.
        num_decodes: the first so many compute one token and did not start in this step.
        sampling: positions in `rows` of those that sample.
    """

    rows: list[int]
    query_lens: list[int]
    starts: list[int]
    num_decodes: int
    sampling: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def is_decode(self) -> bool:
        """All are decodes that sample."""
        return self.num_decodes == len(self.rows) == len(self.sampling)

    def full_graph_shape(self, max_num_seqs: int, max_num_tokens: int) -> tuple[int, int] | None:
        """(sequences, tokens), with padding, of the graph that holds this whole step; None if there is no such graph.

        Decodes alone: padded to a graph's size. A few short prompts alone: with at least one padding sequence, which
        owns the tokens that are padding, if there are any.
        """
        count = len(self.rows)
        if self.is_decode:
            size = padded_size(count, max_num_seqs)
            return size, size
        num_seqs = padded_size(count + 1, max_num_seqs + 1)
        if self.num_decodes or num_seqs > _LARGEST_PROMPT_GRAPH:
            return None
        if self.num_tokens > min(max_num_tokens, LARGEST_MIXED_GRAPH):
            return None
        return num_seqs, padded_size(self.num_tokens, max_num_tokens)


@dataclass(slots=True)
class _Additions:
    """What is to be written into the rows: runs of values, the prompts' before the others'."""

    places: list[int] = field(default_factory=list)
    lens: list[int] = field(default_factory=list)
    prompts: list[Sequence[int]] = field(default_factory=list)
    values: list[int] = field(default_factory=list)


class DeviceBatch(Rows):
    """Rows of the requests a GPU is running.

    Attributes:
        token_ids: [max_num_seqs, max_model_len] int32.
        num_known: [max_num_seqs] int32, tokens of prompt and outputs.
        block_tables: [max_num_seqs, max_blocks] int32.
        rows, query_start, planned_start: this step's header: [max_num_seqs + 1] int32, with room for a sequence of
            padding beside those that run, query_start one more; of each sequence its row (-1: padding), its first flat
            token, and its first token's index in the sequence.
        sample_rows, logit_index: [max_num_seqs + 1] int32, further: the rows that sample (-1: padding), and which flat
            token each samples from.
        output_row: [1] int32, further: which of the host's outputs is this step's.
        input_ids, positions, slot_mapping: [max_num_batched_tokens] int64, seq_lens: [max_num_seqs + 1] int32; made of
            it.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, max_num_batched_tokens: int, device: torch.device
    ) -> None:
        super().__init__(max_num_seqs)
        self.block_size = block_size
        self.device = device
        # All rows and the header lie in one tensor, so that one kernel reaches them all:
        #     block_tables | token_ids | num_known   the rows, to which a plan adds
        #     rows | query_start | planned_start | sample_rows | logit_index | output_row   the header, new each step
        row_sizes = [max_num_seqs * width for width in (-(-max_model_len // block_size), max_model_len, 1)]
        most = max_num_seqs + 1  # sequences of a step, with one of padding
        sizes = [most, most + 1, most, most, most, 1]
        self._memory = torch.zeros(sum(row_sizes) + sum(sizes), dtype=torch.int32, device=device)
        tables, tokens, self.num_known, *header = self._memory.split(row_sizes + sizes)
        self.block_tables, self.token_ids = tables.view(max_num_seqs, -1), tokens.view(max_num_seqs, -1)
        self.rows, self.query_start, self.planned_start, self.sample_rows, self.logit_index, self.output_row = header
        self._tokens_place, self._known_place, self._header_place = accumulate(row_sizes)
        self._header = np.zeros(sum(sizes), dtype=np.int32)  # on the host
        self._header_fields = np.split(self._header, np.cumsum(sizes)[:-1])
        self._added = _Additions()
        self._sent: deque[torch.Tensor] = deque(maxlen=_NUM_STEPS)
        self._outputs = self._on_host(_NUM_STEPS * max_num_seqs).view(_NUM_STEPS, -1)
        self.input_ids = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(most, dtype=torch.int32, device=device)

    def prepare(self, plan: SchedulerOutput) -> DeviceStep:
        """Notes a plan's new tokens and blocks and returns the rest, for `send`."""
        shares = plan.scheduled
        rows = [self._row_of[share.request_id] for share in shares]
        self._note(rows, shares)
        query_lens = [share.num_tokens for share in shares]
        # A request that starts now may share a block which another one fills in this very step: its one token is no
        # decode, since what is fused for those reads the cache while others still write to it.
        is_decode = [share.num_tokens == 1 and share.new_row is None for share in shares]
        num_decodes = is_decode.index(False) if False in is_decode else len(shares)
        sampling = [i for i, share in enumerate(shares) if share.samples]
        return DeviceStep(rows, query_lens, [share.start for share in shares], num_decodes, sampling)

    def _note(self, rows: Sequence[int], shares: Sequence[ScheduledRequest]) -> None:
        """The tokens of requests that start, and all new blocks."""
        table_width, row_width = self.block_tables.shape[1], self.token_ids.shape[1]
        added = self._added = _Additions()
        started = [(row, share.new_row.token_ids) for row, share in zip(rows, shares, strict=True) if share.new_row]
        added.prompts = [token_ids for _, token_ids in started]
        added.places = [self._tokens_place + row * row_width for row, _ in started]
        added.places += [self._known_place + row for row, _ in started]
        added.values = [len(token_ids) for token_ids in added.prompts]
        added.lens = added.values + [1] * len(started)
        for row, share in zip(rows, shares, strict=True):
            if share.new_block_ids:
                added.places.append(row * table_width + share.first_new_block)
                added.lens.append(len(share.new_block_ids))
                added.values += share.new_block_ids

    def send(self, step: DeviceStep, num_seqs: int, num_tokens: int) -> None:
        """Writes a step's header, and what it adds to the rows, to the device.

        Args:
            num_seqs: with padding.
            num_tokens: with padding. Each padding sequence takes one padding token while they last, the last one all
                that remain.
        """
        self._fill_header(step, num_seqs, num_tokens)
        added, header = self._added, self._header
        self._added = _Additions()
        lens = [*added.lens, len(header)]
        count = len(lens)
        packed = self._on_host(2 * count + 1 + sum(lens))
        array = packed.numpy()  # places [count], ends [count + 1], values
        array[: count - 1], array[count - 1], array[count] = added.places, self._header_place, 0
        np.cumsum(lens, out=array[count + 1 : 2 * count + 1])
        end = 2 * count + 1
        for token_ids in added.prompts:
            start, end = end, end + len(token_ids)
            array[start:end] = token_ids
        array[end : -len(header)], array[-len(header) :] = added.values, header
        write_runs(self._memory, packed, count, max(lens))
        self._sent.append(packed)  # kept until a kernel has read it: the allocator knows of copies, not of kernels

    def _fill_header(self, step: DeviceStep, num_seqs: int, num_tokens: int) -> None:
        count, samples = len(step.rows), len(step.sampling)
        rows, starts, planned, sample_rows, logit_index, output_row = self._header_fields
        rows[:count], rows[count:num_seqs] = step.rows, -1
        ends = np.cumsum(step.query_lens)
        starts[0], starts[1 : count + 1] = 0, ends
        padding = num_seqs - count
        if padding:
            starts[count + 1 : num_seqs + 1] = np.minimum(ends[-1] + np.arange(1, padding + 1), num_tokens)
            starts[num_seqs] = num_tokens
        planned[:count] = step.starts
        sample_rows[:samples] = np.asarray(step.rows)[step.sampling]
        sample_rows[samples:], logit_index[samples:] = -1, 0
        logit_index[:samples] = ends[step.sampling] - 1
        output_row[0] = (output_row[0] + 1) % _NUM_STEPS

    @property
    def output(self) -> torch.Tensor:
        """[max_num_seqs] int32 on the host: what the step that was sent last samples, when it has.

        To be read before `_NUM_STEPS` more steps are sent: its place is used again.
        """
        return self._outputs[int(self._header_fields[-1][0])]

    def clear(self, num_seqs: int, num_tokens: int) -> None:
        """A header of padding alone: what graphs are captured with."""
        self.rows.fill_(-1)
        self.sample_rows.fill_(-1)
        self.logit_index.fill_(0)
        torch.arange(num_seqs + 1, out=self.query_start[: num_seqs + 1]).clamp_(max=num_tokens)
        self.query_start[num_seqs] = num_tokens

    def build(self, num_seqs: int) -> None:
        """Fills `input_ids`, `positions`, `slot_mapping` and `seq_lens` on the device."""
        step_inputs(
            rows=self.rows[:num_seqs],
            query_start=self.query_start[: num_seqs + 1],
            planned_start=self.planned_start,
            token_ids=self.token_ids,
            num_known=self.num_known,
            block_tables=self.block_tables,
            block_size=self.block_size,
            input_ids=self.input_ids,
            positions=self.positions,
            slot_mapping=self.slot_mapping,
            seq_lens=self.seq_lens,
        )

    def append(self, sampled: torch.Tensor) -> None:
        """Sampled tokens, [num_rows] int64 in the order of `sample_rows`, become known, and the step's output."""
        rows = self.sample_rows[: sampled.shape[0]]
        append_tokens(rows, sampled, self.token_ids, self.num_known, self._outputs, self.output_row)

    def _on_host(self, size: int) -> torch.Tensor:
        """[size] int32, where a GPU's kernels read and write it."""
        return torch.empty(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")
