"""The rules of the design, checked from outside: the pool by its block events, a step by its output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teachllm.core.block_pool import BlockEvent
from teachllm.core.request import Request, RequestStatus, WaitReason
from teachllm.core.scheduler_output import SchedulerOutput
from tests.core.fake_runner import require

if TYPE_CHECKING:
    from tests.core.world import World


class PoolModel:
    """The block pool as block events tell it."""

    def __init__(self, num_blocks: int) -> None:
        self.users = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.free = dict.fromkeys(range(num_blocks))  # in the order of reuse

    def replay(self, event: BlockEvent) -> None:
        i, kind = event.block_id, event.kind
        if kind == "allocate":
            require(next(iter(self.free)) == i, f"block {i} is taken, and is not the least recently used")
            require(self.hashes[i] is None, f"block {i} is taken with its old content still findable")
        if kind in ("allocate", "hit"):
            self.free.pop(i, None)
            self.users[i] += 1
        if kind == "hit":
            require(self.hashes[i] is not None, f"block {i} is hit and not findable")
        elif kind == "commit":
            require(self.users[i] > 0 and event.parent_hash is not None, f"commit of block {i}, which nobody uses")
            self.hashes[i] = event.block_hash
        elif kind == "evict":
            self.hashes[i] = None
        elif kind == "free":
            self.users[i] -= 1
            if self.users[i] == 0:
                self.free[i] = None


class View:
    """The scheduler just before `schedule`, and what may follow."""

    def __init__(self, world: World) -> None:
        self.world, scheduler = world, world.scheduler
        self.waiting, self.running = list(scheduler.waiting), list(scheduler.running)
        self.in_flight = {request: self._expected(request) for request in self.running}
        self.tokens = {request: list(request.token_ids) for request in [*self.waiting, *self.running]}
        self.computed = {request: request.num_computed_tokens for request in self.running}
        self.num_blocks = {request: len(request.block_ids) for request in self.running}

    def _expected(self, request: Request) -> int:
        """Tokens that plans in flight will append to it at most."""
        return sum(
            1 + len(scheduled.draft_token_ids)
            for flight in self.world.flights
            for scheduled, (named, preemptions) in zip(flight.plan.scheduled, flight.scheduled_requests, strict=True)
            if named is request and preemptions == request.num_preemptions and scheduled.samples
        )

    def _may_run(self, request: Request) -> bool:
        config, ahead = self.world.config, self.in_flight[request]
        if ahead == 0:
            return True
        runs_ahead = config.async_scheduling and not request.waits_for_ids and config.enable_kv_cache
        return runs_ahead and len(request.token_ids) + ahead < request.max_len

    def check(self, plan: SchedulerOutput) -> None:
        world, scheduler, config = self.world, self.world.scheduler, self.world.config
        scheduled_requests = {scheduled.request_id: scheduled for scheduled in plan.scheduled}
        num_known = sum(scheduled.num_tokens - len(scheduled.draft_token_ids) for scheduled in plan.scheduled)
        preempted = [request for request in self.running if request.status is RequestStatus.PREEMPTED]
        world.num_preempted += len(preempted)
        world.unreported += [request.request_id for request in preempted]
        if plan.scheduled:
            require(sorted(plan.preempted) == sorted(world.unreported), f"preempted: {world.unreported}, and not told")
            require(set(plan.preempted) <= set(plan.dropped), "the row of a preempted request is not closed")
            world.unreported = []
        admitted = [request for request in self.waiting if request.status is RequestStatus.RUNNING]

        require(plan.num_tokens <= scheduler.max_num_batched_tokens, "over budget")
        require(len(scheduler.running) <= scheduler.max_num_seqs, "too many run")
        require(
            not (set(scheduled_requests) & {request.request_id for request in preempted}), "preempted, and scheduled"
        )
        for request, tokens in self.tokens.items():
            require(list(request.token_ids) == tokens, f"{request.request_id}: planning has changed its tokens")

        # Who runs: nobody past its prompt is left out; who gives way is the last in the policy's order.
        starved = False
        for request in self.running:
            name, num_uncomputed = (
                request.request_id,
                len(request.token_ids) + self.in_flight[request] - self.computed[request],
            )
            scheduled = scheduled_requests.get(name)
            if scheduled is not None:
                require(self._may_run(request), f"{name} is scheduled before its token is known")
                continue
            if request in preempted or not self._may_run(request):
                continue
            no_room = self.num_blocks[request] * config.block_size - self.computed[request] < num_uncomputed
            if no_room and (scheduler.kv.pinned or not config.enable_kv_cache):
                starved |= num_uncomputed <= scheduler.max_num_batched_tokens - num_known
            else:
                require(num_uncomputed > 1, f"{name} is past its prompt and gets no token")
        kept = [request for request in self.running if request not in preempted]
        for victim in preempted:
            ahead = [other.request_id for other in kept if world.key(other) > world.key(victim)]
            require(not ahead, f"{victim.request_id} is preempted, and {ahead} came after it")
            require(victim.num_computed_tokens == 0 and not victim.block_ids, f"{victim.request_id} keeps blocks")
        require(not (admitted and preempted), "somebody is admitted in a step that preempts")

        # Who joins: the first of the queue, in order.
        require(admitted == self.waiting[: len(admitted)], "admitted out of order")
        require(scheduler.running[len(scheduler.running) - len(admitted) :] == admitted, "running is out of order")
        if config.scheduling_policy == "static" and admitted:
            require(not self.running, "somebody joins a static batch that has begun")
        for request in admitted:
            scheduled = scheduled_requests[request.request_id]
            require(scheduled.new_row is not None, f"{request.request_id} starts without a row")
            shares_blocks = config.enable_prefix_caching or request.group is not None
            if not shares_blocks or request.sampling_params.prompt_logprobs is not None or not config.enable_kv_cache:
                require(scheduled.start == 0, f"{request.request_id} may not read the prefix cache")
            require(scheduled.start < len(request.token_ids), f"{request.request_id} leaves nothing to compute")
            require(scheduled.start % config.block_size == 0, f"{request.request_id} hits half a block")
            require(not starved, f"{request.request_id} is admitted while a running request is short of blocks")

        for scheduled in plan.scheduled:
            known = scheduled.num_tokens - len(scheduled.draft_token_ids)
            if config.enable_chunked_prefill and config.enable_kv_cache and config.long_prefill_token_threshold:
                require(known <= config.long_prefill_token_threshold, f"{scheduled.request_id} gets {known} tokens")
            if not (config.enable_chunked_prefill and config.enable_kv_cache):
                require(scheduled.samples, f"{scheduled.request_id} gets a part of its prompt")
            if scheduled.draft_token_ids:
                require(not starved, f"{scheduled.request_id} gets drafts while a running request is short of blocks")
                request = world.live[scheduled.request_id]
                require(known == 1, f"{scheduled.request_id} gets drafts inside its prompt")
                reach = len(request.token_ids) + self._expected(request) + 1 + len(scheduled.draft_token_ids)
                require(reach <= request.max_len, f"{scheduled.request_id}: drafts beyond its end")
        self._check_head(plan, scheduler.max_num_batched_tokens - num_known, preempted)

    def _check_head(self, plan: SchedulerOutput, budget_left: int, preempted: list[Request]) -> None:
        """The reason of the head is decided in this very step, and its numbers are true."""
        scheduler, config = self.world.scheduler, self.world.config
        head = scheduler.waiting.head
        if head is None:
            return
        assert head.wait is not None
        wait, name = head.wait, head.request_id
        needed, available = wait.needed, wait.available
        match wait.reason:
            case WaitReason.TOKEN_BUDGET:
                require(available == budget_left < needed, f"{name}: {wait}, and {budget_left} are left")
                if not (config.enable_chunked_prefill and config.enable_kv_cache):
                    require(needed <= len(head.token_ids), f"{name}: {wait}, and has {len(head.token_ids)}")
            case WaitReason.SEQUENCE_LIMIT:
                numbers = (len(scheduler.running) + 1, scheduler.max_num_seqs)
                require((needed, available) == numbers and needed > available, f"{name}: {wait}, not {numbers}")
            case WaitReason.NO_FREE_BLOCKS:
                require(needed > available, f"{name}: {wait}, which is enough")
                require(needed <= -(-len(head.token_ids) // config.block_size), f"{name}: {wait}, more than it needs")
            case WaitReason.STATIC_BATCH:
                running = len(scheduler.running)
                require(
                    config.scheduling_policy == "static" and needed == running > 0, f"{name}: {wait}, not {running}"
                )
            case WaitReason.PREEMPTED:
                require(head.status is RequestStatus.PREEMPTED, f"{name} was not preempted")
            case WaitReason.BEHIND_HEAD:
                require(False, f"{name} is the head of the queue and waits behind it")
