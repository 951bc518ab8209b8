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
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from teachllm.core.scheduler_output import ScheduledRequest, SchedulerOutput
from teachllm.sampling.transfers import to_device
from teachllm.spec_decode.tree import DraftTree, TreeTensors
from teachllm.worker.gpu.cuda_graphs import GraphSizes
from teachllm.worker.gpu.device_step import LONGEST_DECODE, DeviceStep
from teachllm.worker.gpu.packed_step import PackedStep, clear, field_sizes, on_host, pack
from teachllm.worker.rows import Rows
from teachllm_kernels.speculation.verify_drafts import accept
from teachllm_kernels.step_inputs import append_tokens, step_inputs, write_runs

NUM_STEPS = 4  # whose inputs and outputs are kept on the host: more than are in flight, one under way and one ahead


@dataclass(slots=True)
class _Additions:
    """Describe what is to be written into the rows: runs of values, the prompts' before the others'."""

    places: list[int] = field(default_factory=list)
    lens: list[int] = field(default_factory=list)
    prompts: list[Sequence[int]] = field(default_factory=list)
    values: list[int] = field(default_factory=list)


class _Sampled(NamedTuple):
    """Of a step whose tokens are sampled elsewhere, [num_seqs] each: who waits for one, and where it belongs.

    Attributes:
        openings: which of its row's requests each is, as of `Rows.opening`.
        indices: in its sequence, of the token.
    """

    rows: np.ndarray
    openings: np.ndarray
    indices: np.ndarray

    def of(self, which: np.ndarray) -> _Sampled:
        return _Sampled(self.rows[which], self.openings[which], self.indices[which])


class DeviceBatch(Rows):
    """Rows of the requests a GPU is running.

    Attributes:
        token_ids: [max_num_seqs, max_model_len] int32.
        num_known: [max_num_seqs] int32, tokens of prompt and outputs.
        block_tables: [max_num_seqs, max_blocks] int32.
        num_real: [max_num_seqs] int32, drafts behind those that a drafter stands behind, see `verify_drafts.py`.
        header: this step's, on the device.
        input_ids, positions, slot_mapping: [max_num_batched_tokens] int64, seq_lens: [max_num_seqs + 1] int32; made of
            it.
        last, last_token: [max_num_seqs + 1] int32, of each sequence that samples the position whose token is its
            newest, and the flat token before that one, once those that are true stand together.
        path: [max_num_seqs + 1, num_levels] int32, the drafts of each that hold.
        places: [max_num_batched_tokens] int64, of the flat tokens where the true ones of each sequence stand together,
            where the step has computed each; None: there already, in a chain.
        tree: the shape of the drafts; None: nothing speculates.
        sizes: that steps are padded to.

    Args:
        tree: None: nothing speculates.
        num_steps: whose inputs and outputs are kept on the host: more than are in flight.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        max_num_batched_tokens: int,
        device: torch.device,
        tree: DraftTree | None = None,
        num_steps: int = NUM_STEPS,
    ) -> None:
        super().__init__(max_num_seqs)
        max_drafts = self.max_drafts = 0 if tree is None else len(tree.parents)
        self.sizes = GraphSizes(max_num_seqs, max_num_batched_tokens, max_drafts)
        self.block_size = block_size
        self.device = device
        # All rows and the header lie in one tensor, so that one kernel reaches them all:
        #     block_tables | token_ids | num_known | num_real   the rows, to which a plan adds
        #     rows | query_start | planned_start | ...          the header, new each step, see `PackedStep`
        row_sizes = [max_num_seqs * width for width in (-(-max_model_len // block_size), max_model_len, 1, 1)]
        most = max_num_seqs + 1  # sequences of a step, with one of padding
        sizes = field_sizes(max_num_seqs, max_drafts)
        self._memory = torch.zeros(sum(row_sizes) + sum(sizes), dtype=torch.int32, device=device)
        tables, tokens, self.num_known, self.num_real, *header = self._memory.split(row_sizes + sizes)
        self.block_tables, self.token_ids = tables.view(max_num_seqs, -1), tokens.view(max_num_seqs, -1)
        self.header = PackedStep(*header)
        self._tokens_place, self._known_place, self._real_place, self._header_place = accumulate(row_sizes)
        self._host_header, self._packed = on_host(sizes)
        self._added = _Additions()
        self._pending_remote: dict[int, _Sampled] = {}  # by step
        self._received: list[tuple[_Sampled, np.ndarray]] = []  # and the tokens
        self._sent: deque[torch.Tensor] = deque(maxlen=num_steps)
        # Of each sequence that samples one id; or what `accept` tells.
        self.num_fields = 1 if tree is None else 3 + 2 * len(tree.levels)
        self._outputs = self._on_host(num_steps * max_num_seqs * self.num_fields).view(num_steps, -1)
        self.input_ids = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self.last = torch.zeros(most, dtype=torch.int32, device=device)
        self.last_token = torch.zeros_like(self.last)
        self.tree: TreeTensors | None = None
        self.path, self.places = self.last.unsqueeze(1), None
        if tree is not None:
            self.tree = tree.tensors(device)
            self.path = torch.full((most, len(tree.levels)), -1, dtype=torch.int32, device=device)
            self._in_order = torch.arange(max_num_batched_tokens, device=device)
            self.places = None if tree.is_chain else self._in_order.clone()

    def prepare(self, plan: SchedulerOutput) -> DeviceStep:
        """Note a plan's new tokens and blocks and return the rest, for `send`."""
        scheduled_requests = plan.scheduled
        rows = [self._row_of[scheduled.request_id] for scheduled in scheduled_requests]
        self._note(rows, scheduled_requests)
        query_lens = [scheduled.num_tokens for scheduled in scheduled_requests]
        # A request that starts now may share a block which another one fills in this very step: its one token is no
        # decode, since what is fused for those reads the cache while others still write to it.
        is_decode = [
            scheduled.num_tokens == 1 + len(scheduled.draft_token_ids) <= LONGEST_DECODE and scheduled.new_row is None
            for scheduled in scheduled_requests
        ]
        num_decodes = is_decode.index(False) if False in is_decode else len(scheduled_requests)
        sampling = [i for i, scheduled in enumerate(scheduled_requests) if scheduled.samples]
        num_drafts = [len(scheduled_requests[i].draft_token_ids) for i in sampling]
        num_next = [scheduled_requests[i].num_next_drafts for i in sampling]
        starts = [scheduled.start for scheduled in scheduled_requests]
        return DeviceStep(
            rows,
            query_lens,
            starts,
            num_decodes,
            sampling,
            num_drafts=num_drafts if any(num_drafts) else [],
            num_next=num_next if any(num_next) else [],
            decode_len=min(1 + self.sizes.drafts(max(num_drafts, default=0)), LONGEST_DECODE),
            most_next=self.sizes.drafts(max(num_next, default=0)),
        )

    def _note(self, rows: Sequence[int], scheduled_requests: Sequence[ScheduledRequest]) -> None:
        """Note the tokens of requests that start, and all new blocks."""
        table_width, row_width = self.block_tables.shape[1], self.token_ids.shape[1]
        added = self._added = _Additions()
        started = [
            (row, scheduled.new_row.token_ids)
            for row, scheduled in zip(rows, scheduled_requests, strict=True)
            if scheduled.new_row
        ]
        added.prompts = [token_ids for _, token_ids in started]
        added.places = [self._tokens_place + row * row_width for row, _ in started]
        added.places += [self._known_place + row for row, _ in started]
        added.values = [len(token_ids) for token_ids in added.prompts]
        added.lens = added.values + [1] * len(started)
        for row, scheduled in zip(rows, scheduled_requests, strict=True):
            if scheduled.draft_token_ids and scheduled.draft_token_ids[0] >= 0:  # of a drafter on the host
                count = len(scheduled.draft_token_ids)
                added.places += [self._tokens_place + row * row_width + scheduled.start + 1, self._real_place + row]
                added.lens += [count, 1]
                added.values += [*scheduled.draft_token_ids, count]
            if scheduled.new_block_ids:
                added.places.append(row * table_width + scheduled.first_new_block)
                added.lens.append(len(scheduled.new_block_ids))
                added.values += scheduled.new_block_ids

    def mark_pending_remote(self, number: int, step: DeviceStep) -> None:
        """Note where a step's tokens, which will be sampled elsewhere, belong, for `receive_sampled_tokens`.

        Args:
            number: of the step's plan.
        """
        rows = np.asarray(step.rows)
        self._pending_remote[number] = _Sampled(rows, self._openings[rows], np.add(step.starts, step.query_lens))

    def receive_sampled_tokens(self, number: int, sampled_token_ids: Sequence[Sequence[int]]) -> None:
        """Receive what was sampled elsewhere in a step, at most a token per request. It crosses with the next plan."""
        for failed in [each for each in self._pending_remote if each < number]:
            del self._pending_remote[failed]
        samples = np.fromiter(map(len, sampled_token_ids), dtype=bool, count=len(sampled_token_ids))
        token_ids = np.fromiter(chain.from_iterable(sampled_token_ids), dtype=np.int32)
        self._received.append((self._pending_remote.pop(number).of(samples), token_ids))

    def _take_received(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the places to write received numbers to, and the numbers: tokens, and how many are known then."""
        places, values = [], []
        for sampled, token_ids in self._received:
            is_there = self._openings[sampled.rows] == sampled.openings  # or the row is another request's by now
            rows, _, indices = sampled.of(is_there)
            places += [self._tokens_place + rows * self.token_ids.shape[1] + indices, self._known_place + rows]
            values += [token_ids[is_there], indices + 1]
        self._received.clear()
        return places, values

    def send(self, step: DeviceStep, num_seqs: int, num_tokens: int) -> None:
        """Write a step's header, and what it adds to the rows, to the device. Arguments are as in `pack`."""
        pack(self._packed, step, num_seqs, num_tokens)
        self._packed.output_row[0] = (self._packed.output_row[0] + 1) % len(self._outputs)
        added, header = self._added, self._host_header
        self._added = _Additions()
        received_places, received = self._take_received()
        places = np.concatenate([np.asarray(added.places, np.int64), *received_places, [self._header_place]])
        lens = np.ones_like(places)
        lens[: len(added.lens)], lens[-1] = added.lens, len(header)
        ends, count = np.cumsum(lens), len(places)
        packed = self._on_host(2 * count + 1 + int(ends[-1]))
        array = packed.numpy()  # places [count], ends [count + 1], values
        array[:count], array[count], array[count + 1 : 2 * count + 1] = places, 0, ends
        end = 2 * count + 1
        runs: list[Sequence[int] | np.ndarray] = [*added.prompts, added.values, *received, header]
        for values in runs:
            start, end = end, end + len(values)
            array[start:end] = values
        write_runs(self._memory, packed, count, int(lens.max()))
        self._sent.append(packed)  # kept until a kernel has read it: the allocator knows of copies, not of kernels

    @property
    def output(self) -> torch.Tensor:
        """Return what the step that was sent last samples, once it has: [max_num_seqs * num_fields] int32 on the host.

        Read it before `num_steps` more are sent: its place is used again.
        """
        return self._outputs[int(self._packed.output_row[0])]

    def clear(self, num_seqs: int, num_tokens: int) -> None:
        """Make the header one of padding alone: what graphs are captured with."""
        clear(self.header, num_seqs, num_tokens)

    def pretend(self, num_known: int, num_blocks: int) -> None:
        """Set all rows to `num_known` tokens, in blocks of their own as far as there are enough: to time steps."""
        self.num_known.fill_(num_known)
        self.block_tables.view(-1).copy_(torch.arange(self.block_tables.numel(), device=self.device) % num_blocks)

    def forget(self) -> None:
        """Reset rows and header to their initial state."""
        self._memory.zero_()

    def build(self, num_seqs: int, num_decodes: int = 0) -> None:
        """Fill `input_ids`, `positions`, `slot_mapping` and `seq_lens` on the device.

        Args:
            num_decodes: how many sequences, from the first on, may have drafts.
        """
        if self.places is not None:
            self.places.copy_(self._in_order)
        step_inputs(
            rows=self.header.rows[:num_seqs],
            query_start=self.header.query_start[: num_seqs + 1],
            planned_start=self.header.planned_start,
            token_ids=self.token_ids,
            num_known=self.num_known,
            block_tables=self.block_tables,
            block_size=self.block_size,
            input_ids=self.input_ids,
            positions=self.positions,
            slot_mapping=self.slot_mapping,
            seq_lens=self.seq_lens,
            depths=None if self.tree is None or self.places is None else self.tree.depths,
            num_trees=num_decodes,
        )

    def append(self, sampled: torch.Tensor) -> None:
        """Append sampled tokens, [num_rows] int64 in the order of `sample_rows`, to the known ones and the output."""
        rows = self.header.sample_rows[: sampled.shape[0]]
        append_tokens(rows, sampled, self.token_ids, self.num_known, self._outputs, self.header.output_row)

    def accept(self, sampled: torch.Tensor, num_seqs: int) -> None:
        """Accept the drafts that hold of `num_seqs` sequences, and the token after them: add them to the known tokens
        and the output.

        Args:
            sampled: [num_logits or more] int64, the token of each position.
        """
        assert self.tree is not None
        accept(
            first=self.header.sample_first[: num_seqs + 1],
            rows=self.header.sample_rows,
            logit_index=self.header.logit_index,
            sampled=sampled,
            token_ids=self.token_ids,
            num_known=self.num_known,
            num_real=self.num_real,
            parents=self.tree.parents,
            last=self.last[:num_seqs],
            last_token=self.last_token[:num_seqs],
            path=self.path[:num_seqs],
            places=self.places,
            outputs=self._outputs,
            output_row=self.header.output_row,
        )

    def histories(self, positions: slice, places: Sequence[int]) -> torch.Tensor | None:
        """Return what stands before some positions that are sampled from; None if their rows hold it.

        Nodes of a tree lie side by side in a row, but only nodes of one path follow each other.

        Args:
            positions: the slice of positions.
            places: in the tree, of all positions of the step.

        Returns:
            [num_positions, max_model_len and a few more].
        """
        if self.tree is None or self.places is None:
            return None
        path = self.tree.paths.index_select(0, to_device(places[positions], torch.int64, self.device)).long()
        rows = self.header.sample_rows[: len(places)][positions]
        known = self.num_known.index_select(0, rows).unsqueeze(1) + torch.zeros_like(path)
        found = F.pad(self.token_ids.index_select(0, rows), (0, path.shape[1]))
        # What lies behind a position's own path is not read.
        return found.scatter(
            1, known + torch.arange(path.shape[1], device=self.device), found.gather(1, known + path.clamp(min=0))
        )

    def _on_host(self, size: int) -> torch.Tensor:
        """Allocate [size] int32, where a GPU's kernels read and write it."""
        return torch.empty(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")
