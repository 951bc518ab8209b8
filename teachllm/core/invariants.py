"""Check what must hold after every step. A scheduler that breaks one of these gives wrong answers sooner or later.

Tests call `check` after every step; `--check-invariants` makes the engine do it too.
"""

from __future__ import annotations

from collections import Counter

from teachllm.core.request import RequestStatus
from teachllm.core.scheduler import Scheduler
from teachllm.core.scheduler_output import SchedulerOutput


class InvariantViolation(AssertionError):
    """The scheduler's books do not add up."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantViolation(message)


def check_plan(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """Check a plan's limits: the budget, the sequences, each request at most once, blocks for every token.

    A running request that got nothing has a reason.
    """
    budget = scheduler.max_num_batched_tokens
    limit = scheduler.max_num_seqs
    _require(plan.num_tokens <= budget, f"step {plan.step}: {plan.num_tokens} tokens, the budget is {budget}")
    _require(len(plan.scheduled) <= limit, f"step {plan.step}: {len(plan.scheduled)} sequences, the limit is {limit}")
    names = [scheduled.request_id for scheduled in plan.scheduled]
    _require(len(names) == len(set(names)), f"step {plan.step} schedules a request twice")
    for scheduled in plan.scheduled:
        request = scheduler.requests[scheduled.request_id]
        room = len(request.block_ids) * scheduler.kv.block_size
        has_known = scheduled.num_tokens > len(scheduled.draft_token_ids)
        _require(has_known, f"{scheduled.request_id}: scheduled without a known token")
        _require(scheduled.start + scheduled.num_tokens <= room, f"{scheduled.request_id}: tokens without blocks")
    running = {request.request_id for request in scheduler.running}
    held = plan.held.keys() & running  # others were preempted after that
    _require(running == set(names) | held, f"step {plan.step}: running requests without a share and without a reason")
    _require(not held & set(names), f"step {plan.step}: a reason why a request got nothing that did")


def check(scheduler: Scheduler) -> None:
    """Check the scheduler's books after a step.

    Raises:
        InvariantViolation: one is broken; the message has the numbers.
    """
    _check_blocks(scheduler)
    _check_requests(scheduler)


def _check_blocks(scheduler: Scheduler) -> None:
    kv = scheduler.kv
    pool = kv.pool
    free_list = list(pool.free_blocks())
    _require(len(free_list) == len(set(free_list)) == pool.num_free_blocks, "the free list lost or repeats a block")
    used = sum(block.ref_count > 0 for block in pool.blocks)
    _require(used + len(free_list) == len(pool), f"{used} used + {len(free_list)} free is not {len(pool)}")
    _require(all(block.ref_count == 0 for block in free_list), "a used block is in the free list")
    cached = sum(block.block_hash is not None for block in free_list)
    _require(cached == pool.num_cached_blocks, f"{cached} free blocks are cached, not {pool.num_cached_blocks}")
    owners = Counter(block_id for request in scheduler.requests.values() for block_id in request.block_ids)
    owners.update(block_id for entries in kv.pinned.values() for _, ids in entries for block_id in ids)
    for block in pool.blocks:  # thousands, after every step: a message is formatted only when it is raised
        count = owners.get(block.block_id, 0)
        if block.ref_count != count:
            raise InvariantViolation(f"{block} stands in {count} tables")
        if block.block_hash and block not in kv.cache.blocks_with(block.block_hash):
            raise InvariantViolation(f"{block} has a hash and cannot be found by it")
    _require(len(kv.cache) == sum(b.block_hash is not None for b in pool.blocks), "the cache finds a block twice")

    writers: Counter[int] = Counter()
    for request in scheduler.requests.values():
        committed = request.num_committed_blocks
        writers.update(request.block_ids[committed:])
        shared = [i for i in request.block_ids[committed:] if pool.blocks[i].ref_count > 1]
        _require(not shared, f"{request.request_id} can write to blocks {shared} that others read")
    _require(all(count == 1 for count in writers.values()), "two requests can write to one block")


def _check_requests(scheduler: Scheduler) -> None:
    waiting = list(scheduler.waiting)
    running = scheduler.running
    limit = scheduler.max_num_seqs
    _require(len(running) <= limit, f"{len(running)} requests run, the limit is {limit}")
    listed = Counter(request.request_id for request in waiting + running)
    _require(listed == Counter(list(scheduler.requests)), "a request is in no queue, or in two")
    for request in waiting:
        queued = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        _require(queued and request.wait is not None, f"{request.request_id} waits without a reason")
        _require(not request.block_ids and not request.num_in_flight_tokens, f"{request.request_id} waits with blocks")
    for request in running:
        is_running = request.status is RequestStatus.RUNNING and request.wait is None
        _require(is_running, f"{request.request_id} runs and is {request.status.value}")
        _require(request.num_uncomputed_tokens >= 0, f"{request.request_id} computed more tokens than it may ever know")
