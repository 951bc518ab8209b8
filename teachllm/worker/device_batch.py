"""The input batch on a GPU: rows and step tensors that stay where they are, so that CUDA graphs can name them.

As `input_batch.py`, a row per running request; but the rows live on the device, and what a step samples goes straight
into them. The host sends who computes how many tokens (`header`, one copy a step) and what a plan adds to the rows (one
copy more, if anything), and never needs to know a token to plan the step after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from teachllm.core.scheduler_output import ScheduledRequest, SchedulerOutput
from teachllm.worker.cuda_graphs import LARGEST_MIXED_GRAPH, padded_size
from teachllm.worker.rows import Rows
from teachllm_kernels.step_inputs import append_tokens, step_inputs, write_runs

_LARGEST_PROMPT_GRAPH = 8  # sequences in a graph of prompts alone
_NUM_STAGED = 4  # headers under way at once: more than steps can be in flight


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

        Decodes alone, padded to a size, or a few short prompts alone: after these a sequence more, at least, owns the
        tokens that are padding.
        """
        count = len(self.rows)
        if self.is_decode:
            size = padded_size(count, max_num_seqs)
            return size, size
        num_seqs = padded_size(count + 1, max_num_seqs)
        room = max_num_tokens - (num_seqs - count)  # a padding sequence has one token at least
        if self.num_decodes or not count < num_seqs <= _LARGEST_PROMPT_GRAPH:
            return None
        if self.num_tokens > min(room, LARGEST_MIXED_GRAPH):
            return None
        return num_seqs, padded_size(self.num_tokens, room) + num_seqs - count


class DeviceBatch(Rows):
    """Rows of the requests a GPU is running.

    Attributes:
        token_ids: [max_num_seqs, max_model_len] int32.
        num_known: [max_num_seqs] int32, tokens of prompt and outputs.
        block_tables: [max_num_seqs, max_blocks] int32.
        rows, planned_start, sample_rows, logit_index: [max_num_seqs] int32, query_start: one more; this step's header.
        input_ids, positions, slot_mapping: [max_num_batched_tokens] int64, seq_lens: [max_num_seqs] int32; made of it.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, max_num_batched_tokens: int, device: torch.device
    ) -> None:
        super().__init__(max_num_seqs)
        self.block_size = block_size
        self.device = device
        # All rows lie in one tensor, so that one kernel reaches whatever a plan adds to them.
        widths = [-(-max_model_len // block_size), max_model_len, 1]
        self._row_memory = torch.zeros(max_num_seqs * sum(widths), dtype=torch.int32, device=device)
        tables, tokens, self.num_known = self._row_memory.split([max_num_seqs * width for width in widths])
        self.block_tables, self.token_ids = tables.view(max_num_seqs, -1), tokens.view(max_num_seqs, -1)
        sizes = [max_num_seqs, max_num_seqs + 1, max_num_seqs, max_num_seqs, max_num_seqs]
        self._header = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.rows, self.query_start, self.planned_start, self.sample_rows, self.logit_index = self._header.split(sizes)
        self._staged = [self._staging(sum(sizes)).zero_() for _ in range(_NUM_STAGED)]
        self._num_staged = 0
        self.input_ids = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

    def prepare(self, plan: SchedulerOutput) -> DeviceStep:
        """Writes a plan's new tokens and blocks into the rows and returns the rest, for `send`."""
        shares = plan.scheduled
        rows = [self._row_of[share.request_id] for share in shares]
        self._write(rows, shares)
        query_lens = [share.num_tokens for share in shares]
        # A request that starts now may share a block which another one fills in this very step: its one token is no
        # decode, since what is fused for those reads the cache while others still write to it.
        is_decode = [share.num_tokens == 1 and share.new_row is None for share in shares]
        num_decodes = is_decode.index(False) if False in is_decode else len(shares)
        sampling = [i for i, share in enumerate(shares) if share.samples]
        return DeviceStep(rows, query_lens, [share.start for share in shares], num_decodes, sampling)

    def _write(self, rows: Sequence[int], shares: Sequence[ScheduledRequest]) -> None:
        """Writes the tokens of requests that start, and all new blocks, into their rows."""
        (_, table_width), (max_num_seqs, row_width) = self.block_tables.shape, self.token_ids.shape
        first_token = max_num_seqs * table_width
        first_known = first_token + max_num_seqs * row_width
        started = [(row, share.new_row.token_ids) for row, share in zip(rows, shares, strict=True) if share.new_row]
        places = [first_token + row * row_width for row, _ in started] + [first_known + row for row, _ in started]
        lens = [len(token_ids) for _, token_ids in started]
        num_tokens, values = sum(lens), list(lens)
        lens += [1] * len(started)
        for row, share in zip(rows, shares, strict=True):
            if share.new_block_ids:
                places.append(row * table_width + share.first_new_block)
                lens.append(len(share.new_block_ids))
                values += share.new_block_ids
        count = len(places)
        if count == 0:
            return
        packed = self._staging(2 * count + 1 + num_tokens + len(values))
        array = packed.numpy()
        array[:count], array[count] = places, 0
        np.cumsum(lens, out=array[count + 1 : 2 * count + 1])
        end = 2 * count + 1
        for _, token_ids in started:
            start, end = end, end + len(token_ids)
            array[start:end] = token_ids
        array[end:] = values
        write_runs(self._row_memory, packed.to(self.device, non_blocking=True), count, max(lens))

    def send(self, step: DeviceStep, num_seqs: int, num_tokens: int) -> None:
        """Copies a step's header to the device.

        Args:
            num_seqs: with padding.
            num_tokens: with padding; each padding sequence has one token, and the last all that are left.
        """
        count, samples = len(step.rows), len(step.sampling)
        staged = self._staged[self._num_staged % _NUM_STAGED]
        self._num_staged += 1
        size = self.rows.shape[0]
        array = staged.numpy()
        rows, starts = array[:size], array[size : 2 * size + 1]
        planned, sample_rows, logit_index = array[2 * size + 1 :].reshape(3, size)
        rows[:count], rows[count:num_seqs] = step.rows, -1
        ends = np.cumsum(step.query_lens)
        starts[0], starts[1 : count + 1] = 0, ends
        padding = num_seqs - count
        if padding:
            starts[count + 1 : num_seqs + 1] = ends[-1] + np.arange(1, padding + 1)
            starts[num_seqs] = num_tokens
        planned[:count] = step.starts
        sample_rows[:samples] = np.asarray(step.rows)[step.sampling]
        sample_rows[samples:], logit_index[samples:] = -1, 0
        logit_index[:samples] = ends[step.sampling] - 1
        self._header.copy_(staged, non_blocking=True)

    def clear(self, num_seqs: int, num_tokens: int) -> None:
        """A header of padding alone: what graphs are captured with."""
        self.rows.fill_(-1)
        self.sample_rows.fill_(-1)
        self.logit_index.fill_(0)
        torch.arange(num_seqs + 1, out=self.query_start[: num_seqs + 1])
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
        """Sampled tokens, [num_rows] int64 in the order of `sample_rows`, become known."""
        append_tokens(self.sample_rows[: sampled.shape[0]], sampled, self.token_ids, self.num_known)

    def _staging(self, size: int) -> torch.Tensor:
        """[size] int32, from where a GPU reads without the host waiting for it."""
        return torch.empty(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")
