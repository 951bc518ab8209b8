"""A step budget learns what tokens take, and keeps steps with decodes within their time."""

from __future__ import annotations

import random

import pytest

from teachllm.core.scheduler_output import ScheduledRequest, SchedulerOutput
from teachllm.core.step_budget import StepBudget


def plan(num_decodes: int, num_prompt_tokens: int, num_drafts: int = 0) -> SchedulerOutput:
    decodes = [
        ScheduledRequest(str(i), 9, 1 + num_drafts, [7] * num_drafts, True, 0, [], None) for i in range(num_decodes)
    ]
    prompt = [ScheduledRequest("p", 0, num_prompt_tokens, [], False, 0, [], None)] if num_prompt_tokens else []
    return SchedulerOutput(0, decodes + prompt)


def test_a_step_without_decodes_has_all_tokens() -> None:
    budget = StepBudget(16000, 0.02)
    assert budget.tokens(0) == 16000
    budget.time(plan(4, 1000), 5.0)
    assert budget.tokens(0) == 16000


def test_at_first_steps_are_short_and_then_as_long_as_they_may_be() -> None:
    budget = StepBudget(16000, 0.020)
    assert budget.tokens(4) == 4 + 512
    budget.time(plan(4, 0), 0.005)
    budget.time(plan(4, 500), 0.010)  # 5 ms for 500 tokens
    assert budget.tokens(4) == pytest.approx(4 + 1500, abs=1)
    assert budget.tokens(64) == pytest.approx(64 + 1500, abs=1)
    budget.time(plan(0, 1000, 0), 0.020)  # 20 us a token, a quarter of which counts: 12.5 us
    assert budget.tokens(4) == pytest.approx(4 + 1200, abs=1)
    assert StepBudget(100, 0.020).tokens(4) == 100


def test_a_prompt_goes_on_however_long_its_tokens_take() -> None:
    budget = StepBudget(16000, 0.020)
    budget.time(plan(4, 0), 0.050)  # decodes alone are too long
    budget.time(plan(4, 500), 1.0)
    assert budget.tokens(4) == 4 + 32


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_few_prompt_tokens_or_drafts_tell_nothing_about_prompts(num_drafts: int) -> None:
    budget = StepBudget(16000, 0.020)
    budget.time(plan(4, 0, num_drafts), 0.005)
    budget.time(plan(4, 31), 0.019)
    assert budget.tokens(4) == 4 + 512


def test_steps_of_a_machine_with_noise_stay_near_their_bound() -> None:
    rng, budget = random.Random(1), StepBudget(16384, 0.020)
    found = []
    for step in range(400):
        num_decodes = rng.randint(1, 64)
        num_prompt_tokens = 0 if step % 4 == 0 else budget.tokens(num_decodes) - num_decodes
        seconds = (0.004 + num_decodes * 2e-5 + num_prompt_tokens * 8e-6) * rng.uniform(0.9, 1.1)
        budget.time(plan(num_decodes, num_prompt_tokens), seconds)
        if num_prompt_tokens and step > 20:
            found.append(seconds)
    found.sort()
    assert found[len(found) // 2] == pytest.approx(0.020, rel=0.05)
    assert found[-1] < 0.025


def test_a_slow_first_step_is_forgotten_where_prompts_never_stop() -> None:
    """It had a kernel to compile."""
    budget = StepBudget(16384, 0.020)
    budget.time(plan(1, 0), 1.0)
    for _ in range(30):
        num_prompt_tokens = budget.tokens(8) - 8
        budget.time(plan(8, num_prompt_tokens), 0.005 + num_prompt_tokens * 1e-5)
    assert 1000 < budget.tokens(8) < 2000


def test_a_clock_that_has_not_moved_breaks_nothing() -> None:
    budget = StepBudget(16384, 0.020)
    budget.time(plan(1, 100), 0.0)
    assert budget.tokens(1) == 16384
