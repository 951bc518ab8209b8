"""What the length's timing tells of the price of a step with drafts."""

from __future__ import annotations

import pytest

from teachllm.core.scheduler_output import ScheduledRequest, SchedulerOutput
from teachllm.spec_decode.draft_length import AdaptiveLength, FixedLength, StepCost


def plan(num_requests: int, num_drafts: int) -> SchedulerOutput:
    """A step of requests that verify as many drafts as they ask for."""
    shares = [
        ScheduledRequest(str(i), 10, 1 + num_drafts, [5] * num_drafts, True, 0, [], num_next_drafts=num_drafts)
        for i in range(num_requests)
    ]
    return SchedulerOutput(0, shares)


def test_nothing_is_told_before_both_kinds_were_timed_for_as_many_requests() -> None:
    length = AdaptiveLength(range(5), draft_cost=0.1)
    assert length.step_cost() is None
    for num_requests, num_drafts in ((1, 0), (8, 4)):
        for _ in range(10):
            length.time(plan(num_requests, num_drafts), 1.0)
    assert length.step_cost() is None
    assert FixedLength(range(5)).step_cost() is None


def test_the_price_is_the_mean_over_the_steps_with_drafts_that_were_timed() -> None:
    length = AdaptiveLength(range(5), draft_cost=0.1)
    timed = {(1, 0): (2.0, 5), (1, 4): (3.0, 4), (1, 2): (2.4, 7), (8, 0): (10.0, 4), (8, 4): (15.0, 9)}
    for (num_requests, num_drafts), (seconds, count) in timed.items():
        for _ in range(count):
            length.time(plan(num_requests, num_drafts), seconds)
    # The first three of each kind do not count: they compile, or are recorded.
    found = length.step_cost()
    assert found == StepCost(pytest.approx((1 * 1.5 + 4 * 1.2 + 6 * 1.5) / 11), num_plain=2 + 1, num_drafting=11)
