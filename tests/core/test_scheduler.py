"""One rule: computed catches up with known, and nobody past its prompt waits for a prompt."""

from __future__ import annotations

from random import Random

import pytest

from teachllm.core.request import FinishReason, RequestStatus
from teachllm.sampling_params import SamplingParams
from tests.core.helpers import EOS, add, make_scheduler, schedule, scheduled_tokens, step, update, waits
from tests.thorough import times

# -- the budget ------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_and_samples_once() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "a", 20)
    plans = [step(scheduler) for _ in range(4)]
    assert [(s.start, s.num_tokens, s.samples) for plan in plans for s in plan.scheduled] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
        (20, 1, True),
    ]


def test_a_decode_is_never_skipped_for_a_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "a", 2)
    step(scheduler)
    add(scheduler, "long", 30)
    for _ in range(4):
        assert scheduled_tokens(step(scheduler)) == {"a": 1, "long": 7}
    assert scheduled_tokens(step(scheduler)) == {"a": 1, "long": 2}


def test_plans_of_a_pipeline_share_out_the_decodes() -> None:
    scheduler = make_scheduler(pipeline_parallel_size=2)
    for name in "abcde":
        add(scheduler, name)
    update(scheduler, schedule(scheduler))  # all prompts in one plan
    flying = [schedule(scheduler), schedule(scheduler)]
    assert [set(scheduled_tokens(plan)) for plan in flying] == [set("abc"), set("de")]
    for _ in range(4):
        update(scheduler, flying.pop(0))
        flying.append(schedule(scheduler))
    assert [set(scheduled_tokens(plan)) for plan in flying] == [set("abc"), set("de")]


def test_running_prompts_come_after_decodes_whoever_arrived_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6, max_num_seqs=6, long_prefill_token_threshold=4)
    add(scheduler, "long", 12)
    add(scheduler, "short", 2)
    assert scheduled_tokens(step(scheduler)) == {"long": 4, "short": 2}
    assert list(scheduled_tokens(step(scheduler)).items()) == [("short", 1), ("long", 4)]


def test_the_threshold_bounds_one_request_and_leaves_the_budget_to_others() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=12, long_prefill_token_threshold=5)
    add(scheduler, "a", 20)
    add(scheduler, "b", 20)
    add(scheduler, "c", 20)
    assert scheduled_tokens(step(scheduler)) == {"a": 5, "b": 5, "c": 2}


def test_an_unchunked_prompt_waits_until_all_of_it_fits() -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False)
    add(scheduler, "a", 40)
    add(scheduler, "b", 30)
    assert scheduled_tokens(step(scheduler)) == {"a": 40}
    assert waits(scheduler) == {"b": "needs 30 tokens of the step's budget, 24 left"}
    assert scheduled_tokens(step(scheduler)) == {"a": 1, "b": 30}


# -- sharing ---------------------------------------------------------------------------------------------------


def test_identical_prompts_arriving_together_share_blocks_in_the_same_step() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, "a", 10, first=100), add(scheduler, "b", 10, first=100)
    assert scheduled_tokens(step(scheduler)) == {"a": 10, "b": 2}
    assert a.block_ids[:2] == b.block_ids[:2]
    assert a.block_ids[2] != b.block_ids[2]
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 8)


def test_the_last_token_is_always_recomputed() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 8, first=100)
    step(scheduler)
    b = add(scheduler, "b", 8, first=100)
    scheduled = step(scheduler).scheduled[1]
    assert (scheduled.request_id, scheduled.start, scheduled.num_tokens, scheduled.samples) == ("b", 4, 4, True)
    assert b.num_cached_tokens == 4


@pytest.mark.parametrize("seed", range(times(3, 20)))
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_putting_hashing_off_changes_no_plan(seed: int, async_scheduling: bool) -> None:
    def plans(at_once: bool) -> list[list[tuple[str, int, int]]]:
        rng = Random(seed)
        scheduler = make_scheduler(1000, max_num_batched_tokens=rng.choice([16, 40]), async_scheduling=async_scheduling)
        if at_once:
            scheduler.kv.commit_later = scheduler.kv.commit  # type: ignore[method-assign]
        made, in_flight = [], []
        for number in range(40):
            for child in range(rng.randint(0, 3)):
                params = SamplingParams(max_tokens=6, prompt_logprobs=rng.choice([None, None, None, 0]))
                first, length = rng.choice([100, 200]), rng.randint(1, 40)
                name = f"{number}.{child}"
                request = add(scheduler, name, length, first=first, params=params, group=rng.choice([None, "g"]))
                for _ in range(rng.choice([0, 0, 3])):  # leaves the family's common prefix
                    request.token_ids[rng.randrange(length)] = 7
            plan = schedule(scheduler)
            made.append([(scheduled.request_id, scheduled.start, scheduled.num_tokens) for scheduled in plan.scheduled])
            in_flight += [plan] if plan.scheduled else []
            if len(in_flight) > async_scheduling and rng.random() < 0.1:
                scheduler.fail(in_flight[0])
                in_flight.clear()
            elif len(in_flight) > async_scheduling or not plan.scheduled:
                for late in in_flight[:1]:
                    update(scheduler, late)
                del in_flight[:1]
        return made

    put_off = plans(at_once=False)
    assert put_off == plans(at_once=True)
    assert any(start > 0 for plan in put_off for _, start, _ in plan)


def test_another_salt_shares_nothing() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 10, first=100, cache_keys=("one",))
    add(scheduler, "b", 10, first=100, cache_keys=("two",))
    assert scheduled_tokens(step(scheduler)) == {"a": 10, "b": 10}


def test_siblings_share_their_prompt_without_prefix_caching_and_nobody_else_does() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    for child in range(3):
        add(scheduler, f"a{child}", 10, first=100, group="a", child_index=child)
    add(scheduler, "b", 10, first=100)
    assert scheduled_tokens(step(scheduler)) == {"a0": 10, "a1": 2, "a2": 2, "b": 10}


def test_two_groups_do_not_share_without_prefix_caching() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    add(scheduler, "a", 10, first=100, group="a")
    add(scheduler, "b", 10, first=100, group="b")
    assert scheduled_tokens(step(scheduler)) == {"a": 10, "b": 10}


def test_without_a_cache_every_step_starts_from_the_first_token() -> None:
    scheduler = make_scheduler(enable_kv_cache=False)
    add(scheduler, "a", 10, first=100, group="g")
    add(scheduler, "b", 10, first=100, group="g")
    assert scheduled_tokens(step(scheduler)) == {"a": 10, "b": 10}
    assert scheduler.kv.num_used_blocks == 0
    plan = schedule(scheduler)
    assert [(s.start, s.num_tokens, s.first_new_block) for s in plan.scheduled] == [(0, 11, 0), (0, 11, 0)]


# -- giving way ------------------------------------------------------------------------------------------------


def test_the_last_to_arrive_is_preempted_keeps_its_tokens_and_returns_to_the_front() -> None:
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False)
    a, b = add(scheduler, "a", 8), add(scheduler, "b", 7, max_tokens=4)
    step(scheduler)
    add(scheduler, "c", 4)
    plan = schedule(scheduler)  # a needs a third block
    assert plan.preempted == ["b"] == plan.dropped
    assert b.status is RequestStatus.PREEMPTED
    assert (b.output_token_ids, b.block_ids, b.num_computed_tokens) == ([7], [], 0)
    assert waits(scheduler) == {"b": "preempted: its blocks were taken back", "c": "behind the head of the queue"}
    update(scheduler, plan, a=[EOS])
    (again, _) = schedule(scheduler).scheduled
    assert (again.request_id, again.start, again.num_tokens) == ("b", 0, 8)
    assert again.new_row is not None and again.new_row.token_ids == b.token_ids
    assert a.finished


def test_priority_decides_who_gives_way() -> None:
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False, scheduling_policy="priority")
    add(scheduler, "a", 7, priority=1, max_tokens=4)
    add(scheduler, "b", 8, priority=0)
    step(scheduler)
    assert schedule(scheduler).preempted == ["a"]


def test_a_victim_that_had_its_share_gives_the_budget_back() -> None:
    scheduler = make_scheduler(
        num_blocks=5,
        enable_prefix_caching=False,
        max_num_batched_tokens=6,
        max_num_seqs=6,
        long_prefill_token_threshold=4,
    )
    add(scheduler, "long", 16, max_tokens=1)
    add(scheduler, "short", 2)
    for _ in range(3):
        step(scheduler)
    plan = schedule(scheduler)  # short is first and takes the last block, then long needs it
    assert scheduled_tokens(plan) == {"long": 4}
    assert plan.preempted == ["short"]
    assert scheduler._budget == 2


def test_a_preemption_in_an_empty_plan_is_told_by_the_next_one() -> None:
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False, async_scheduling=True)
    add(scheduler, "a", 8)
    add(scheduler, "b", 6, max_tokens=4, waits_for_ids=True)
    first = schedule(scheduler)
    empty = schedule(scheduler)
    assert empty.scheduled == [] and empty.preempted == []
    assert scheduler.requests["b"].status is RequestStatus.PREEMPTED
    update(scheduler, first)
    plan = schedule(scheduler)
    assert plan.preempted == ["b"] == plan.dropped


def test_nobody_joins_while_a_running_request_is_short_of_blocks() -> None:
    scheduler = make_scheduler(num_blocks=5, enable_prefix_caching=False, async_scheduling=True)
    add(scheduler, "a", 8)
    add(scheduler, "b", 8, max_tokens=4)
    first = schedule(scheduler)
    second = schedule(scheduler)  # a takes the fifth block, b preempts itself
    assert scheduled_tokens(second) == {"a": 1}
    assert waits(scheduler) == {"b": "preempted: its blocks were taken back"}
    update(scheduler, first)
    update(scheduler, second)
    assert scheduler.requests["b"].output_token_ids == []  # came too late


# -- static batching -------------------------------------------------------------------------------------------


def test_a_static_batch_drains_before_the_next_one_starts() -> None:
    scheduler = make_scheduler(scheduling_policy="static")
    add(scheduler, "a", 4, max_tokens=1)
    add(scheduler, "b", 4, max_tokens=3)
    step(scheduler)
    add(scheduler, "c", 4)
    assert scheduled_tokens(step(scheduler)) == {"b": 1}
    assert waits(scheduler) == {"c": "the batch of 1 must drain first"}
    assert scheduled_tokens(step(scheduler)) == {"b": 1}
    assert scheduled_tokens(step(scheduler)) == {"c": 4}


# -- why others wait -------------------------------------------------------------------------------------------


def test_a_request_waits_for_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "a", 8)
    add(scheduler, "b", 4)
    add(scheduler, "c", 4)
    schedule(scheduler)
    assert waits(scheduler) == {
        "b": "needs 1 token of the step's budget, 0 left",
        "c": "behind the head of the queue",
    }


def test_a_request_waits_for_a_place() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "a")
    add(scheduler, "b")
    schedule(scheduler)
    assert waits(scheduler) == {"b": "1 of 1 requests run already"}


def test_a_request_waits_for_blocks() -> None:
    scheduler = make_scheduler(num_blocks=5)
    add(scheduler, "a", 12)
    add(scheduler, "b", 12)
    schedule(scheduler)
    assert waits(scheduler) == {"b": "needs 3 blocks, 2 free"}


def test_a_newcomer_with_priority_waits_while_running_requests_are_short_of_blocks() -> None:
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False, scheduling_policy="priority")
    add(scheduler, "a", 8)
    add(scheduler, "b", 7, max_tokens=4)
    step(scheduler)
    add(scheduler, "c", 2, priority=-1)
    schedule(scheduler)
    assert waits(scheduler) == {
        "c": "needs 1 block, 0 free",
        "b": "preempted: its blocks were taken back",
    }


def test_an_overtaken_head_is_behind_the_head_at_once() -> None:
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="priority")
    add(scheduler, "a")
    add(scheduler, "b", priority=1)
    schedule(scheduler)
    add(scheduler, "c")
    assert waits(scheduler) == {"c": "behind the head of the queue", "b": "behind the head of the queue"}


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "message"),
    [
        (0, 8, "the prompt is empty"),
        (64, 8, "the prompt has 64 tokens and max_model_len=64 leaves no room for an output token: shorten it to 63"),
        (10, 11, "prompt and output may reach 21 tokens, 6 blocks of 4, and the KV cache has 5: lower max_tokens"),
        (10, None, "prompt and output may reach 64 tokens, 16 blocks of 4, and the KV cache has 5"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(num_prompt: int, max_tokens: int, message: str) -> None:
    scheduler = make_scheduler(num_blocks=5)
    with pytest.raises(ValueError, match=message):
        add(scheduler, "a", num_prompt, max_tokens=max_tokens)
    assert not scheduler.has_unfinished
    add(scheduler, "a", 10, max_tokens=10)  # exactly all blocks
    assert scheduler.has_unfinished


def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    scheduler = make_scheduler()
    owner = add(scheduler, "a")
    with pytest.raises(ValueError, match="'a' is already in use"):
        add(scheduler, "a")
    assert scheduler.requests["a"] is owner


@pytest.mark.parametrize("running", [False, True])
def test_an_aborted_request_is_gone(running: bool) -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a")
    if running:
        step(scheduler)
    assert scheduler.finish("a", FinishReason.ABORT)
    assert not scheduler.finish("a", FinishReason.ABORT)
    assert request.finish_reason is FinishReason.ABORT
    assert not scheduler.has_unfinished
    assert scheduler.kv.num_used_blocks == 0
    add(scheduler, "b")
    assert schedule(scheduler).dropped == (["a"] if running else [])


def test_a_row_is_closed_in_the_plan_after_the_end() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", max_tokens=1)
    add(scheduler, "b")
    step(scheduler)
    assert step(scheduler).dropped == ["a"]
    assert step(scheduler).dropped == []


# -- running ahead ---------------------------------------------------------------------------------------------


def test_the_next_plan_is_made_before_the_last_tokens_are_known() -> None:
    scheduler = make_scheduler(async_scheduling=True)
    request = add(scheduler, "a", 4, max_tokens=3)
    plans = [schedule(scheduler) for _ in range(4)]
    assert [(s.start, s.num_tokens) for plan in plans for s in plan.scheduled] == [(0, 4), (4, 1), (5, 1)]
    for plan, token_id in zip(plans[:3], (11, 12, 13), strict=True):
        update(scheduler, plan, a=[token_id])
    assert request.output_token_ids == [11, 12, 13]
    assert request.finished


def test_a_request_that_needs_its_ids_waits_for_them() -> None:
    scheduler = make_scheduler(async_scheduling=True)
    add(scheduler, "a", 4, waits_for_ids=True)
    add(scheduler, "b", 4)
    first = schedule(scheduler)
    assert scheduled_tokens(schedule(scheduler)) == {"b": 1}
    update(scheduler, first)
    assert scheduled_tokens(schedule(scheduler)) == {"a": 1, "b": 1}


def test_prompt_chunks_of_one_request_follow_each_other_through_a_pipeline() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "a", 20)
    plans = [schedule(scheduler) for _ in range(4)]
    assert [scheduled_tokens(plan) for plan in plans] == [{"a": 8}, {"a": 8}, {"a": 4}, {}]


def test_tokens_that_come_after_the_end_are_dropped_and_blocks_stay_pinned_until_then() -> None:
    scheduler = make_scheduler(async_scheduling=True)
    request = add(scheduler, "a", 4)
    first, second = schedule(scheduler), schedule(scheduler)
    update(scheduler, first, a=[EOS])
    assert request.output_token_ids == [EOS]
    assert scheduler.kv.num_used_blocks == 2  # the second plan still writes to one of them
    assert update(scheduler, second, a=[9]) == []
    assert request.output_token_ids == [EOS]
    assert scheduler.kv.num_used_blocks == 0


def test_a_preempted_request_that_runs_again_drops_what_its_first_run_samples_late() -> None:
    scheduler = make_scheduler(async_scheduling=True)
    request = add(scheduler, "a", 4)
    first = schedule(scheduler)
    scheduler._preempt(request)
    again = schedule(scheduler)
    assert again.scheduled[0].new_row is not None
    assert update(scheduler, first, a=[9]) == []
    assert request.output_token_ids == []
    update(scheduler, again, a=[9])
    assert request.output_token_ids == [9]


def test_a_prompt_whose_logprobs_are_asked_for_is_computed_whole() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 8, first=100)
    add(scheduler, "b", 8, first=100, params=SamplingParams(prompt_logprobs=1))
    assert scheduled_tokens(step(scheduler)) == {"a": 8, "b": 8}
