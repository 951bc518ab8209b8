"""A worker without tensors: it knows which content every KV slot holds, and complains when a wrong one is read.

In place of K and V each slot keeps one number: a hash of the request's root (what may share with it) and of all its
tokens up to that position. Such a number says which prefix and which position wrote the slot. Before a step samples,
all slots of a sequence must hold the numbers of exactly this sequence. The "model" is a function of the same number,
so that what a request must produce can be computed without any engine.

The runner acts on `SchedulerOutput` alone. Like a device it knows true lengths at once, while the scheduler learns
them when the result comes back; it therefore also checks what the scheduler assumes in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from teachllm.core.scheduler_output import ModelRunnerOutput, NewRow, ScheduledRequest, SchedulerOutput

VOCABULARY = 12
EOS = 0
_MASK = 0x7FFF_FFFF_FFFF_FFFF
_MULTIPLIER = 0x5851_F42D_4C95_7F2D


class OracleViolation(AssertionError):
    """A plan would have made a real worker read or write something wrong."""


def require(holds: object, message: str) -> None:
    if not holds:
        raise OracleViolation(message)


def extend(content: int, token_id: int) -> int:
    """The content of a slot, from that of the slot before it and its token."""
    mixed = (content ^ (token_id + 1)) * _MULTIPLIER & _MASK
    return mixed ^ mixed >> 29


def next_token(content: int, child_index: int, num_outputs: int, min_tokens: int, stop_ids: frozenset[int]) -> int:
    """What the model says after a prefix: any id, but no stop id before `min_tokens`."""
    content = extend(content, 1000 + child_index)
    token_id = (content >> 8) % VOCABULARY
    while num_outputs < min_tokens and token_id in stop_ids:
        token_id = (token_id + 1) % VOCABULARY
    return token_id


@dataclass
class Row:
    """What the worker keeps of a request: true tokens, true length, block table."""

    new: NewRow
    root: int
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)  # what each slot of the sequence has to hold
    num_computed: int = 0
    num_rejected_unseen: int = 0  # drafts that fell and the scheduler still counts on

    def grow(self, drafts: Sequence[int]) -> None:
        """Brings `contents` up to the known tokens and these drafts."""
        content = self.contents[-1] if self.contents else self.root
        for token_id in [*self.tokens[len(self.contents) :], *drafts]:
            content = extend(content, token_id)
            self.contents.append(content)

    def next_token(self, content: int, num_tokens: int) -> int:
        params = self.new.sampling_params
        num_outputs = num_tokens - self.new.num_prompt_tokens
        return next_token(content, self.new.child_index, num_outputs, params.min_tokens, self.new.stop_token_ids)

    def propose(self, num_drafts: int, rng: Random) -> list[int]:
        """Guesses for the tokens after the known ones: right ones up to a random point."""
        self.grow([])
        content, length, drafts = self.contents[-1], len(self.tokens), []
        for _ in range(num_drafts):
            guess = self.next_token(content, length)
            if rng.random() < 0.35:
                guess = (guess + 1) % VOCABULARY
            drafts.append(guess)
            content, length = extend(content, guess), length + 1
        return drafts


class FakeRunner:
    """Executes plans against a KV oracle.

    Args:
        root_of: the root content of a request id: what it may share with others.
        keeps_cache: False for `enable_kv_cache=False`, where every step starts from token 0 in scratch blocks.
        max_rows: rows the worker has room for.
        max_drafts: proposals to make for a next step.
        runs_ahead: proposals for a request stay on the device, so that the host sees -1.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        root_of: Callable[[str], int],
        keeps_cache: bool,
        max_rows: int,
        max_drafts: int,
        runs_ahead: Callable[[str], bool],
        rng: Random,
    ) -> None:
        self.block_size = block_size
        self.slots = [-1] * (num_blocks * block_size)
        self.rows: dict[str, Row] = {}
        self._root_of, self._keeps_cache, self._max_rows = root_of, keeps_cache, max_rows
        self._max_drafts, self._runs_ahead, self._rng = max_drafts, runs_ahead, rng
        self._unseen: dict[int, list[tuple[Row, int]]] = {}  # step -> rows and how many of their drafts fell

    def block(self, block_id: int) -> list[int]:
        """What a block's slots hold."""
        return self.slots[block_id * self.block_size : (block_id + 1) * self.block_size]

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Runs a plan: rows, then all writes, then all reads, then sampling."""
        self.update_rows(plan)
        drafts = [self._fill_in(scheduled) for scheduled in plan.scheduled]
        for scheduled, guesses in zip(plan.scheduled, drafts, strict=True):
            self._write(scheduled, guesses)
        for scheduled in plan.scheduled:
            self._read(scheduled)
        self._unseen[plan.step] = []
        sampled = [self._sample(plan.step, *pair) for pair in zip(plan.scheduled, drafts, strict=True)]
        proposals = None
        if self._max_drafts:
            proposals = [self._propose(scheduled) for scheduled in plan.scheduled]
        return ModelRunnerOutput(sampled, draft_token_ids=proposals)

    def execute_and_lose(self, plan: SchedulerOutput) -> None:
        """A step that dies half way: rows are updated, and what it was to write is garbage."""
        self.update_rows(plan)
        for scheduled in plan.scheduled:
            row = self.rows[scheduled.request_id]
            for index in range(row.num_computed, row.num_computed + scheduled.num_tokens):
                self.slots[self._slot(row, index)] = -2

    def seen(self, plan: SchedulerOutput) -> None:
        """The scheduler has seen this plan's result and knows which drafts fell."""
        for row, num_rejected in self._unseen.pop(plan.step, ()):
            row.num_rejected_unseen -= num_rejected

    def update_rows(self, plan: SchedulerOutput) -> None:
        for request_id in plan.dropped:
            self.rows.pop(request_id, None)  # a failed step may have closed it already
        for scheduled in plan.scheduled:
            name = scheduled.request_id
            if scheduled.new_row is not None:
                require(name not in self.rows, f"{name}: a second row is opened")
                new = scheduled.new_row
                self.rows[name] = Row(new, self._root_of(name), list(new.token_ids), num_computed=scheduled.start)
            require(name in self.rows, f"{name}: scheduled without a row")
            row = self.rows[name]
            if not self._keeps_cache:
                require(scheduled.start == 0 == scheduled.first_new_block, f"{name}: not recomputed from the start")
                row.table, row.num_computed = [], 0
            require(scheduled.first_new_block == len(row.table), f"{name}: a hole or an overwrite in the block table")
            row.table += scheduled.new_block_ids
            assumed = row.num_computed + row.num_rejected_unseen
            require(scheduled.start == assumed, f"{name}: starts at {scheduled.start}, the worker knows {assumed}")
        require(len(self.rows) <= self._max_rows, f"{len(self.rows)} rows are open, there are {self._max_rows}")

    def _slot(self, row: Row, index: int) -> int:
        return row.table[index // self.block_size] * self.block_size + index % self.block_size

    def _fill_in(self, scheduled: ScheduledRequest) -> list[int]:
        row = self.rows[scheduled.request_id]
        num_known = scheduled.num_tokens - len(scheduled.draft_token_ids)
        end = row.num_computed + num_known
        require(num_known > 0, f"{scheduled.request_id}: {num_known} known tokens")
        require(end <= len(row.tokens), f"{scheduled.request_id}: computes {end} tokens, {len(row.tokens)} are known")
        require(
            scheduled.samples == (end == len(row.tokens)),
            f"{scheduled.request_id}: samples={scheduled.samples} at {end}",
        )
        require(scheduled.samples or not scheduled.draft_token_ids, f"{scheduled.request_id}: drafts inside a prompt")
        own = row.propose(len(scheduled.draft_token_ids), self._rng)
        return [mine if given == -1 else given for given, mine in zip(scheduled.draft_token_ids, own, strict=True)]

    def _write(self, scheduled: ScheduledRequest, drafts: list[int]) -> None:
        row = self.rows[scheduled.request_id]
        row.grow([])
        del row.contents[len(row.tokens) :]
        row.grow(drafts)
        start, end = row.num_computed, row.num_computed + scheduled.num_tokens
        require(end <= len(row.table) * self.block_size, f"{scheduled.request_id}: token {end - 1} has no slot")
        for index in range(start, end):
            self.slots[self._slot(row, index)] = row.contents[index]

    def _read(self, scheduled: ScheduledRequest) -> None:
        row, size = self.rows[scheduled.request_id], self.block_size
        end = row.num_computed + scheduled.num_tokens
        for i in range(-(-end // size)):
            length = min(size, end - i * size)
            held, wanted = self.block(row.table[i])[:length], row.contents[i * size : i * size + length]
            require(held == wanted, f"{scheduled.request_id}: reads foreign KV in block {row.table[i]}, its number {i}")

    def _sample(self, step: int, scheduled: ScheduledRequest, drafts: list[int]) -> list[int]:
        row = self.rows[scheduled.request_id]
        if not scheduled.samples:
            row.num_computed += scheduled.num_tokens
            return []
        known = len(row.tokens)
        sampled: list[int] = []
        for i in range(len(drafts) + 1):  # from what the slots hold, as attention would
            token_id = row.next_token(self.slots[self._slot(row, known - 1 + i)], known + i)
            sampled.append(token_id)
            if i == len(drafts) or token_id != drafts[i]:
                break
        row.num_computed = known + len(sampled) - 1
        num_rejected = len(drafts) + 1 - len(sampled)
        row.num_rejected_unseen += num_rejected
        self._unseen[step].append((row, num_rejected))
        row.tokens += sampled
        del row.contents[row.num_computed :]
        return sampled

    def _propose(self, scheduled: ScheduledRequest) -> list[int]:
        if not scheduled.samples:
            return []
        num_drafts = self._rng.randint(0, self._max_drafts)
        if self._runs_ahead(scheduled.request_id):
            return [-1] * num_drafts
        return self.rows[scheduled.request_id].propose(num_drafts, self._rng)
