"""Drafts take what is left and no more: budget, blocks, and the tokens that a request may still say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from teachllm.config import EngineConfig
from teachllm.core import invariants
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.request import FinishReason, Request
from teachllm.core.scheduler import Scheduler
from teachllm.core.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from tests.core.helpers import EOS, add, schedule, scheduled_tokens


@dataclass
class Says:
    """A `DraftLength` that says what it is told to, and keeps what it hears."""

    num_drafts: int
    seen: list[tuple[str, int, int]] = field(default_factory=list)

    def choose(self, requests: Sequence[Request], num_tokens: int) -> list[tuple[int, str]]:
        return [(self.num_drafts, "so it was told")] * len(requests)

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        self.seen.append((request.request_id, num_drafted, num_accepted))


def make(num_drafts: int, num_blocks: int = 64, **settings: object) -> tuple[Scheduler, Says]:
    """Blocks of 4, sequences of up to 64 tokens, a budget of 64."""
    defaults: dict[str, object] = {"block_size": 4, "max_model_len": 64, "max_num_batched_tokens": 64}
    config = EngineConfig(**(defaults | {"max_num_seqs": 8} | settings))  # type: ignore[arg-type]
    says = Says(num_drafts)
    return Scheduler(config.resolve(64), num_blocks, draft_length=says), says


def update(
    scheduler: Scheduler, plan: SchedulerOutput, *sampled: list[int], drafts: list[list[int]] | None = None
) -> list[RequestUpdate]:
    """A plan's result: in its order the tokens, and what a worker with a drafter proposes."""
    updates = scheduler.update(plan, ModelRunnerOutput(list(sampled), draft_token_ids=drafts))
    invariants.check(scheduler)
    return updates


def only(plan: SchedulerOutput) -> ScheduledRequest:
    (scheduled,) = plan.scheduled
    return scheduled


# -- asking ----------------------------------------------------------------------------------------------------


def test_what_was_asked_for_and_proposed_is_verified_by_the_next_step() -> None:
    scheduler, says = make(3)
    request = add(scheduler, "a")
    plan = schedule(scheduler)
    assert (only(plan).num_next_drafts, only(plan).why, only(plan).draft_token_ids) == (3, "so it was told", [])
    update(scheduler, plan, [7], drafts=[[11, 12, 13]])
    plan = schedule(scheduler)
    assert (only(plan).draft_token_ids, only(plan).start, only(plan).num_tokens) == ([11, 12, 13], 4, 4)
    update(scheduler, plan, [11, 12, 8], drafts=[[21]])
    assert request.output_token_ids == [7, 11, 12, 8]
    assert says.seen == [("a", 3, 2)]  # the first step verified nothing
    assert only(schedule(scheduler)).draft_token_ids == [21]


def test_a_drafter_may_propose_less_than_it_was_asked_for_or_nothing() -> None:
    scheduler, says = make(3)
    add(scheduler, "a")
    update(scheduler, schedule(scheduler), [7], drafts=[[]])
    plan = schedule(scheduler)
    assert (only(plan).draft_token_ids, only(plan).num_tokens, only(plan).num_next_drafts) == ([], 1, 3)
    update(scheduler, plan, [8], drafts=[[5, 6]])
    assert says.seen == []
    assert only(schedule(scheduler)).draft_token_ids == [5, 6]


@pytest.mark.parametrize(("max_tokens", "asked"), [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3), (6, 4), (7, 4)])
def test_nothing_is_asked_for_that_could_only_lie_beyond_the_last_wanted_token(max_tokens: int, asked: int) -> None:
    scheduler, _ = make(4)
    add(scheduler, "a", max_tokens=max_tokens)
    scheduled = only(schedule(scheduler))
    assert scheduled.num_next_drafts == asked
    assert scheduled.why == ("so it was told" if asked == 4 else "its end is near")


def test_the_context_is_an_end_as_well() -> None:
    scheduler, _ = make(4)
    request = add(scheduler, "a", 61, max_tokens=None)
    plan = schedule(scheduler)
    assert only(plan).num_next_drafts == 1
    update(scheduler, plan, [7], drafts=[[8]])
    plan = schedule(scheduler)
    assert (only(plan).draft_token_ids, only(plan).num_next_drafts) == ([8], 0)
    update(scheduler, plan, [8, 9])
    assert (len(request.token_ids), request.finish_reason) == (64, FinishReason.LENGTH)


def test_a_part_of_a_prompt_only_says_whether_its_drafter_is_to_follow() -> None:
    scheduler, says = make(2, max_num_batched_tokens=8)
    request = add(scheduler, "a", 20)
    plan = schedule(scheduler)
    assert (only(plan).samples, only(plan).num_next_drafts, request.draft_token_ids) == (False, 2, [])
    num_blocks = scheduler.kv.num_used_blocks
    says.num_drafts = 0
    update(scheduler, plan, [], drafts=[[]])
    plan = schedule(scheduler)
    assert (only(plan).samples, only(plan).num_next_drafts) == (False, 0)
    assert (num_blocks, scheduler.kv.num_used_blocks) == (2, 4)  # none is kept for drafts


@pytest.mark.parametrize(("num_drafts", "num_blocks"), [(0, 1), (1, 2), (4, 2), (5, 3)])
def test_blocks_are_kept_for_all_drafts_but_the_last_whose_k_and_v_nobody_writes(
    num_drafts: int, num_blocks: int
) -> None:
    scheduler, _ = make(num_drafts)
    add(scheduler, "a", 4, max_tokens=40)  # which fill the first block; the token sampled now begins the second
    scheduled = only(schedule(scheduler))
    assert (scheduled.num_next_drafts, len(scheduled.new_block_ids)) == (num_drafts, num_blocks)


def test_fewer_are_asked_for_where_free_blocks_end_and_nobody_is_preempted_for_them() -> None:
    scheduler, _ = make(8, num_blocks=5)
    add(scheduler, "a", 7, max_tokens=13)
    add(scheduler, "b", 7, max_tokens=13)
    plan = schedule(scheduler)
    # Both hold two blocks with one slot left. The fifth goes to the first: four more, and a draft without K and V.
    assert [scheduled.num_next_drafts for scheduled in plan.scheduled] == [5, 1]
    assert [scheduled.why for scheduled in plan.scheduled] == ["no more free blocks"] * 2
    update(scheduler, plan, [7], [7], drafts=[[1] * 5, [1]])
    plan = schedule(scheduler)
    assert scheduled_tokens(plan) == {"a": 5, "b": 1}  # a draft that is verified has K and V, too
    assert scheduler.num_preemptions == 0


def test_nothing_is_drafted_while_a_running_request_is_short_of_blocks() -> None:
    scheduler, says = make(0, num_blocks=4)
    add(scheduler, "a", 7, max_tokens=9)
    add(scheduler, "b", 7, max_tokens=9)
    update(scheduler, schedule(scheduler), [7], [7])
    says.num_drafts = 2
    plan = schedule(scheduler)  # both fill their blocks
    assert scheduled_tokens(plan) == {"a": 1, "b": 1}
    update(scheduler, plan, [7], [7], drafts=[[1], [1]])
    plan = schedule(scheduler)
    assert plan.preempted == ["b"]
    assert (only(plan).request_id, only(plan).draft_token_ids, only(plan).num_next_drafts) == ("a", [], 0)
    assert only(plan).why == "a running request is short of blocks"


# -- verifying -------------------------------------------------------------------------------------------------


def test_drafts_get_what_prompts_have_left_of_the_budget() -> None:
    scheduler, _ = make(4, max_num_batched_tokens=12)
    add(scheduler, "a")
    add(scheduler, "b")
    update(scheduler, schedule(scheduler), [7], [7], drafts=[[1, 2, 3, 4], [1, 2, 3, 4]])
    add(scheduler, "c", 5)
    plan = schedule(scheduler)
    assert scheduled_tokens(plan) == {"a": 5, "b": 2, "c": 5}
    assert [scheduled.draft_token_ids for scheduled in plan.scheduled] == [[1, 2, 3, 4], [1], []]
    assert [scheduled.num_next_drafts for scheduled in plan.scheduled] == [
        1,
        4,
        4,
    ]  # "a" may have said 6 of its 8 by then


def test_drafts_that_found_no_budget_are_not_verified_later() -> None:
    scheduler, says = make(3, max_num_batched_tokens=8)
    add(scheduler, "a")
    update(scheduler, schedule(scheduler), [7], drafts=[[1, 2, 3]])
    add(scheduler, "b", 7)
    plan = schedule(scheduler)
    assert scheduled_tokens(plan) == {"a": 1, "b": 7}
    says.num_drafts = 0
    update(scheduler, plan, [8], [7], drafts=[[], []])
    assert [scheduled.draft_token_ids for scheduled in schedule(scheduler).scheduled] == [[], []]


def test_a_stop_token_among_accepted_drafts_ends_the_request_and_gives_every_block_back() -> None:
    scheduler, says = make(4)
    request = add(scheduler, "a", max_tokens=40)
    update(scheduler, schedule(scheduler), [7], drafts=[[1, EOS, 3, 4]])
    (changed,) = update(scheduler, schedule(scheduler), [1, EOS, 3, 4, 5], drafts=[[1, 2]])
    assert changed.new_token_ids == [1, EOS]
    assert (request.finish_reason, request.output_token_ids) == (FinishReason.STOP, [7, 1, EOS])
    assert scheduler.kv.num_used_blocks == 0
    assert says.seen == []  # how many of them held is not known: the end cut them off


def test_drafts_that_the_drafter_did_not_stand_behind_do_not_count_as_drafted() -> None:
    scheduler, _ = make(3)
    add(scheduler, "a")
    add(scheduler, "b")
    update(scheduler, schedule(scheduler), [7], [7], drafts=[[-1] * 3, [-1] * 3])
    plan = schedule(scheduler)
    result = ModelRunnerOutput([[1, 2], [8]], num_drafted=[1, 0], draft_token_ids=[[-1] * 3, [-1] * 3])
    assert [(each.num_drafted, each.num_accepted) for each in scheduler.update(plan, result)] == [(1, 1), (0, 0)]


# -- running ahead ---------------------------------------------------------------------------------------------


def test_running_ahead_the_next_plan_verifies_what_only_the_worker_knows() -> None:
    scheduler, says = make(2, async_scheduling=True)
    request = add(scheduler, "a", max_tokens=20)
    first = schedule(scheduler)
    says.num_drafts = 3
    second = schedule(scheduler)
    assert (only(second).draft_token_ids, only(second).start, only(second).num_next_drafts) == ([-1, -1], 4, 3)
    update(scheduler, first, [7], drafts=[[-1, -1]])
    third = schedule(scheduler)
    assert only(third).draft_token_ids == [-1, -1, -1]  # asked for by the second: the first plan's result is older
    assert only(third).start == 7
    update(scheduler, second, [8], drafts=[[-1] * 3])  # both fell
    assert only(schedule(scheduler)).start == 9  # as if the third plan's drafts held: it began two tokens earlier
    assert request.num_computed_tokens == 5 + 4 + 4


def test_a_result_that_comes_after_the_next_plan_does_not_change_what_that_one_asked_for() -> None:
    scheduler, says = make(2, async_scheduling=True)
    request = add(scheduler, "a", max_tokens=20)
    first = schedule(scheduler)
    says.num_drafts = 0
    second = schedule(scheduler)
    update(scheduler, first, [7], drafts=[[-1, -1]])
    assert request.draft_token_ids == []
    third = schedule(scheduler)
    assert (only(second).draft_token_ids, only(third).draft_token_ids) == ([-1, -1], [])


def test_a_request_that_waits_for_its_ids_verifies_what_is_known_by_then() -> None:
    scheduler, _ = make(2, async_scheduling=True)
    request = add(scheduler, "a", waits_for_ids=True)
    first = schedule(scheduler)
    assert schedule(scheduler).scheduled == []
    update(scheduler, first, [7])
    assert request.draft_token_ids == [-1, -1]  # so many are to be found
    request.draft_token_ids = [5, 6]
    assert only(schedule(scheduler)).draft_token_ids == [5, 6]


def test_running_ahead_nothing_is_planned_beyond_the_longest_outcome() -> None:
    scheduler, _ = make(4, async_scheduling=True)
    request = add(scheduler, "a", max_tokens=4)
    first, second = schedule(scheduler), schedule(scheduler)
    assert (only(first).num_next_drafts, only(second).num_tokens, only(second).num_next_drafts) == (2, 3, 0)
    assert schedule(scheduler).scheduled == []  # it may have ended by then
    update(scheduler, first, [7], drafts=[[-1, -1]])
    update(scheduler, second, [8], drafts=[[]])  # but it has not
    third = schedule(scheduler)
    assert (only(third).num_tokens, only(third).num_next_drafts) == (1, 0)
    fourth = schedule(scheduler)
    update(scheduler, third, [9])
    update(scheduler, fourth, [10])
    assert (request.output_token_ids, request.finish_reason) == ([7, 8, 9, 10], FinishReason.LENGTH)


def test_a_preempted_or_failed_request_starts_over_without_drafts() -> None:
    scheduler, _ = make(2)
    request = add(scheduler, "a")
    update(scheduler, schedule(scheduler), [7], drafts=[[1, 2]])
    failed = schedule(scheduler)
    assert only(failed).draft_token_ids == [1, 2]
    scheduler.fail(failed)
    invariants.check(scheduler)
    assert (request.draft_token_ids, request.num_in_flight_tokens, request.output_token_ids) == ([], 0, [7])
    plan = schedule(scheduler)
    assert (only(plan).new_row is not None, only(plan).draft_token_ids, only(plan).num_next_drafts) == (True, [], 2)
