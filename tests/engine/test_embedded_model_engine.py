"""teachlm, the embedded model: transformers' own tokens from the same files, and conversations that hit the cache."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from teachllm import LLM, SamplingParams

FOLDER = Path(__file__).resolve().parents[2] / "teachllm" / "assets" / "teachlm"
NUM_TOKENS = 48
QUESTIONS = [
    "What is a KV cache?",
    "why do we need paged attention?",
    "Explain continuous batching to me.",
    "What does TTFT mean?",
    "Hello!",
    "Who are you?",
    "What is the capital of France?",
    "Count from 1 to 9.",
]
TEXTS = ["A KV cache", "Prefill and decode", "The scheduler gives", "1, 2, 3,"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        "teachlm", device="cpu", dtype="float32", check_invariants=True, max_num_batched_tokens=64, max_num_seqs=8
    )


@cache
def theirs() -> tuple[Any, Any]:
    """transformers' model in float32, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(FOLDER)


def their_prompts() -> list[list[int]]:
    tokenizer = theirs()[1]
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    options = {"add_generation_prompt": True, "tokenize": False}
    texts = [tokenizer.apply_chat_template(chat, **options) for chat in chats] + TEXTS
    return [tokenizer(text)["input_ids"] for text in texts]


def their_answer(prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        made = theirs()[0].generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
    ids: list[int] = made[0, len(prompt) :].tolist()
    return ids


def test_greedy_tokens_equal_transformers_from_the_same_files(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(chats, params, use_tqdm=False) + llm.generate(TEXTS, params, use_tqdm=False)
    prompts = their_prompts()
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.outputs[0].token_ids for output in outputs] == [their_answer(prompt) for prompt in prompts]
    tokenizer = theirs()[1]
    for output in outputs:
        completion = output.outputs[0]
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def test_the_second_turn_of_a_conversation_finds_the_first_in_the_cache(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=200)
    messages = [{"role": "user", "content": "What is prefix caching, and why does it exist?"}]
    [first] = llm.chat(messages, params, use_tqdm=False)
    answer = first.outputs[0]
    assert answer.finish_reason == "stop"
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "How does it work?"}]
    [second] = llm.chat(messages, params, use_tqdm=False)
    first_turn = first.prompt_token_ids + answer.token_ids
    # The answer comes back as text, so its ids may be others, but hardly ever are.
    pairs = zip(first_turn[:-1], second.prompt_token_ids, strict=False)  # the last id was never computed
    num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert num_same > 0.9 * len(first_turn)
    assert second.num_cached_tokens == num_same // 16 * 16
    assert second.outputs[0].token_ids[:NUM_TOKENS] == their_answer(second.prompt_token_ids)
