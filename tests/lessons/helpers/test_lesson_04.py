"""Lesson 04: a chunk that is polite, and what is said of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from teachllm.config import EngineConfig
from teachllm.roofline import StepShape, step_work
from teachllm.simulator.cost_model import CostModel, RooflineCost, StepCosts
from teachllm.simulator.shapes import model_shape
from teachllm.simulator.simulate import Simulation, simulate
from teachllm.simulator.workload import Workload
from teachllm.trace.reader import parse_trace
from teachllm_lessons.helpers.lesson_03 import ceilings
from teachllm_lessons.helpers.lesson_04 import (
    CHUNK,
    TALKERS,
    answers_and_long_prompts,
    contract_chunk,
    first_token_steps,
    measured_budgets,
    measured_rungs,
    newcomers,
    polite,
    talk,
    ttft_of_long_prompts,
    who_waits,
)
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough


def test_a_polite_chunk_is_right() -> None:
    keeps_contract(CHUNK, "A, B and C have their first tokens in step 0, where they had to wait")
    assert contract_chunk(polite) > 10


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (
            lambda request, most: most,
            r"chunk\(a prompt of 65, 17\) is 17: of a prompt beyond 64 tokens a step takes 16",
        ),
        (lambda request, most: min(most, 16), r"chunk\(a prompt of 64, 17\) is 16: a prompt of up to 64 tokens is to"),
        (lambda request, most: 16, r"chunk\(a prompt of 2, 2\) is 16: more than budget and prompt allow"),
        (lambda request, most: 0, "then nothing of it is ever computed"),
        (lambda request, most: most / 2, r"is 1\.0: give a number of tokens"),
        (
            lambda request, most: most if request.num_uncomputed_tokens <= 64 else min(most, 16),
            "the last 40 tokens of a prompt of 500 get 40: it is still a long one",
        ),
    ],
)
def test_others_are_told_why_not(piece: Any, words: str) -> None:
    rejected(CHUNK, piece, words)


@only_thorough
def test_in_chunks_no_step_is_as_large_as_the_whole_prompt() -> None:
    whole, pieces = talk(enable_chunked_prefill=False, max_num_batched_tokens=512), talk(max_num_batched_tokens=64)
    largest = [
        max(sum(s["num_tokens"] for s in step["scheduled"]) for step in each.trace.steps) for each in (whole, pieces)
    ]
    assert largest[0] > 400 and largest[1] == 64
    assert whole.all_tokens == pieces.all_tokens


@only_thorough
def test_the_engines_own_policy_lets_short_prompts_wait() -> None:
    assert all(first_token_steps(newcomers())[name] > 2 for name in TALKERS)


def test_what_the_lesson_says_of_measurements_is_so() -> None:
    budgets, where = measured_budgets()
    whole, chunks = budgets["whole"], budgets["512"]
    assert "H200" in where
    assert [round(each["gap_p99_ms"]) for each in (whole, chunks)] == [150, 17]
    assert [round(each["long_ttft_mean_ms"]) for each in (whole, chunks)] == [497, 799]
    rungs, where = measured_rungs()
    whole, chunks = rungs["paged blocks"], rungs["chunked prefill"]
    assert "H100" in where
    assert chunks["itl"]["p99"] > whole["itl"]["p99"] and chunks["ttft"]["mean"] > 2 * whole["ttft"]["mean"]
    assert chunks["output_tokens_per_s"] < whole["output_tokens_per_s"]


def test_only_long_prompts_are_in_their_mean() -> None:
    work = [Workload(num_requests=4, prompt_len=64, output_len=8), Workload(num_requests=2, prompt_len=6000)]
    found = simulate(EngineConfig(enable_prefix_caching=False, max_model_len=8192), work, model_shape("qwen3-8b"))
    times = sorted(each.token_times[0] for each in parse_trace(found.lines).replay.requests.values())
    assert ttft_of_long_prompts(found) == pytest.approx(sum(times[-2:]) / 2)


def test_without_a_fault_who_answers_gets_a_token_in_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    who_waits()
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 4 and all(line.endswith("gets nothing in 0 of them") for line in told)


def simulated(budget: int, cost: CostModel | None = None) -> Simulation:
    config = EngineConfig(
        max_num_batched_tokens=budget, max_num_seqs=64, max_model_len=8192, enable_prefix_caching=False
    )
    return simulate(config, answers_and_long_prompts(), model_shape("qwen3-8b"), cost=cost)


def test_a_step_of_256_tokens_is_bound_by_arithmetic_and_prompts_pay_for_the_fixed_cost_of_steps() -> None:
    costs = StepCosts()
    reached = replace(
        ceilings(),
        read_bandwidth=ceilings().read_bandwidth * costs.of_bandwidth,
        gemm_flops=ceilings().gemm_flops * costs.of_compute,
        attention_flops=ceilings().attention_flops * costs.of_compute,
    )
    work = step_work(model_shape("qwen3-8b"), StepShape([1] * 32 + [224], [250] * 32 + [3000], 33))
    assert 1000 * work.num_bytes / reached.read_bandwidth == pytest.approx(4.0, abs=0.1)
    assert 1000 * work.seconds(reached) == pytest.approx(5.8, abs=0.1)
    assert 36 * costs.prompt_layer + costs.host_step + 33 * costs.host_request == pytest.approx(2.4e-3, rel=0.01)
    free = StepCosts(decode_layer=0, prompt_layer=0, host_step=0, host_request=0)
    cost = RooflineCost(model_shape("qwen3-8b"), ceilings(), free)
    assert 1000 * ttft_of_long_prompts(simulated(256)) == pytest.approx(888, abs=1)
    assert 1000 * ttft_of_long_prompts(simulated(256, cost)) == pytest.approx(532, abs=1)


def test_budgets_of_256_and_1024_are_the_outliers_of_the_simulation() -> None:
    budgets, _ = measured_budgets()
    found = {budget: simulated(budget) for budget in (256, 512, 1024, 2048, 4096, 8192)}
    gap = {budget: budgets[str(budget)]["gap_p99_ms"] / 1000 / each.figures.itl.p99 for budget, each in found.items()}
    wait = {
        budget: budgets[str(budget)]["long_ttft_mean_ms"] / 1000 / ttft_of_long_prompts(each)
        for budget, each in found.items()
    }
    assert [round(gap[budget], 1) for budget in (256, 1024)] == [1.6, 1.5]
    assert [round(wait[budget], 1) for budget in (256, 1024)] == [1.4, 1.3]
    assert 1.1 < gap[512] < wait[512] < 1.2
    assert all(1.01 < each[budget] < 1.085 for each in (gap, wait) for budget in (2048, 4096, 8192))
    replayed = [parse_trace(each.lines).replay.requests.values() for each in found.values()]
    short = [each for requests in replayed for each in requests if each.arrival["num_prompt_tokens"] == 64]
    assert 0.06 < max(each.token_times[0] - each.arrival["time"] for each in short) < 0.065
