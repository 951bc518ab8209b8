"""LiteLLM, under both names by which it reaches such a server."""

from __future__ import annotations

import asyncio
import json

import litellm
import pytest
from test_openai import TOOL

MESSAGES = [{"role": "user", "content": "What is a KV cache?"}]


@pytest.fixture(params=["openai", "hosted_vllm"])
def options(request: pytest.FixtureRequest, base_url: str) -> dict:
    return {"model": f"{request.param}/teachlm", "api_base": base_url, "api_key": "none", "temperature": 0}


def test_an_answer_is_the_same_whole_streamed_and_asynchronous(options: dict) -> None:
    whole = litellm.completion(**options, messages=MESSAGES, max_tokens=12)
    asked = {"messages": MESSAGES, "max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**options, **asked))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    other = asyncio.run(litellm.acompletion(**options, messages=MESSAGES, max_tokens=12))
    assert text == whole.choices[0].message.content == other.choices[0].message.content != ""
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 12


def test_a_tool_is_called(options: dict, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    answer = litellm.completion(**options, messages=messages, tools=[TOOL], max_tokens=80)
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


def test_a_completion_has_log_probabilities(base_url: str) -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/teachlm",
        api_base=base_url,
        api_key="none",
        prompt="A KV cache",
        max_tokens=5,
        logprobs=2,
    )
    assert "".join(answer.choices[0].logprobs.tokens) == answer.choices[0].text


def test_an_error_has_its_class(options: dict) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**options, "temperature": -1}, messages=MESSAGES)
