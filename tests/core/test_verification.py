"""Drafts that a request has are verified as far as budget, blocks and its end allow, and only those that hold stay."""

from __future__ import annotations

from array import array

from teachllm.core.request import FinishReason
from tests.core.helpers import EOS, add, make_request, make_scheduler, schedule, step, update


def test_drafts_share_what_is_left_after_prompts() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    a, b = add(scheduler, "a", 2), add(scheduler, "b", 2)
    step(scheduler)
    a.draft_token_ids, b.draft_token_ids = [1, 2, 3], [4, 5, 6]
    add(scheduler, "c", 2)
    plan = schedule(scheduler)
    assert {s.request_id: s.draft_token_ids for s in plan.scheduled} == {"a": [1, 2, 3], "b": [4], "c": []}
    assert plan.num_tokens == 8


def test_no_draft_lies_beyond_the_last_wanted_token() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 4, max_tokens=3)
    step(scheduler)
    request.draft_token_ids = [1, 2, 3, 4]
    assert schedule(scheduler).scheduled[0].draft_token_ids == [1]


def test_drafts_take_free_blocks_and_nobody_elses() -> None:
    scheduler = make_scheduler(num_blocks=4)
    a, b = add(scheduler, "a", 3), add(scheduler, "b", 3)
    step(scheduler)
    a.draft_token_ids, b.draft_token_ids = [1, 2, 3, 4, 5, 6], [1, 2]
    plan = schedule(scheduler)
    assert {s.request_id: len(s.draft_token_ids) for s in plan.scheduled} == {"a": 6, "b": 0}
    assert plan.preempted == []


def test_accepted_drafts_are_appended_and_rejected_ones_rolled_back() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 4)
    step(scheduler)
    request.draft_token_ids = [11, 12, 13]
    plan = schedule(scheduler)
    assert (request.num_computed_tokens, request.num_in_flight_tokens) == (8, 4)
    (changed,) = update(scheduler, plan, a=[11, 9])
    assert (changed.new_token_ids, changed.num_accepted) == ([11, 9], 1)
    assert request.output_token_ids == [7, 11, 9]
    assert (request.num_computed_tokens, request.num_in_flight_tokens, request.num_uncomputed_tokens) == (6, 0, 1)
    assert request.num_committed_blocks == 1  # tokens 4 to 7 are not all known
    scheduled = schedule(scheduler).scheduled[0]
    assert (scheduled.start, scheduled.num_tokens, scheduled.new_block_ids) == (6, 1, [])


def test_accepted_drafts_beyond_the_end_are_dropped() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 4)
    step(scheduler)
    request.draft_token_ids = [11, EOS, 13]
    (changed,) = update(scheduler, schedule(scheduler), a=[11, EOS, 13, 14])
    assert (changed.new_token_ids, changed.num_accepted, changed.request.finished) == ([11, EOS], 2, True)
    assert request.finish_reason is FinishReason.STOP


def test_blocks_filled_by_the_last_step_are_findable_after_the_end() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 4, first=100)
    step(scheduler)
    request.draft_token_ids = [11, 12, 13]
    step(scheduler, a=[11, 12, 13, EOS])
    follow_up = make_request("b", 4, first=100)
    follow_up.token_ids = follow_up.prompt_token_ids = array("q", [100, 101, 102, 103, 7, 11, 12, 13, 50])
    scheduler.add(follow_up)
    step(scheduler)
    assert follow_up.num_cached_tokens == 8


def test_drafts_rejected_while_plans_are_in_flight_shift_those_plans() -> None:
    scheduler = make_scheduler(async_scheduling=True)
    request = add(scheduler, "a", 4, max_tokens=20)
    step(scheduler)
    request.draft_token_ids = [-1, -1, -1]
    first = schedule(scheduler)
    second = schedule(scheduler)
    assert (first.scheduled[0].start, first.scheduled[0].num_tokens) == (4, 4)
    assert (second.scheduled[0].start, second.scheduled[0].num_tokens) == (8, 1)  # if all drafts hold
    update(scheduler, first, a=[11, 9])
    assert request.num_computed_tokens == 7  # the second plan really starts at 6
    update(scheduler, second, a=[12])
    assert request.output_token_ids == [7, 11, 9, 12]
    assert schedule(scheduler).scheduled[0].start == 7
