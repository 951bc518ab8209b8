"""What steps take is learned from whatever steps there are, and slow ones do not matter."""

from __future__ import annotations

from random import Random

import pytest

from teachllm.spec_decode.step_times import Line, Prior, Step, StepTimes


def decode(num_requests: int, levels: int) -> Step:
    """All requests verify as many drafts as they ask for."""
    num_drafts = num_requests * levels
    return Step(num_requests, num_requests + num_drafts, num_drafts, num_drafts, levels, 0, True)


def straight(step: Step) -> float:
    """Seconds: 4, and 0.1 a token, and 0.3 a round of drafting."""
    return 4.0 + 0.1 * step.num_tokens + 0.3 * step.deepest


def times(draft_cost: float = 0.1) -> StepTimes:
    return StepTimes(range(5), draft_cost)


def test_a_line_is_found_through_what_lies_on_it() -> None:
    line, random = Line([1e3, 1e3, 1e3]), Random(0)
    for _ in range(100):
        x = 1.0, random.uniform(1, 100), float(random.randrange(5))
        line.fit(x, 4.0 + 0.1 * x[1] + 0.3 * x[2])
    assert line.weights == pytest.approx([4.0, 0.1, 0.3], rel=1e-3)


def test_a_step_that_took_fifty_times_too_long_hardly_moves_it() -> None:
    line, random = Line([1e3, 1e3]), Random(0)
    for i in range(200):
        x = 1.0, random.uniform(1, 100)
        line.fit(x, (4.0 + 0.1 * x[1]) * (50.0 if i % 40 == 30 else 1.0))
    assert line.weights == pytest.approx([4.0, 0.1], rel=0.2)


def test_steps_with_prompts_beside_tell_what_decodes_take() -> None:
    """Nobody has seen a step of decodes alone with drafts."""
    found, random = times(), Random(0)
    for i in range(300):
        num_prompt_tokens, levels = random.randrange(10, 200), i % 3
        num_drafts = 8 * levels
        step = Step(9, num_prompt_tokens + 8 + num_drafts, num_drafts, num_drafts, levels, 0, False)
        found.time(step, straight(step) * random.lognormvariate(0.0, 0.02))
    assert found.is_ready
    for levels in range(5):
        assert found.seconds(8, levels, 8 * levels) == pytest.approx(straight(decode(8, levels)), rel=0.08)


def test_what_was_timed_goes_before_what_the_line_says() -> None:
    """Up to two drafts are free on this machine, which is no straight line."""
    found = times()
    for levels in (0, 1, 2, 3, 4) * 20:
        found.time(decode(8, levels), 5.0 if levels < 3 else 8.0)
    assert [found.seconds(8, k, 8 * k) for k in range(5)] == pytest.approx([5.0, 5.0, 5.0, 8.0, 8.0])


def test_a_few_slow_steps_among_the_latest_leave_the_time_as_it_is() -> None:
    found = times()
    for i in range(30):
        found.time(decode(4, 0), 90.0 if i < 3 or i % 4 == 0 else 5.0)
    assert found.seconds(4, 0, 0) == 5.0


def test_what_other_loads_have_shown_holds_until_a_load_was_timed_itself() -> None:
    found = times()
    for _ in range(10):
        for num_requests, levels in ((2, 0), (2, 2), (16, 0), (16, 2)):
            step = decode(num_requests, levels)
            found.time(step, straight(step))
    assert found.seconds(8, 2, 16) == pytest.approx(straight(decode(8, 2)), rel=0.05)
    for _ in range(10):
        found.time(decode(8, 2), 9.0)
    assert found.seconds(8, 2, 16) == pytest.approx(9.0)


def test_before_anything_else_is_known_the_prior_is_believed() -> None:
    found = StepTimes(range(5), 0.1, prior=Prior(lambda num_requests, levels: 1.0 + 0.5 * levels, 2e-6))
    for _ in range(5):
        found.time(decode(8, 0), 4.0)
    assert [found.seconds(8, k, 8 * k) for k in range(5)] == pytest.approx([4.0, 6.0, 8.0, 10.0, 12.0])
    found.time(Step(8, 8, 0, 8, 1, 1000, True), 4.0)
    assert found.per_token_behind == 2e-6  # whatever a step seems to have taken
    for _ in range(5):
        found.time(decode(8, 2), 6.0)
    assert found.seconds(8, 2, 16) == pytest.approx(6.0)
    assert found.seconds(8, 4, 32) == pytest.approx(9.0)  # in the prior's proportion to what was timed


def test_the_step_in_which_a_drafter_begins_tells_what_catching_up_takes() -> None:
    found = times(draft_cost=0.0)
    start = Step(4, 4, 0, 2, 1, 1000, True)
    for _ in range(10):
        found.time(decode(4, 0), 5.0)
        found.time(decode(4, 1), 5.0)
        found.time(start, 7.0)
    assert found.per_token_behind == pytest.approx(0.002, rel=0.05)
    assert found.seconds(4, 1, 4) == 5.0


def test_times_that_contradict_each_other_leave_every_step_some_time() -> None:
    """As of a busy machine; with these the line had a plain step take less than none, and no proportion was left."""
    found, random = times(draft_cost=0.0), Random(1831)
    shortest = random.choice([-2, -3, -4])
    for _ in range(60):
        num_drafts, num_prompt_tokens = random.choice([0, 4]), random.choice([0, 0, 0, 29, 100])
        asked, num_tokens = random.choice([0, 4]), 1 + num_drafts + num_prompt_tokens
        step = Step(1, num_tokens, num_drafts, asked, asked, 0, not num_prompt_tokens)
        found.time(step, 10 ** random.uniform(shortest, 0))
        assert all(found.seconds(1, levels, levels) > 0 for levels in range(5))
