"""Schedule requests (lessons 03, 04 and 06): choose the tokens of each step. One rule does everything.

A request has tokens it knows and tokens it has computed; each step hands out a token budget so that computed
catches up with known. A prompt has many tokens still to compute, a decode has one. Chunked prefill is a budget smaller
than their number, a prefix hit starts with fewer, a preemption makes them more again, and speculation appends guesses.
There is no prefill phase and no decode phase: both share one batch.

The budget is handed out in this order, so that no running decode ever waits for a prompt:

    1. one token to every running request that has only one to compute
    2. the prompts of running requests, in order
    3. waiting requests, in the policy's order, until one is refused
    4. drafts, with what is left

`schedule` may run again before `update` has seen the last plan's tokens: see `in_flight.py`.

Source: Yu et al., "Orca", OSDI 2022 (iteration-level scheduling); Agrawal et al., "Sarathi-Serve", OSDI 2024
(chunked prefill); the single rule is vLLM V1's.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from teachllm.config import EngineConfig
from teachllm.core.drafts import DraftLength, add_drafts, ask_for_drafts
from teachllm.core.in_flight import PlansInFlight, RequestUpdate, settle
from teachllm.core.kv_cache_manager import KVCacheManager
from teachllm.core.policy import POLICIES, Policy, WaitingQueue
from teachllm.core.request import FinishReason, Request, RequestStatus, Wait, WaitReason
from teachllm.core.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput

Chosen = dict[Request, tuple[int, list[int]]]  # request -> (tokens, new blocks)

# Why a running request gets nothing, where there are no numbers to tell.
_IN_FLIGHT, _NEXT_PLAN = Wait(WaitReason.IN_FLIGHT), Wait(WaitReason.NEXT_PLAN)


class Scheduler:
    """Manage the queues, budget and blocks of one engine.

    Args:
        config: a resolved configuration.
        num_blocks: KV blocks in the pool.
        cache_root: digest of what decides all KV, see `prefix_cache.hash_root`.
        policy: overrides `config.scheduling_policy`.
        overrides: arguments of its `KVCacheManager`, by name.
        draft_length: decides how many tokens the worker's drafter proposes; None: there is no drafter.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        cache_root: bytes = b"",
        policy: Policy | None = None,
        draft_length: DraftLength | None = None,
        **overrides: Any,
    ) -> None:
        assert config.max_model_len and config.max_num_batched_tokens and config.max_num_seqs, "resolve() it first"
        self.config = config
        self.max_model_len = config.max_model_len
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_seqs = config.max_num_seqs
        self.policy = policy or POLICIES[config.scheduling_policy]()
        self.draft_length = draft_length
        self.drafter_len: int | None = None  # tokens of the drafter's context, if that is shorter than the model's
        speculation = config.speculative_config
        self.kv = KVCacheManager(
            num_blocks=num_blocks,
            block_size=config.block_size,
            enable_prefix_caching=bool(config.enable_prefix_caching),
            root=cache_root,
            recomputes_last_hit=speculation is not None and speculation.reads_features,
            **overrides,
        )
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.waiting = WaitingQueue(self.policy)
        self.running: list[Request] = []
        self.in_flight = PlansInFlight()
        self.num_steps = 0
        self.num_preemptions = 0
        self._arrivals = count()
        self._dropped: list[str] = []  # rows that the next plan tells the worker to close
        self._preempted: list[str] = []  # the dropped ones that it reports as preempted
        self._chunks = config.enable_chunked_prefill and config.enable_kv_cache  # a prompt may take several steps
        self._budget = 0
        self._short_of_blocks = False  # in this step a running request found too few

    # -- requests ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its id is taken, its prompt is empty, or it could never run; the message has the numbers.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        request.max_len = request.longest(self.max_model_len, self.kv.block_size, len(self.kv.pool))
        if not self.config.enable_kv_cache:  # scratch blocks last one step
            request.waits_for_ids = True
            request.group = None
        elif request.group is not None and not self.config.enable_prefix_caching:
            request.cache_keys += (f"group {request.group}",)  # found by its siblings only
        request.arrival_index = next(self._arrivals)
        self.requests[request.request_id] = request
        self.waiting.push(request)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | int | None = None) -> bool:
        """End a request from outside: an abort, or a stop string. Return False if it has ended already."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self._end(request)
        return True

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    # -- one step ------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Return the next plan. It is empty if no request can compute anything now; such a plan is not executed."""
        self.kv.commit_all()
        plan = SchedulerOutput(step=self.num_steps)
        self._budget = self.max_num_batched_tokens
        self._short_of_blocks = False
        open_to_join = self.policy.opens_batch(len(self.running))
        self._schedule_running(plan)
        self._schedule_waiting(plan, open_to_join)
        has_blocks = not self._short_of_blocks
        add_drafts(plan, self.requests, self.kv, self._budget, has_blocks)
        if self.draft_length is not None and plan.scheduled:
            ask_for_drafts(plan, self.requests, self.kv, self.draft_length, self.drafter_len, has_blocks)
        if plan.scheduled:
            plan.dropped = self._dropped
            plan.preempted = self._preempted
            self._dropped = []
            self._preempted = []
            self.num_steps += 1
            self.in_flight.push(plan, [self.requests[scheduled.request_id] for scheduled in plan.scheduled])
        return plan

    def _schedule_running(self, plan: SchedulerOutput) -> None:
        chosen: Chosen = {}
        decodes = [request for request in self.running if request.num_uncomputed_tokens <= 1]
        prompts = [request for request in self.running if request.num_uncomputed_tokens > 1]
        # Decodes first. A pipeline's plans divide them: all in one would leave nothing for the other stages.
        most_decodes = -(-len(decodes) // self.config.pipeline_parallel_size)
        ready, ready_prompts = list(filter(self._can_compute, decodes)), list(filter(self._can_compute, prompts))
        if len(ready) + len(ready_prompts) < len(self.running):
            plan.held |= {r.request_id: _IN_FLIGHT for r in self.running if not self._can_compute(r)}
        plan.held |= {request.request_id: _NEXT_PLAN for request in ready[most_decodes:]}
        for request in [*ready[:most_decodes], *ready_prompts]:
            num_uncomputed = request.num_uncomputed_tokens
            num_tokens = self._chunk(request, num_uncomputed)
            if request.status is not RequestStatus.RUNNING:
                continue  # a request before it took its blocks
            if num_tokens == 0:
                plan.held[request.request_id] = self._out_of_budget(num_uncomputed)
                continue
            new_blocks = self._make_room(request, request.num_computed_tokens + num_tokens, chosen)
            if new_blocks is not None:
                chosen[request] = num_tokens, new_blocks
                self._budget -= num_tokens
            elif request.status is RequestStatus.RUNNING:
                missing = self.kv.num_missing_blocks(request, request.num_computed_tokens + num_tokens, [])
                free = self.kv.pool.num_free_blocks
                plan.held[request.request_id] = Wait(WaitReason.NO_FREE_BLOCKS, missing, free)
        for request, (num_tokens, new_blocks) in chosen.items():
            self._launch(plan, request, num_tokens, new_blocks)

    def _make_room(self, request: Request, num_tokens: int, chosen: Chosen) -> list[int] | None:
        """Return new blocks for the first `num_tokens` tokens, preempting from the end of the policy's order."""
        while (new_blocks := self.kv.allocate(request, num_tokens)) is None:
            self._short_of_blocks = True
            if self.kv.pinned or not self.config.enable_kv_cache:
                return None  # blocks come back when a plan in flight (or, without a cache, this one) retires
            victim = max(self.running, key=self.policy.key)
            self._budget += chosen.pop(victim, (0, []))[0]
            self._preempt(victim)
            if victim is request:
                return None
        return new_blocks

    def _schedule_waiting(self, plan: SchedulerOutput, open_to_join: bool) -> None:
        while (head := self.waiting.head) is not None:
            if self._short_of_blocks and head.wait == Wait(WaitReason.PREEMPTED):
                return  # not examined again before there are blocks
            head.wait = self._admit(plan, head, open_to_join)
            if head.wait is not None:
                return

    def _admit(self, plan: SchedulerOutput, request: Request, open_to_join: bool) -> Wait | None:
        """Start a waiting request, or return why not."""
        if not open_to_join:
            return Wait(WaitReason.STATIC_BATCH, len(self.running))
        if len(self.running) >= self.max_num_seqs:
            return Wait(WaitReason.SEQUENCE_LIMIT, len(self.running) + 1, self.max_num_seqs)
        hits = self.kv.match(request)
        num_hit_tokens = len(hits) * self.kv.block_size
        num_uncomputed = len(request.token_ids) - num_hit_tokens
        num_tokens = self._chunk(request, num_uncomputed)
        if num_tokens == 0:
            return self._out_of_budget(num_uncomputed)
        # What is free while a running request is short of blocks is kept for it.
        available = 0 if self._short_of_blocks else self.kv.pool.num_free_blocks
        missing = self.kv.num_missing_blocks(request, num_hit_tokens + num_tokens, hits)
        blocks = self.kv.allocate(request, num_hit_tokens + num_tokens, hits) if missing <= available else None
        if blocks is None:
            return Wait(WaitReason.NO_FREE_BLOCKS, missing, available)
        self.waiting.remove(request)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_hit_tokens
        self._budget -= num_tokens
        self._launch(plan, request, num_tokens, blocks, new=True)
        return None

    def _chunk(self, request: Request, num_uncomputed: int) -> int:
        """Return how many of `num_uncomputed` tokens to compute now; 0 if the budget does not allow it."""
        if not self._chunks:
            return num_uncomputed if num_uncomputed <= self._budget else 0
        most = min(num_uncomputed, self._budget, self.config.long_prefill_token_threshold or num_uncomputed)
        return self.policy.chunk(request, most) if most > 1 else most

    def _out_of_budget(self, num_uncomputed: int) -> Wait:
        """Return why a request gets no chunk: the tokens that it needs at least, and what is left."""
        return Wait(WaitReason.TOKEN_BUDGET, 1 if self._chunks else num_uncomputed, self._budget)

    def _can_compute(self, request: Request) -> bool:
        if request.num_in_flight_tokens == 0:
            return True
        runs_ahead = bool(self.config.async_scheduling) and not request.waits_for_ids
        return runs_ahead and request.num_expected_tokens < request.max_len

    def _launch(
        self, plan: SchedulerOutput, request: Request, num_tokens: int, new_blocks: list[int], new: bool = False
    ) -> None:
        """Add a request to the plan and count its scheduled tokens as computed."""
        start = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        samples = request.num_uncomputed_tokens == 0
        request.num_in_flight_tokens += samples
        request.last_step = plan.step
        self.kv.commit_later(request)
        plan.scheduled.append(
            ScheduledRequest(
                request_id=request.request_id,
                start=start,
                num_tokens=num_tokens,
                draft_token_ids=[],
                samples=samples,
                first_new_block=len(request.block_ids) - len(new_blocks),
                new_block_ids=new_blocks,
                new_row=request.new_row() if new else None,
            )
        )

    # -- results -------------------------------------------------------------------------------------------

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        """Take the oldest plan's result: append tokens, roll back rejected drafts, commit, end, free."""
        updates = settle(self.in_flight.pop(plan), result)
        for update in updates:
            request = update.request
            if update.num_planned and request.finish_reason is None and self.draft_length is not None:
                self.draft_length.observe(request, update.num_planned, update.num_accepted)
            self.kv.commit(request)
            if request.finish_reason is not None:
                self._end(request)
            elif not self.config.enable_kv_cache:
                self.kv.free(request)
                request.num_computed_tokens = 0
        self.kv.retire(plan.step)
        return updates

    def fail(self, plan: SchedulerOutput) -> None:
        """Start the oldest plan, which failed, and all after it over, as after a preemption."""
        for entry in self.in_flight.pop_all(plan):
            for index, request in enumerate(entry.requests):
                if not entry.is_late(index):
                    self._preempt(request)
            self.kv.retire(entry.plan.step, failed=True)
            self._dropped += entry.plan.dropped  # the worker may not have done it
            self._preempted += entry.plan.preempted

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it keeps its tokens and queues again, before all that arrived later."""
        self._leave(request)
        self._preempted.append(request.request_id)
        request.num_computed_tokens = request.num_in_flight_tokens = 0
        request.draft_token_ids = []
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.waiting.push(request, WaitReason.PREEMPTED)

    def _end(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.free(request, self.in_flight.pinning_step(request))
        self._dropped.append(request.request_id)
