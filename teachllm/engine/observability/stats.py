"""Hold what a step tells about the engine as a whole: the source of every gauge and counter of a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from typing import Any

from teachllm.core.in_flight import RequestUpdate
from teachllm.core.request import Request, WaitReason
from teachllm.core.scheduler import Scheduler
from teachllm.core.scheduler_output import SchedulerOutput


@dataclass(frozen=True, slots=True)
class StepStats:
    """Hold the state of an engine, and what has been counted since it was last asked for.

    Attributes:
        num_running, num_waiting: requests; completions of one request count each.
        kv_cache_usage: fraction of the KV blocks that requests hold.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up, and found, for requests newly admitted.
        num_preemptions: requests that lost their blocks.
        num_tokens: computed, of prompts and outputs.
        num_prompt_tokens: of the prompts that have got their first output token.
        num_generation_tokens: sampled.
        num_samplings: how often a step gave a request tokens; without speculation, one each time.
        num_drafts: how often drafts of a request were verified, one or more at a time.
        num_draft_tokens, num_accepted_tokens: drafted tokens that were verified, and those of them that held.
        num_accepted_tokens_per_pos: how often the first draft held, the first two, and so on.
        replicas: requests that run and that wait, for each replica where there are several.
        waiting_reasons: (name of a `WaitReason`, in small letters, how many wait for it): what the first of the queue
            waits for, and how many are behind it.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    num_tokens: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_samplings: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    replicas: tuple[tuple[int, int], ...] = ()
    waiting_reasons: tuple[tuple[str, int], ...] = ()

    def then(self, later: StepStats) -> StepStats:
        """Merge the statistics of this and of later steps."""
        return replace(later, **_sums([self, later]))

    def without_counts(self) -> StepStats:
        """Return the state without the counts."""
        return replace(self, **_sums([]))


NOTHING = StepStats(0, 0, 0.0, 0, 0, 0, 0, 0, 0)


def together(replicas: Sequence[StepStats]) -> StepStats:
    """Merge the statistics of replicas into one engine's: usage is their mean, since each has blocks of its own; all
    else the sum."""
    if len(replicas) == 1:
        return replicas[0]
    return StepStats(
        num_running=sum(each.num_running for each in replicas),
        num_waiting=sum(each.num_waiting for each in replicas),
        kv_cache_usage=sum(each.kv_cache_usage for each in replicas) / len(replicas),
        replicas=tuple((each.num_running, each.num_waiting) for each in replicas),
        waiting_reasons=tuple(sum((Counter(dict(each.waiting_reasons)) for each in replicas), Counter()).items()),
        **_sums(replicas),
    )


_COUNTS = (
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
    *("num_tokens", "num_prompt_tokens", "num_generation_tokens", "num_samplings"),
    *("num_drafts", "num_draft_tokens", "num_accepted_tokens"),
)


def _sums(parts: Sequence[StepStats]) -> dict[str, Any]:
    """Sum all that is counted, by its name."""
    per_pos = zip_longest(*(each.num_accepted_tokens_per_pos for each in parts), fillvalue=0)
    counts = {name: sum(getattr(each, name) for each in parts) for name in _COUNTS}
    return counts | {"num_accepted_tokens_per_pos": tuple(map(sum, per_pos))}


def _waiting_reasons(scheduler: Scheduler) -> tuple[tuple[str, int], ...]:
    head = scheduler.waiting.head
    if head is None or head.wait is None:
        return ()
    reasons = Counter({head.wait.reason.name.lower(): 1})
    reasons[WaitReason.BEHIND_HEAD.name.lower()] += len(scheduler.waiting) - 1
    return tuple(reasons.items())


class StepCounter:
    """Counts between two `StepStats`."""

    def __init__(self) -> None:
        self._num_preemptions = 0  # of the scheduler, in all, when they were last told
        self._reset()

    def _reset(self) -> None:
        self._queries = self._hits = self._num_tokens = self._num_prompt_tokens = self._num_generation_tokens = 0
        self._num_samplings = self._num_draft_tokens = 0
        self._num_with = Counter[int]()  # by the number of drafts that held: verifications

    def admit(self, request: Request, was_looked_up: bool) -> None:
        """Count a request that has been scheduled for the first time."""
        self._queries += request.num_prompt_tokens if was_looked_up else 0
        self._hits += request.num_cached_tokens or 0

    def step(self, plan: SchedulerOutput, updates: list[RequestUpdate]) -> None:
        """Count a plan whose tokens have arrived."""
        self._num_tokens += plan.num_tokens
        for update in updates:
            if num_new := len(update.new_token_ids):
                self._num_generation_tokens += num_new
                self._num_samplings += 1
                if update.request.num_output_tokens == num_new:
                    self._num_prompt_tokens += update.request.num_prompt_tokens
            if update.num_drafted:
                self._num_draft_tokens += update.num_drafted
                self._num_with[update.num_accepted] += 1

    def take(self, scheduler: Scheduler) -> StepStats:
        """Return what there is to tell; counting begins anew."""
        most = max(self._num_with, default=0)
        per_pos = list(accumulate(self._num_with[i] for i in range(most, 0, -1)))[::-1]
        stats = StepStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=scheduler.kv.num_used_blocks / len(scheduler.kv.pool),
            prefix_cache_queries=self._queries,
            prefix_cache_hits=self._hits,
            num_preemptions=scheduler.num_preemptions - self._num_preemptions,
            num_tokens=self._num_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_samplings=self._num_samplings,
            num_drafts=self._num_with.total(),
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(per_pos),
            num_accepted_tokens_per_pos=tuple(per_pos),
            waiting_reasons=_waiting_reasons(scheduler),
        )
        self._num_preemptions = scheduler.num_preemptions
        self._reset()
        return stats
