"""Plans come back in order, and what was assumed is compared with what happened."""

from __future__ import annotations

import pytest

from teachllm.core.in_flight import PlanInFlight, PlansInFlight, settle
from teachllm.core.request import Request, RequestStatus
from teachllm.core.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput, TokenLogprobs
from tests.core.helpers import EOS, make_request


def make_running(name: str = "a", num_prompt: int = 4) -> Request:
    request = make_request(name, num_prompt, max_tokens=None)
    request.max_len, request.status = 64, RequestStatus.RUNNING
    return request


def launch(step: int, request: Request, drafts: list[int], samples: bool = True) -> SchedulerOutput:
    """A plan that computes all its known tokens and these drafts, with the books as the scheduler keeps them."""
    start, num_tokens = request.num_computed_tokens, request.num_uncomputed_tokens + len(drafts)
    request.num_computed_tokens += num_tokens
    request.num_in_flight_tokens += samples + len(drafts)
    request.last_step = step
    return SchedulerOutput(step, [ScheduledRequest(request.request_id, start, num_tokens, drafts, samples, 0, [])])


def entry(plan: SchedulerOutput, *requests: Request) -> PlanInFlight:
    return PlanInFlight(plan, list(requests), [request.num_preemptions for request in requests])


def entry_of_logprobs(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1, [], [])


@pytest.mark.parametrize(
    ("sampled", "computed"), [([1, 2, 3], 6), ([1, 2], 5), ([9], 4)], ids=["all hold", "one falls", "both fall"]
)
def test_computed_goes_back_by_the_rejected_drafts(sampled: list[int], computed: int) -> None:
    request = make_running()
    (changed,) = settle(entry(launch(0, request, [1, 2]), request), ModelRunnerOutput([sampled]))
    assert changed.num_accepted == len(sampled) - 1
    assert request.output_token_ids == changed.new_token_ids == sampled
    assert (request.num_computed_tokens, request.num_in_flight_tokens) == (computed, 0)


def test_tokens_after_the_stop_are_dropped_with_their_logprobs() -> None:
    request = make_running()
    plan = launch(0, request, [1, EOS, 3])
    result = ModelRunnerOutput([[1, EOS, 3, 4]], logprobs=[[entry_of_logprobs(i) for i in (1, EOS, 3, 4)]])
    (changed,) = settle(entry(plan, request), result)
    assert (changed.new_token_ids, changed.num_accepted) == ([1, EOS], 2)
    assert changed.logprobs is not None and [one.token_id for one in changed.logprobs] == [1, EOS]


def test_a_chunk_that_samples_nothing_changes_no_token_and_hands_on_its_prompt_logprobs() -> None:
    request = make_running()
    plan = launch(0, request, [], samples=False)
    request.draft_token_ids = [5]
    result = ModelRunnerOutput([[]], prompt_logprobs=[[entry_of_logprobs(101)]], draft_token_ids=[[]])
    (changed,) = settle(entry(plan, request), result)
    assert (changed.new_token_ids, changed.num_accepted, changed.start, changed.request.finished) == ([], 0, 0, False)
    assert changed.prompt_logprobs == [entry_of_logprobs(101)]
    assert list(request.token_ids) == request.prompt_token_ids


def test_proposals_become_the_next_drafts() -> None:
    request = make_running()
    settle(entry(launch(0, request, []), request), ModelRunnerOutput([[1]], draft_token_ids=[[8, 9]]))
    assert request.draft_token_ids == [8, 9]


def test_a_request_that_ended_or_was_preempted_takes_no_late_tokens() -> None:
    ended, preempted, fine = make_running("a"), make_running("b"), make_running("c")
    plan = SchedulerOutput(0, [launch(0, request, []).scheduled[0] for request in (ended, preempted, fine)])
    flight = entry(plan, ended, preempted, fine)
    ended.status = RequestStatus.FINISHED
    preempted.num_preemptions += 1
    updates = settle(flight, ModelRunnerOutput([[1], [2], [3]]))
    assert [changed.request for changed in updates] == [fine]
    assert ended.output_token_ids == preempted.output_token_ids == []


@pytest.mark.parametrize("sampled", [[], [1, 2]])
def test_a_worker_that_returns_too_few_or_too_many_tokens_is_noticed(sampled: list[int]) -> None:
    request = make_running()
    with pytest.raises(ValueError, match=f"a: {len(sampled)} tokens came back for 0 drafts"):
        settle(entry(launch(0, request, []), request), ModelRunnerOutput([sampled]))


def test_plans_leave_in_the_order_they_came() -> None:
    plans, request = PlansInFlight(), make_running()
    first, second, third = (SchedulerOutput(step) for step in range(3))
    for plan in (first, second, third):
        plans.push(plan, [request])
    with pytest.raises(ValueError, match="step 1 is not the oldest"):
        plans.pop(second)
    assert plans.pop(first).plan is first
    assert [flight.plan for flight in plans.pop_all(second)] == [second, third]
    assert len(plans) == 0
    with pytest.raises(ValueError):
        plans.pop(third)


def test_a_request_is_pinned_by_the_last_plan_in_flight_that_names_it() -> None:
    plans, request, other = PlansInFlight(), make_running("a"), make_running("b")
    assert plans.pinning_step(request) is None
    launched = [launch(step, request, []) for step in (3, 4)]
    for plan in launched:
        plans.push(plan, [request])
    plans.push(SchedulerOutput(5), [])
    assert plans.pinning_step(request) == 4
    assert plans.pinning_step(other) is None
    plans.pop(launched[0])
    plans.pop(launched[1])
    assert plans.pinning_step(request) is None
