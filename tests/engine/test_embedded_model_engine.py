"""teachlm, the embedded model: transformers' own tokens from the same files, and conversations that hit the cache."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from teachllm import LLM, SamplingParams
from tests.golden.make_teachlm import CONVERSATION, FILE, NUM_TOKENS, QUESTIONS, TEXTS
from tests.thorough import times


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        "teachlm", device="cpu", dtype="float32", check_invariants=True, max_num_batched_tokens=64, max_num_seqs=8
    )


@pytest.fixture(scope="module")
def theirs() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(FILE.read_text())
    return found


def test_greedy_tokens_equal_transformers_from_the_same_files(llm: LLM, theirs: list[dict[str, Any]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    every = times(4, 1)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[::every]]
    outputs = llm.chat(chats, params, use_tqdm=False) + llm.generate(TEXTS[::every], params, use_tqdm=False)
    wanted = theirs[: len(QUESTIONS) : every] + theirs[len(QUESTIONS) : -1 : every]
    for output, expected in zip(outputs, wanted, strict=True):
        completion = output.outputs[0]
        found = {"prompt": output.prompt_token_ids, "answer": completion.token_ids, "text": completion.text}
        assert found == expected


def test_the_second_turn_of_a_conversation_finds_the_first_in_the_cache(llm: LLM, theirs: list[dict[str, Any]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=200)
    messages = [{"role": "user", "content": CONVERSATION[0]}]
    [first] = llm.chat(messages, params, use_tqdm=False)
    answer = first.outputs[0]
    assert answer.finish_reason == "stop"
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": CONVERSATION[1]}]
    [second] = llm.chat(messages, params, use_tqdm=False)
    first_turn = first.prompt_token_ids + answer.token_ids
    # The answer comes back as text, so its ids may be others, but hardly ever are.
    pairs = zip(first_turn[:-1], second.prompt_token_ids, strict=False)  # the last id was never computed
    num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert num_same > 0.9 * len(first_turn)
    assert second.num_cached_tokens == num_same // 16 * 16
    assert second.prompt_token_ids == theirs[-1]["prompt"]
    assert second.outputs[0].token_ids[:NUM_TOKENS] == theirs[-1]["answer"]
