"""Every kind of broken book is found: the fault is planted, and the check names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from teachllm.core import invariants
from teachllm.core.invariants import InvariantViolation
from teachllm.core.request import RequestStatus, Wait, WaitReason
from teachllm.core.scheduler import Scheduler
from tests.core.helpers import add, make_scheduler, schedule, step


def busy_scheduler() -> Scheduler:
    """Two that run and share a block, one that waits, cached blocks in the free list."""
    scheduler = make_scheduler(num_blocks=16, max_num_seqs=2)
    add(scheduler, "done", 9, max_tokens=1)
    step(scheduler)
    add(scheduler, "a", 9, first=100)
    add(scheduler, "b", 9, first=100)
    add(scheduler, "c", 9)
    step(scheduler)
    invariants.check(scheduler)
    return scheduler


def _lose_free_block(s: Scheduler) -> None:
    s.kv.pool._unlink(next(s.kv.pool.free_blocks()))
    s.kv.pool.num_free_blocks += 1


def _leak_block(s: Scheduler) -> None:
    s.kv.pool.take(1)


def _count_a_user_too_many(s: Scheduler) -> None:
    s.kv.pool.blocks[s.requests["a"].block_ids[-1]].ref_count += 1


def _list_a_used_block(s: Scheduler) -> None:
    s.kv.pool._append(s.kv.pool.blocks[s.requests["a"].block_ids[-1]])


def _miscount_cached(s: Scheduler) -> None:
    s.kv.pool.num_cached_blocks += 1


def _hash_unfindable(s: Scheduler) -> None:
    s.kv.pool.blocks[s.requests["a"].block_ids[-1]].block_hash = b"nobody knows"


def _find_a_block_without_hash(s: Scheduler) -> None:
    s.kv.pool.blocks[s.requests["a"].block_ids[0]].block_hash = None


def _let_two_write(s: Scheduler) -> None:
    a, b = s.requests["a"], s.requests["b"]
    s.kv.pool.release([s.kv.pool.blocks[b.block_ids[-1]]])
    b.block_ids[-1] = a.block_ids[-1]
    s.kv.pool.share(s.kv.pool.blocks[a.block_ids[-1]])


def _let_one_write_what_others_read(s: Scheduler) -> None:
    s.requests["a"].num_committed_blocks = 1


def _run_too_many(s: Scheduler) -> None:
    request = s.requests["c"]
    s.waiting.remove(request)
    s.running.append(request)
    request.status = RequestStatus.RUNNING


def _lose_a_request(s: Scheduler) -> None:
    s.waiting.remove(s.requests["c"])


def _queue_twice(s: Scheduler) -> None:
    s.waiting.push(s.requests["a"])


def _wait_without_reason(s: Scheduler) -> None:
    s.requests["c"].wait = None


def _wait_and_run(s: Scheduler) -> None:
    s.requests["c"].status = RequestStatus.RUNNING


def _run_with_a_wait_reason(s: Scheduler) -> None:
    s.requests["a"].wait = Wait(WaitReason.TOKEN_BUDGET)


def _wait_with_tokens_in_flight(s: Scheduler) -> None:
    s.requests["c"].num_in_flight_tokens = 1


def _compute_too_much(s: Scheduler) -> None:
    s.requests["a"].num_computed_tokens += 5


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (_lose_free_block, "free list lost or repeats"),
        (_leak_block, "stands in 0 tables"),
        (_count_a_user_too_many, "stands in 1 tables"),
        (_list_a_used_block, r"used \+ \d+ free is not|used block is in the free list"),
        (_miscount_cached, "free blocks are cached"),
        (_hash_unfindable, "cannot be found by it"),
        (_find_a_block_without_hash, "finds a block twice"),
        (_let_two_write, "others read|two requests can write"),
        (_let_one_write_what_others_read, "a can write to blocks .* that others read"),
        (_run_too_many, "3 requests run, the limit is 2"),
        (_lose_a_request, "in no queue, or in two"),
        (_queue_twice, "in no queue, or in two"),
        (_wait_without_reason, "c waits without a reason"),
        (_wait_and_run, "c waits without a reason"),
        (_run_with_a_wait_reason, "a runs and is"),
        (_wait_with_tokens_in_flight, "c waits with blocks"),
        (_compute_too_much, "a computed more tokens"),
    ],
)
def test_a_planted_fault_is_found(plant: Callable[[Scheduler], None], message: str) -> None:
    scheduler = busy_scheduler()
    plant(scheduler)
    with pytest.raises(InvariantViolation, match=message):
        invariants.check(scheduler)


def test_a_plan_over_its_limits_is_found() -> None:
    scheduler = busy_scheduler()
    plan = schedule(scheduler)
    scheduler.max_num_batched_tokens = 1
    with pytest.raises(InvariantViolation, match="2 tokens, the budget is 1"):
        invariants.check_plan(scheduler, plan)
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 64, 1
    with pytest.raises(InvariantViolation, match="2 sequences, the limit is 1"):
        invariants.check_plan(scheduler, plan)


def test_a_share_that_makes_no_sense_is_found() -> None:
    scheduler = busy_scheduler()
    plan = schedule(scheduler)
    scheduled = plan.scheduled[0]
    scheduled.num_tokens = 40
    with pytest.raises(InvariantViolation, match="a: tokens without blocks"):
        invariants.check_plan(scheduler, plan)
    scheduled.num_tokens, scheduled.draft_token_ids = 1, [5]
    with pytest.raises(InvariantViolation, match="a: scheduled without a known token"):
        invariants.check_plan(scheduler, plan)
    plan.scheduled[0] = plan.scheduled[1]
    with pytest.raises(InvariantViolation, match="schedules a request twice"):
        invariants.check_plan(scheduler, plan)
