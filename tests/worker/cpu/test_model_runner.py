"""ModelRunner, given plans by hand: what is sampled, which drafts are accepted, and what a closed row leaves."""

from __future__ import annotations

import pytest
import torch

from teachllm import EngineConfig, SamplingParams
from teachllm.core.scheduler_output import ModelRunnerOutput, NewRow, ScheduledRequest, SchedulerOutput
from teachllm.models.model_config import load_model_config
from teachllm.worker.cpu.model_runner import ModelRunner
from tests.engine.reference import reference
from tests.worker.engines import random_ids, tiny

GREEDY = SamplingParams(temperature=0)
PROMPT = random_ids(20)
BLOCKS = [5, 2, 9]  # 48 tokens


@pytest.fixture
def runner() -> ModelRunner:
    config = EngineConfig(**tiny(max_num_seqs=2))
    model = load_model_config(config)
    return ModelRunner(config.resolve(model.max_model_len), model, torch.device("cpu"))


def greedy(count: int) -> list[int]:
    return reference("qwen3").greedy(tuple(PROMPT), count)


def opening(name: str = "a", params: SamplingParams = GREEDY, num_tokens: int = len(PROMPT)) -> ScheduledRequest:
    """The first share of a request with the prompt."""
    row = NewRow(list(PROMPT), len(PROMPT), params, child_index=0, seed=0, stop_token_ids=frozenset())
    return ScheduledRequest(name, 0, num_tokens, [], num_tokens == len(PROMPT), 0, BLOCKS, row)


def further(start: int, drafts: list[int] | None = None, name: str = "a") -> ScheduledRequest:
    drafts = drafts or []
    return ScheduledRequest(name, start, 1 + len(drafts), drafts, True, len(BLOCKS), [])


def step(
    runner: ModelRunner, *scheduled_requests: ScheduledRequest, dropped: tuple[str, ...] = ()
) -> ModelRunnerOutput:
    return runner.sample(runner.execute(SchedulerOutput(0, list(scheduled_requests), list(dropped)))).result()


def test_a_part_of_a_prompt_samples_nothing_and_its_end_one_token(runner: ModelRunner) -> None:
    assert step(runner, opening(num_tokens=13)).sampled_token_ids == [[]]
    rest = ScheduledRequest("a", 13, 7, [], True, len(BLOCKS), [])
    assert step(runner, rest).sampled_token_ids == [greedy(1)]


@pytest.mark.parametrize("num_right", range(4))
def test_drafts_are_accepted_up_to_the_first_wrong_one(runner: ModelRunner, num_right: int) -> None:
    right = greedy(10)
    step(runner, opening())
    drafts = right[1:4]
    if num_right < 3:
        drafts[num_right] = (drafts[num_right] + 1) % 512
    assert step(runner, further(20, drafts)).sampled_token_ids == [right[1 : 2 + num_right]]
    # A plan that counted on all of them starts where the sequence truly ends.
    assert step(runner, further(24)).sampled_token_ids == [[right[2 + num_right]]]
    assert step(runner, further(22 + num_right)).sampled_token_ids == [[right[3 + num_right]]]


def test_logprobs_come_for_each_sampled_token_and_only_to_those_who_asked(runner: ModelRunner) -> None:
    right = greedy(10)
    step(runner, opening(params=SamplingParams(temperature=0, logprobs=2)))
    output = step(runner, further(20, [*right[1:3], 0]), opening("b"))
    assert output.sampled_token_ids == [right[1:4], right[:1]]
    assert output.logprobs is not None and output.logprobs[1] is None and output.logprobs[0] is not None
    assert [entry.token_id for entry in output.logprobs[0]] == right[1:4]
    assert all(len(entry.top_ids) == 2 for entry in output.logprobs[0])


def test_who_asks_for_nothing_pays_nothing_even_in_a_row_that_was_used(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=1.0, prompt_logprobs=3, logprobs=3, repetition_penalty=2.0)
    output = step(runner, opening(params=params))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is not None
    assert len(output.prompt_logprobs[0]) == len(PROMPT) - 1
    output = step(runner, opening("b"), dropped=("a",))
    assert (output.prompt_logprobs, output.logprobs) == (None, None)
    assert output.sampled_token_ids == [greedy(1)]


def test_a_row_named_twice_or_unknown_is_closed_once(runner: ModelRunner) -> None:
    step(runner, opening("a"), opening("b"))
    output = step(runner, opening("a"), opening("b"), dropped=("a", "never", "a", "b"))
    assert output.sampled_token_ids == [greedy(1), greedy(1)]
