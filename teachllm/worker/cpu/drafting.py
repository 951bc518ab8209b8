"""Drafting on the rows of a batch: what the worker does for a drafter with weights.

    a step       the plan's drafts are verified                       `drafts`, `proposals`
    sampled      what held is known, what was asked for is drafted    `propose`
    next plan    comes back with as many of these drafts as fit, by their number: their ids stay here

The plan says by `num_next_drafts` whom to draft for. While any request is drafted for, the drafter follows all it has
followed so far. One that is not asked for a while falls behind, and catches up when it is asked again: then it computes
all that is known and it has not. Which blocks hold what it computed is kept by block, since another request may share
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from teachllm.core.scheduler_output import NewRow, ScheduledRequest
from teachllm.sampling.sampler import Sampler
from teachllm.sampling.verify import Proposals
from teachllm.spec_decode.drafter import FlatTokens, ModelDrafter
from teachllm.spec_decode.tree import DraftTree
from teachllm.worker.cpu.input_batch import InputBatch, StepInputs
from teachllm_kernels.attention.paged_attention import TreeMask


@dataclass(slots=True)
class _Drafted:
    """A request's drafts: their ids, and the logits that the children of each token were drawn from.

    The newest token is the first of these, 1 + node is a node's place. There are no logits where drafts are certain,
    and -1 stands for a draft that was asked for when nothing more could be drawn.
    """

    token_ids: list[int] = field(default_factory=list)
    logits: dict[int, torch.Tensor] = field(default_factory=dict)


class Drafting:
    """A drafter at work.

    Args:
        batch: the rows.
        sampler: which knows how each draws.
        num_blocks: of the KV cache.
        tree: the shape of its drafts.
    """

    def __init__(
        self, drafter: ModelDrafter, batch: InputBatch, sampler: Sampler, num_blocks: int, tree: DraftTree
    ) -> None:
        self.drafter = drafter
        self._batch, self._sampler, self._tree = batch, sampler, tree
        self._drafted: dict[int, _Drafted] = {}
        self._num_computed: dict[int, int] = {}  # tokens of each row whose K and V the drafter has
        self._in_step: set[int] = set()  # rows that it has followed so far
        self._is_computed = np.zeros(num_blocks, dtype=bool)  # blocks of which it has all
        self._history_rows: set[int] = set()  # whose logits depend on what was said before

    def open_rows(self, opened: Sequence[tuple[int, NewRow]]) -> None:
        """Note the rows. Which cached blocks they begin with is known only when the plan is in them: see `begin`."""
        for row, new_row in opened:
            params = new_row.sampling_params
            penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            if penalties != (1.0, 0.0, 0.0) or new_row.bad_word_token_ids:
                self._history_rows.add(row)

    def close_row(self, row: int) -> None:
        """Forget the request in `row`."""
        self._history_rows.discard(row)
        self._in_step.discard(row)
        self._drafted.pop(row, None)
        self._num_computed.pop(row, None)

    def drafts(self, row: int, scheduled: ScheduledRequest) -> list[int]:
        """Return the drafts that a request verifies: the plan's, or this drafter's if the plan only counts them."""
        if -1 not in scheduled.draft_token_ids:
            return scheduled.draft_token_ids
        # Where nothing more could be drawn, any id stands in.
        return [max(token_id, 0) for token_id in self._drafted[row].token_ids[: len(scheduled.draft_token_ids)]]

    def begin(self, inputs: StepInputs) -> None:
        """Note that the model is about to write K and V, which the drafter does not have yet."""
        for row, start, end in zip(inputs.rows, inputs.starts, inputs.metadata.kv_lens, strict=True):
            blocks = self._batch.blocks(row, end)
            first_written = start // self._batch.block_size
            if row not in self._num_computed:
                hits = self._is_computed[blocks[:first_written]]
                num_hits = len(hits) if hits.all() else int(hits.argmin())
                self._num_computed[row] = num_hits * self._batch.block_size
            self._is_computed[blocks[first_written:]] = False

    def proposals(self, inputs: StepInputs, drafts: Sequence[Sequence[int]], samples: list[bool]) -> Proposals | None:
        """Return what the positions that sample were proposed by drawing; None if nothing was.

        Args:
            drafts, samples: of each request of the step, what it verifies, and whether it samples.
        """
        siblings: list[list[int]] = []
        rows: list[int] = []
        logits: list[torch.Tensor] = []
        width = self._tree.most_siblings
        for row, verified, does_sample in zip(inputs.rows, drafts, samples, strict=True):
            drawn_from = self._drafted[row].logits if verified and row in self._drafted else {}
            for place in range(len(verified) + does_sample):
                children = [node for node in self._tree.children[place] if node < len(verified)]
                known = bool(children) and place in drawn_from
                rows.append(len(logits) if known else -1)
                logits += [drawn_from[place]] if known else []
                ids = [self._drafted[row].token_ids[node] for node in children] if known else []
                siblings.append(ids + [-1] * (width - len(ids)))
        if not logits:
            return None
        return Proposals(torch.tensor(siblings), torch.stack(logits), torch.tensor(rows))

    def histories(
        self, inputs: StepInputs, drafts: Sequence[Sequence[int]], samples: list[bool]
    ) -> torch.Tensor | None:
        """Return what stands before each position that samples, [num_logits, longest]; None: what its row says.

        Nodes of a tree lie side by side in a row, but only nodes of one path follow each other. Zeros where no request
        reads it: only penalties and bad words do. Arguments as above.
        """
        reading = [row in self._history_rows for row in inputs.rows]
        if self._tree.is_chain or not any(reads and ids for reads, ids in zip(reading, drafts, strict=True)):
            return None
        nums = [len(verified) + does_sample for verified, does_sample in zip(drafts, samples, strict=True)]
        known = [self._batch.num_known(row) for row in inputs.rows]
        longest = max(
            num_known + self._tree.num_levels(len(verified))
            for num_known, verified, reads in zip(known, drafts, reading, strict=True)
            if reads
        )
        found = torch.zeros((sum(nums), longest), dtype=torch.int64)
        each = zip(inputs.rows, reading, known, drafts, found.split(nums), strict=True)
        for row, reads, num_known, verified, histories in each:
            if not reads:
                continue
            histories[:, :num_known] = self._batch.token_ids[row, :num_known]
            for place in range(1, len(histories)):
                node = place - 1
                while node >= 0:
                    histories[place, num_known + self._tree.depths[node] - 1] = verified[node]
                    node = self._tree.parents[node]
        return found

    def propose(
        self,
        scheduled_requests: Sequence[ScheduledRequest],
        inputs: StepInputs,
        paths: Sequence[Sequence[int]],
        hidden: torch.Tensor,
        features: Mapping[int, torch.Tensor],
    ) -> list[list[int]]:
        """Draft for the requests that the plan names; what was sampled is known already.

        Args:
            paths: of each request the drafts that held.
            hidden: [num_tokens, hidden_size] of all tokens of the step.
            features: see `DraftBatch`.

        Returns:
            For each request as many -1 as it has drafts now.
        """
        followed: list[_Followed] = []
        is_asked = any(scheduled.samples and scheduled.num_next_drafts for scheduled in scheduled_requests)
        for index, (scheduled, row) in enumerate(zip(scheduled_requests, inputs.rows, strict=True)):
            self._drafted.pop(row, None)
            start, end = inputs.starts[index], inputs.starts[index] + scheduled.num_tokens
            goes_on = is_asked and row in self._in_step
            self._in_step.discard(row)
            if scheduled.samples and (scheduled.num_next_drafts or goes_on):
                self._in_step.add(row)
            if scheduled.samples:
                end = self._batch.num_known(row) - 1
                # What the drafter computed from drafts that did not hold is worth nothing.
                self._num_computed[row] = min(self._num_computed[row], end)
            if scheduled.num_next_drafts or goes_on or self.drafter.follows_always:
                first = inputs.query_ends[index] - scheduled.num_tokens
                places = list(range(first, first + scheduled.num_tokens))
                if scheduled.samples:  # up to the newest token's, and then those of the drafts that held
                    newest = inputs.query_ends[index] - len(scheduled.draft_token_ids)
                    places = [*range(first, newest), *(newest + node for node in paths[index])]
                num_drafts = scheduled.num_next_drafts if scheduled.samples else 0
                followed.append(_Followed(row, start, end, places, num_drafts, self._tree.num_levels(num_drafts)))
        if followed:
            followed.sort(key=lambda each: -each.num_drafts)
            starts = [self._num_computed[each.row] for each in followed]
            batch = _Batch(self._batch, self._sampler, self._tree, followed, starts, hidden, features)
            self.drafter.propose(batch)
            for each, drafted in zip(followed, batch.drafted, strict=True):
                self._drafted[each.row] = drafted
                self._num_computed[each.row] = each.end + each.num_levels
                num_blocks = each.end // self._batch.block_size
                self._is_computed[self._batch.blocks(each.row, each.end)[:num_blocks]] = True
        return [[-1] * len(self._drafted[row].token_ids) if row in self._drafted else [] for row in inputs.rows]


@dataclass(slots=True)
class _Followed:
    """A request that the drafter follows in this step.

    Attributes:
        start, end: of the true tokens that the model has computed in it, the first and one past the last.
        places: where they are among the step's tokens.
        num_drafts: to draft, after the token at `end`; the first nodes of the tree.
        num_levels: that these have.
    """

    row: int
    start: int
    end: int
    places: list[int]
    num_drafts: int
    num_levels: int


class _Batch:
    """`DraftBatch` on the rows of an `InputBatch`: those that ask for the most drafts first."""

    def __init__(
        self,
        batch: InputBatch,
        sampler: Sampler,
        tree: DraftTree,
        followed: Sequence[_Followed],
        starts: Sequence[int],
        hidden: torch.Tensor,
        features: Mapping[int, torch.Tensor],
    ) -> None:
        self._batch, self._sampler, self._tree = batch, sampler, tree
        self._followed, self._starts = followed, starts
        self.hidden, self.features = hidden, features
        self.num_levels = followed[0].num_levels
        self.drafted = [_Drafted() for _ in followed]
        self.last = torch.empty(0, dtype=torch.int64)
        asking = [each for each in followed if each.num_drafts]
        self.newest = torch.tensor([each.places[-1] for each in asking], dtype=torch.int64)
        # (request, token) of the rows that the next level is drawn from; -1 is the newest token.
        self._rows = [(index, -1) for index in range(len(asking))]
        self._drawn_from: list[int] = []

    def behind(self) -> FlatTokens:
        ends = [each.end + (each.num_drafts > 0) for each in self._followed]
        return self._flat(self._starts, ends, 0)

    def verified(self) -> tuple[torch.Tensor, FlatTokens]:
        places = [place for each in self._followed for place in each.places]
        starts, ends = [each.start for each in self._followed], [each.end for each in self._followed]
        return torch.tensor(places), self._flat(starts, ends, 1)

    def _flat(self, starts: Sequence[int], ends: Sequence[int], id_shift: int) -> FlatTokens:
        lens = [end - start for start, end in zip(starts, ends, strict=True)]
        self.last = torch.tensor(lens).cumsum(0)[: len(self._rows)] - 1
        rows = [each.row for each in self._followed]
        return _tensors(self._batch.flat(rows, list(starts), lens, id_shift))

    def push(self, level: int, logits: torch.Tensor) -> None:
        from_rows = self._rows[: logits.shape[0]]
        self._rows, self._drawn_from = [], []
        rows = [self._followed[index].row for index, _ in from_rows]
        lengths = torch.tensor([self._followed[index].end + 1 + level for index, _ in from_rows])
        children = [self._tree.children[node + 1] for _, node in from_rows]
        token_ids = self._sampler.draw_drafts(logits, rows, lengths, max(map(len, children))).tolist()
        for at, (index, node) in enumerate(from_rows):
            each, drafted = self._followed[index], self.drafted[index]
            asked = [child for child in children[at] if child < each.num_drafts]
            for child, token_id in zip(asked, token_ids[at], strict=False):
                self._batch.write(each.row, each.end + 1 + child, max(token_id, 0))
                drafted.token_ids.append(token_id)
                self._rows.append((index, child))
                self._drawn_from.append(at)
            if asked and self._sampler.is_random(each.row):
                drafted.logits[node + 1] = logits[at]

    def pushed(self, level: int, shift: int = 0) -> FlatTokens:
        going_on = [self._followed[index].num_levels > level + 1 for index, _ in self._rows]
        self._drawn_from = [at for at, goes in zip(self._drawn_from, going_on, strict=True) if goes]
        self._rows = [row for row, goes in zip(self._rows, going_on, strict=True) if goes]
        nodes = self._tree.levels[level]
        indices = list(dict.fromkeys(index for index, _ in self._rows))
        asking = [self._followed[index] for index in indices]
        starts = [each.end + 1 + nodes[0] + shift for each in asking]
        counts = [sum(index == other for other, _ in self._rows) for index in indices]
        trees = None
        if not self._tree.is_chain:
            trees = [
                TreeMask(
                    each.end + 1 + shift,
                    tuple(self._tree.sees[node + 1] >> 1 for node in nodes[:count]),
                    (each.end + 1 + level + shift,) * count,
                )
                for each, count in zip(asking, counts, strict=True)
            ]
        return _tensors(self._batch.flat([each.row for each in asking], starts, counts, -shift, trees))

    def parents(self, level: int) -> torch.Tensor:
        return torch.tensor(self._drawn_from)


def _tensors(inputs: StepInputs) -> FlatTokens:
    return inputs.input_ids, inputs.positions, inputs.metadata
