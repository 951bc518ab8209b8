"""Define a request: the tokens it knows, the tokens it has computed, and its status.

The scheduler's one rule is about two numbers. `token_ids` are known (prompt and outputs); the KV of the first
`num_computed_tokens` of them is in the cache. A step computes some of the others. While plans are in flight
(asynchronous scheduling, pipeline stages) both run ahead of what the host has seen:

    token_ids              | 0 ........ prompt ........ | ... outputs ... |              known on the host
    num_in_flight_tokens                                                  | + 1 + drafts | each plan may append
    num_computed_tokens    | 0 ................................................. |         if all drafts are accepted

`Scheduler.update` moves what came true from the second line to the first and takes back the rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from teachllm.core.scheduler_output import NewRow
from teachllm.errors import counted
from teachllm.sampling_params import SamplingParams


class RequestStatus(Enum):
    """Name the states of a request; it is in exactly one of them."""

    WAITING = "waiting"  # in the queue, holds no blocks
    RUNNING = "running"  # admitted, holds blocks
    PREEMPTED = "preempted"  # in the queue again, its blocks taken back
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"  # end of sequence, a stop token, or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"


class WaitReason(Enum):
    """Name why a request waits, or gets nothing in a step although it runs, decided at the branch that refuses it.

    The value is the sentence shown to people.
    """

    BEHIND_HEAD = "behind the head of the queue"
    TOKEN_BUDGET = "needs {tokens} of the step's budget, {available} left"
    SEQUENCE_LIMIT = "{available} of {available} requests run already"
    NO_FREE_BLOCKS = "needs {blocks}, {available} free"
    STATIC_BATCH = "the batch of {needed} must drain first"
    PREEMPTED = "preempted: its blocks were taken back"
    IN_FLIGHT = "its last token is still being computed"
    NEXT_PLAN = "its turn is in one of the pipeline's next plans"


@dataclass(frozen=True, slots=True)
class Wait:
    """Hold a wait reason with its numbers."""

    reason: WaitReason
    needed: int = 0
    available: int = 0

    def __str__(self) -> str:
        words = {"tokens": counted(self.needed, "token"), "blocks": counted(self.needed, "block")}
        return self.reason.value.format(needed=self.needed, available=self.available, **words)


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """Refuse a prompt that is empty, or leaves no room for an output token.

    Raises:
        ValueError: the message has the numbers.
    """
    if num_tokens == 0:
        raise ValueError("the prompt is empty: it needs at least one token")
    if num_tokens + 1 > max_model_len:
        raise ValueError(
            f"the prompt has {counted(num_tokens, 'token')} and max_model_len={max_model_len} leaves no room for an "
            f"output token: shorten it to {max_model_len - 1}, or raise max_model_len"
        )


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """Track one completion that is being generated.

    Attributes:
        token_ids: prompt and outputs known so far, packed: hashed, and sent to a worker, as they lie in memory.
        eos_token_ids: the model's end-of-sequence ids.
        arrival_time: seconds, on the engine's clock.
        priority: lower goes first (policy "priority").
        cache_keys: what else decides the content of its blocks (adapter loading number, cache salt).
        group: set for completions of one prompt (`n` > 1): they share its blocks even without prefix caching.
        child_index, seed: of its noise.
        waits_for_ids: never runs ahead (a grammar or a drafter on the host needs the sampled ids).
        max_len: longest the sequence may get; set when the scheduler takes it.
        draft_token_ids: proposals for the tokens after the known ones; -1 where only the device knows them.
        draft_hits, draft_trials: how many of its drafts were accepted, and how many were verified; the `DraftLength`
            that counts them may forget old ones.
        block_ids: the block table; append-only while it runs.
        block_hashes: of the full blocks of known tokens, as far as they were needed.
        num_committed_blocks: leading blocks that are findable in the prefix cache.
        num_cached_tokens, first_scheduled_time: prompt tokens found in the cache on admission, and when; None before.
        last_step: the last plan that names it, -1 for none.
        own_stop_token_ids: that it asked to stop at.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival_time: float = 0.0
    priority: int = 0
    cache_keys: tuple[str, ...] = ()
    group: str | None = None
    child_index: int = 0
    seed: int = 0
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()
    waits_for_ids: bool = False

    arrival_index: int = 0
    max_len: int = 0
    status: RequestStatus = RequestStatus.WAITING
    wait: Wait | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    draft_token_ids: list[int] = field(default_factory=list)
    draft_hits: float = 0.0
    draft_trials: float = 0.0
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_committed_blocks: int = 0
    num_cached_tokens: int | None = None
    first_scheduled_time: float | None = None
    num_preemptions: int = 0
    last_step: int = -1
    own_stop_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = array("q", self.prompt_token_ids)
        self.own_stop_token_ids = frozenset(self.sampling_params.stop_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :].tolist()

    @property
    def num_expected_tokens(self) -> int:
        """Return the length of the sequence once every plan in flight has come true, all drafts accepted."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Return the number of known and in-flight tokens still to compute, which the scheduler hands out."""
        return len(self.token_ids) + self.num_in_flight_tokens - self.num_computed_tokens

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Return all ids that end the output."""
        own = self.own_stop_token_ids
        return own if self.sampling_params.ignore_eos else own | self.eos_token_ids

    def longest(self, max_model_len: int, block_size: int, num_blocks: int) -> int:
        """Return how long the sequence may get, if the cache can hold that much.

        Raises:
            ValueError: its prompt is empty, or it could never run; the message has the numbers.
        """
        num_prompt = self.num_prompt_tokens
        max_tokens = self.sampling_params.max_tokens
        check_prompt_length(num_prompt, max_model_len)
        longest = max_model_len if max_tokens is None else min(num_prompt + max_tokens, max_model_len)
        needed = -(-longest // block_size)
        if needed > num_blocks:
            raise ValueError(
                f"prompt and output may reach {longest} tokens, {needed} blocks of {block_size}, and the KV "
                f"cache has {num_blocks}: lower max_tokens, shorten the prompt, or give the KV cache more memory"
            )
        return longest

    def append(self, token_id: int) -> bool:
        """Append a sampled id; return whether the output ends with it, and set the reason if so."""
        self.token_ids.append(token_id)
        params = self.sampling_params
        if self.num_output_tokens >= params.min_tokens:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                self.finish_reason = FinishReason.STOP
            elif token_id in self.own_stop_token_ids:
                self.finish_reason = FinishReason.STOP
                self.stop_reason = token_id
        if self.finish_reason is None and len(self.token_ids) >= self.max_len:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason is not None

    def new_row(self) -> NewRow:
        """Return what a worker needs to open a row for it."""
        return NewRow(
            token_ids=self.token_ids[:],
            num_prompt_tokens=self.num_prompt_tokens,
            sampling_params=self.sampling_params,
            child_index=self.child_index,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            bad_word_token_ids=self.bad_word_token_ids,
        )
