"""Speculation on a GPU: the same tokens as without, whoever drafts, and more than one a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from teachllm import LLM, SamplingParams
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput

pytestmark = pytest.mark.gpu

QUESTIONS = [
    "What is paged attention?",
    "What is a KV cache?",
    "Repeat exactly: the quick brown fox jumps over the lazy dog and the quick brown fox",
    "Why does batching help?",
    "What is chunked prefill?",
    "How does prefix caching work?",
    "Who was Napoleon?",
]
MODELS = {"draft_model": "teachlm-draft", "eagle": "teachlm-eagle", "medusa": "teachlm-medusa"}
METHODS = ["ngram", "custom", *MODELS]
TREES = {
    "small": {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0)]", "num_speculative_tokens": 2},
    "large": {
        "speculative_token_tree": str(
            [(a,) for a in range(4)]
            + [(a, b) for a in range(3) for b in range(3)]
            + [(a, b, c) for a in range(2) for b in range(2) for c in range(2)]
            + [(0, 0, 0, 0), (0, 1, 0, 0)]
        ),
        "num_speculative_tokens": 4,
    },
}


class Echo:
    """A drafter on the host: what followed the last token before."""

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        found = list(token_ids[:-1]).index(token_ids[-1]) + 1 if token_ids[-1] in token_ids[:-1] else 0
        return token_ids[found : found + num_tokens] if found else []


def make(method: str | None, **settings: Any) -> LLM:
    speculation = None
    if method is not None:
        speculation = {"method": method, "adaptive": False} | ({"model": MODELS[method]} if method in MODELS else {})
        speculation |= settings.pop("speculation", {})
    defaults = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    defaults |= {"kv_cache_memory_bytes": 256 << 20, "check_invariants": True, "device": "cuda"}
    drafter = Echo() if method == "custom" else None
    return LLM(speculative_config=speculation, drafter=drafter, **(defaults | settings))


def answers(llm: LLM, rounds: int = 2, **params: Any) -> list[list[int]]:
    """Of the last round: the first ones run before anything is recorded."""
    conversations: Any = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for _ in range(rounds):
        outputs = llm.chat(conversations, SamplingParams(**{"temperature": 0, "max_tokens": 60} | params), False)
    return [completion.token_ids for output in outputs for completion in output.outputs]


def count_accepted(llm: LLM) -> list[int]:
    """(drafts that held, verifications) from now on."""
    count, scheduler = [0, 0], llm.engine.core.scheduler
    update = scheduler.update

    def counting(plan: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        updates = update(plan, result)
        count[0] += sum(each.num_accepted for each in updates)
        count[1] += sum(each.num_drafted > 0 for each in updates)
        return updates

    scheduler.update = counting  # type: ignore[method-assign]
    return count


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    llm = make(None)
    found = answers(llm)
    llm.close()
    return found


@pytest.mark.parametrize(
    "settings",
    [{"async_scheduling": False, "enforce_eager": True}, {"async_scheduling": False}, {}],
    ids=["eager", "graphs", "ahead"],
)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_those_without(method: str, settings: dict[str, Any], plain: list[list[int]]) -> None:
    llm = make(method, **settings)
    accepted = count_accepted(llm)
    assert answers(llm) == plain
    assert accepted[0] > 0
    if method in ("draft_model", "eagle"):
        assert 1 + accepted[0] / accepted[1] > 3.5
    llm.close()


@pytest.mark.parametrize(
    "settings", [{"enforce_eager": True}, {}, {"num_gpu_blocks_override": 16, "max_model_len": 150}]
)
@pytest.mark.parametrize("tree", list(TREES))
@pytest.mark.parametrize("method", list(MODELS))
def test_trees_of_drafts_leave_greedy_tokens_as_they_are(
    method: str, tree: str, settings: dict[str, Any], plain: list[list[int]]
) -> None:
    llm = make(method, speculation=TREES[tree], **settings)
    accepted = count_accepted(llm)
    assert answers(llm) == plain
    assert 1 + accepted[0] / accepted[1] > 2
    llm.close()


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.3}, {"logprobs": 3}, {"bad_words": ["cache", "the"]}])
@pytest.mark.parametrize("method", list(MODELS))
def test_what_else_a_request_with_trees_may_ask_for(method: str, params: dict[str, Any]) -> None:
    found = []
    for each in (None, method):
        llm = make(each, **({} if each is None else {"speculation": TREES["small"]}))
        found.append(answers(llm, **params))
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("method", METHODS)
def test_blocks_that_run_out_and_prefixes_that_are_found_change_nothing(method: str, plain: list[list[int]]) -> None:
    llm = make(method, num_gpu_blocks_override=10, max_model_len=150, max_num_batched_tokens=24)
    assert answers(llm, rounds=3) == plain
    assert llm.engine.core.scheduler.num_preemptions > 0
    llm.close()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 6, 7, 16])
@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle"])
def test_any_number_of_drafts(method: str, num_tokens: int, plain: list[list[int]]) -> None:
    llm = make(method, speculation={"num_speculative_tokens": num_tokens})
    assert answers(llm) == plain
    for max_tokens in (1, 2, 3, 5, 9):
        assert answers(llm, rounds=1, max_tokens=max_tokens) == [ids[:max_tokens] for ids in plain]
    llm.close()


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"bad_words": ["cache", "the"]},
        {"stop": ["attention", "the"]},
        {"logprobs": 3},
        {"min_tokens": 40},
        {"prompt_logprobs": 1},
        {"n": 2},
    ],
    ids=lambda params: next(iter(params)),
)
@pytest.mark.parametrize("method", ["ngram", *MODELS])
def test_what_else_a_request_may_ask_for(method: str, params: dict[str, Any]) -> None:
    found = []
    for each in (None, method):
        llm = make(each)
        found.append(answers(llm, **params))
        llm.close()
    assert found[0] == found[1]


def test_a_certain_drafter_leaves_even_random_tokens_as_they_are() -> None:
    params = {"temperature": 0.8, "seed": 5, "top_p": 0.9}
    found = []
    for method in (None, "ngram"):
        llm = make(method)
        found.append(answers(llm, **params))
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("params", [{}, {"top_k": 8}, {"top_p": 0.8, "frequency_penalty": 0.1}, {"logprobs": 1}])
@pytest.mark.parametrize("tree", [None, "small"])
@pytest.mark.parametrize("method", list(MODELS))
def test_random_tokens_are_distributed_as_without(method: str, tree: str | None, params: dict[str, Any]) -> None:
    """The second output token of many requests: by Pearson's chi-square, with and without, over the common ones."""
    counts: list[dict[int, int]] = []
    prompt = [{"role": "user", "content": "Tell me a random thing about memory"}]
    for each in (None, method):
        shape = {} if tree is None or each is None else {"speculation": TREES[tree]}
        llm = make(each, max_num_seqs=64, max_num_batched_tokens=4096, **shape)
        params_of = [SamplingParams(temperature=1.5, max_tokens=4, seed=seed, **params) for seed in range(1200)]
        outputs = llm.chat([prompt] * len(params_of), params_of, False)  # type: ignore[arg-type]
        found: dict[int, int] = {}
        for output in outputs:
            ids = output.outputs[0].token_ids
            found[ids[min(1, len(ids) - 1)]] = found.get(ids[min(1, len(ids) - 1)], 0) + 1
        counts.append(found)
        llm.close()
    common = [token_id for token_id, count in counts[0].items() if count >= 15]
    table = [[found.get(token_id, 0) for token_id in common] for found in counts]
    for row in table:
        row.append(1200 - sum(row))
    cells = [(a, b) for a, b in zip(*table, strict=True) if a + b]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells)
    freedom = len(cells) - 1
    assert freedom >= 2
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, f"{statistic:.1f} at {freedom} degrees of freedom"
