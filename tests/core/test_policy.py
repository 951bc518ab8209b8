"""A policy is an order; the queue keeps it, and keeps the reasons true."""

from __future__ import annotations

import pytest

from teachllm.core.policy import POLICIES, WaitingQueue
from teachllm.core.request import Request, Wait, WaitReason
from teachllm.sampling_params import SamplingParams
from teachllm_lessons.helpers.lesson_03 import contract_order


def make_request(index: int, priority: int = 0) -> Request:
    return Request(f"r{index}", [1], SamplingParams(), arrival_index=index, priority=priority)


def names(queue: WaitingQueue) -> list[str]:
    return [request.request_id for request in queue]


def test_first_come_is_first_served_whatever_the_priority() -> None:
    queue = WaitingQueue(POLICIES["fcfs"]())
    for request in (make_request(0, 5), make_request(1, 1), make_request(2)):
        queue.push(request)
    assert names(queue) == ["r0", "r1", "r2"]


def test_the_lower_priority_goes_first_and_ties_go_by_arrival() -> None:
    queue = WaitingQueue(POLICIES["priority"]())
    for request in (make_request(0, 5), make_request(1, -1), make_request(2, 5), make_request(3, -1)):
        queue.push(request)
    assert names(queue) == ["r1", "r3", "r0", "r2"]


@pytest.mark.parametrize(("policy", "joins"), [("fcfs", True), ("priority", True), ("static", False)])
def test_only_static_batching_keeps_the_door_shut_while_somebody_runs(policy: str, joins: bool) -> None:
    assert POLICIES[policy]().opens_batch(0)
    assert POLICIES[policy]().opens_batch(1) is joins


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_has_keys_by_which_a_queue_can_be_sorted(policy: str) -> None:
    requests = [make_request(index, priority=index % 3) for index in range(9)]
    assert contract_order(POLICIES[policy](), requests) == len(requests)


def test_a_preempted_request_returns_before_all_that_arrived_later() -> None:
    queue = WaitingQueue(POLICIES["fcfs"]())
    queue.push(make_request(4))
    queue.push(make_request(7))
    queue.push(make_request(2), WaitReason.PREEMPTED)
    assert names(queue) == ["r2", "r4", "r7"]
    assert queue.head is not None and queue.head.wait == Wait(WaitReason.PREEMPTED)


def test_a_request_leaves_from_any_place_and_waits_no_more() -> None:
    queue = WaitingQueue(POLICIES["fcfs"]())
    requests = [make_request(index) for index in range(3)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[1])
    assert names(queue) == ["r0", "r2"]
    assert requests[1].wait is None
    assert len(queue) == 2


def test_who_was_refused_and_then_overtaken_is_behind_the_head() -> None:
    queue = WaitingQueue(POLICIES["fcfs"]())
    late, early = make_request(5), make_request(1)
    queue.push(late)
    late.wait = Wait(WaitReason.TOKEN_BUDGET, 9, 2)
    queue.push(make_request(6))
    assert late.wait == Wait(WaitReason.TOKEN_BUDGET, 9, 2)
    queue.push(early, WaitReason.PREEMPTED)
    assert late.wait == Wait(WaitReason.BEHIND_HEAD)
    early.wait = Wait(WaitReason.NO_FREE_BLOCKS, 3, 0)
    queue.remove(early)
    assert late.wait == Wait(WaitReason.BEHIND_HEAD)


def test_a_preempted_head_that_is_overtaken_is_still_preempted() -> None:
    queue = WaitingQueue(POLICIES["fcfs"]())
    later, earlier = make_request(5), make_request(1)
    queue.push(later, WaitReason.PREEMPTED)
    queue.push(earlier, WaitReason.PREEMPTED)
    assert later.wait == earlier.wait == Wait(WaitReason.PREEMPTED)


def test_two_requests_with_one_key_are_noticed() -> None:
    queue = WaitingQueue(POLICIES["fcfs"]())
    one, other = make_request(0), make_request(0)
    queue.push(one)
    queue.push(other)
    with pytest.raises(AssertionError, match="share a policy key"):
        queue.remove(other)
        queue.remove(one)
