"""The input batch: one persistent row per request, and the flat tensors of a step made from them.

A plan carries only what changed, so the worker remembers the rest, a row per running request:

    token_ids   [max_num_seqs, max_model_len]   | prompt | outputs | drafts being verified |
    block_table [max_num_seqs, max_blocks]      logical block -> physical block
    num_known   [max_num_seqs]                  tokens of prompt and outputs

A request keeps its row from admission to its end, so nothing moves when others come and go. A step gathers from
the rows by index: no Python loop over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from teachllm.core.scheduler_output import NewRow, ScheduledRequest, SchedulerOutput
from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.attention_backends.base import AttentionBackend
from teachllm.layers.attention_backends.reference import REFERENCE
from teachllm.spec_decode.tree import DraftTree
from teachllm.worker.rows import Rows
from teachllm_kernels.attention.paged_attention import TreeMask


@dataclass(slots=True)
class StepInputs:
    """The flat tensors of one step.

    Attributes:
        input_ids, positions: [num_tokens] int64.
        metadata: where those tokens read and write KV.
        rows: the request row of each scheduled request.
        starts: true index of each request's first computed token.
        query_ends: one past each request's last flat token.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    rows: list[int]
    starts: list[int]
    query_ends: list[int]


class InputBatch(Rows):
    """Rows of the requests a worker is running.

    Args:
        max_num_seqs: rows.
        max_model_len: tokens per row.
        block_size: tokens per block.
        backend: computes attention.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        backend: AttentionBackend = REFERENCE,
    ) -> None:
        super().__init__(max_num_seqs)
        self.block_size = block_size
        self.device = device
        self._backend = backend
        self.token_ids = torch.zeros((max_num_seqs, max_model_len), dtype=torch.int64)
        self._token_ids = self.token_ids.numpy()  # the same memory
        self._block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._num_known = np.zeros(max_num_seqs, dtype=np.int64)

    def open(self, request_id: str, new_row: NewRow) -> int:
        """Take a row for a request and return it."""
        row = super().open(request_id, new_row)
        self._num_known[row] = len(new_row.token_ids)
        self._token_ids[row, : len(new_row.token_ids)] = new_row.token_ids
        return row

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        """Append sampled tokens to the known ones."""
        known = self._num_known[row]
        self._token_ids[row, known : known + len(token_ids)] = token_ids
        self._num_known[row] = known + len(token_ids)

    def row(self, request_id: str) -> int:
        """Return where a request's row is."""
        return self._row_of[request_id]

    def num_known(self, row: int) -> int:
        """Count the tokens of prompt and output."""
        return int(self._num_known[row])

    def blocks(self, row: int, num_tokens: int) -> np.ndarray:
        """Return the block ids of the first tokens."""
        return self._block_table[row, : -(-num_tokens // self.block_size)]

    def write(self, row: int, index: int, token_id: int) -> None:
        """Write a token that is not known, only guessed."""
        self._token_ids[row, index] = token_id

    def prepare(
        self, plan: SchedulerOutput, drafts: Sequence[Sequence[int]] | None = None, tree: DraftTree | None = None
    ) -> StepInputs:
        """Return the step's tensors. Write the plan's new blocks and drafts into the rows.

        Args:
            drafts: of each scheduled request; None: as the plan has them.
            tree: the tree whose first nodes the drafts are; None: chains.
        """
        rows = [self._row_of[scheduled.request_id] for scheduled in plan.scheduled]
        drafts = drafts or [scheduled.draft_token_ids for scheduled in plan.scheduled]
        starts = [self._write(*each) for each in zip(rows, plan.scheduled, drafts, strict=True)]
        trees: list[TreeMask | None] | None = None
        if tree is not None and not tree.is_chain:
            trees = [self._tree(tree, start, len(ids)) for start, ids in zip(starts, drafts, strict=True)]
        return self.flat(rows, starts, [scheduled.num_tokens for scheduled in plan.scheduled], trees=trees)

    @staticmethod
    def _tree(tree: DraftTree, start: int, num_drafts: int) -> TreeMask | None:
        """Return the tree mask of a request whose newest token is at `start`, if it has drafts."""
        if not num_drafts:
            return None
        depths = (0, *tree.depths[:num_drafts])
        return TreeMask(start, tree.sees[: num_drafts + 1], tuple(start + depth for depth in depths))

    def slots(self, row: int, indices: Sequence[int]) -> list[int]:
        """Return where K and V of some of a request's tokens lie."""
        places = np.asarray(indices, dtype=np.int64)
        blocks = self._block_table[row, places // self.block_size].astype(np.int64)
        return (blocks * self.block_size + places % self.block_size).tolist()

    def flat(
        self,
        rows: list[int],
        starts: list[int],
        query_lens: list[int],
        id_shift: int = 0,
        trees: Sequence[TreeMask | None] | None = None,
    ) -> StepInputs:
        """Return the tensors of some rows' tokens: `query_lens` of each row, from `starts` on.

        Args:
            id_shift: how many places further on the tokens are whose ids these are.
            trees: of each row what its tokens see, and where they stand, if they are no chain.
        """
        row_array, start_array, length_array = np.array(rows), np.array(starts), np.array(query_lens)
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(length_array, out=query_start[1:])
        token_rows = np.repeat(row_array, length_array)  # [num_tokens]
        positions = np.arange(query_start[-1]) + np.repeat(start_array - query_start[:-1], length_array)
        blocks = self._block_table[token_rows, positions // self.block_size]
        slots = blocks.astype(np.int64) * self.block_size + positions % self.block_size
        kv_lens = start_array + length_array
        max_blocks = -(-int(kv_lens.max()) // self.block_size)
        metadata = AttentionMetadata(
            query_start=self._tensor(query_start),
            seq_lens=self._tensor(kv_lens.astype(np.int32)),
            block_tables=self._tensor(self._block_table[row_array, :max_blocks]),
            slot_mapping=self._tensor(slots),
            query_lens=query_lens,
            kv_lens=kv_lens.tolist(),
            backend=self._backend,
            trees=trees,
        )
        input_ids = self._token_ids[token_rows, positions + id_shift]
        query_ends = query_start[1:].tolist()
        for tree, end in zip(trees or (), query_ends, strict=bool(trees)):
            if tree is not None:
                positions[end - len(tree.positions) : end] = tree.positions
        return StepInputs(self._tensor(input_ids), self._tensor(positions), metadata, rows, starts, query_ends)

    def _write(self, row: int, scheduled: ScheduledRequest, drafts: Sequence[int]) -> int:
        """Update a row for its scheduled request and return the index at which its computation actually starts."""
        first, known = scheduled.first_new_block, int(self._num_known[row])
        self._block_table[row, first : first + len(scheduled.new_block_ids)] = scheduled.new_block_ids
        self._token_ids[row, known : known + len(drafts)] = drafts
        # The plan may have been made before drafts were rejected; a step always computes a known token first.
        return min(scheduled.start, known - 1)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
