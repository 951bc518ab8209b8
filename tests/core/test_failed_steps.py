"""A step that fails takes back what it did, and the next plan tells what the failed one was to tell."""

from __future__ import annotations

import pytest

from tests.core.helpers import add, make_scheduler, schedule, step, update


def test_results_out_of_order_are_refused() -> None:
    scheduler = make_scheduler(async_scheduling=True)
    add(scheduler, "a", 4)
    schedule(scheduler)
    second = schedule(scheduler)
    with pytest.raises(ValueError, match="step 1 is not the oldest plan in flight"):
        update(scheduler, second)


def test_a_failed_step_takes_back_all_that_built_on_it() -> None:
    scheduler = make_scheduler(async_scheduling=True)
    a = add(scheduler, "a", 8, first=100)
    done = schedule(scheduler)
    failing = schedule(scheduler)
    update(scheduler, done, a=[11])
    add(scheduler, "b", 8, first=500)
    schedule(scheduler)
    scheduler.fail(failing)
    assert a.output_token_ids == [11]  # what had come back stays
    assert [request.request_id for request in scheduler.waiting] == ["a", "b"]
    assert scheduler.kv.num_used_blocks == 0
    plan = schedule(scheduler)
    assert [(s.request_id, s.start) for s in plan.scheduled] == [("a", 8), ("b", 0)]  # b's blocks hold nothing
    assert sorted(plan.preempted) == ["a", "b"]


def test_preemptions_that_a_failed_plan_told_are_told_by_the_next_one() -> None:
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False)
    add(scheduler, "a", 8)
    add(scheduler, "b", 7, max_tokens=4)
    step(scheduler)
    failing = schedule(scheduler)
    assert failing.preempted == ["b"]
    scheduler.fail(failing)
    assert sorted(schedule(scheduler).preempted) == ["a", "b"]


def test_rows_that_a_failed_plan_was_to_close_are_closed_by_the_next_one() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", max_tokens=1)
    add(scheduler, "b")
    step(scheduler)
    failing = schedule(scheduler)
    assert failing.dropped == ["a"]
    scheduler.fail(failing)
    assert set(schedule(scheduler).dropped) == {"a", "b"}
