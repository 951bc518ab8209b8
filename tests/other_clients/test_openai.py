"""OpenAI's client. What the project's own tests ask of a pinned version, test_openai_client.py asks in full."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OPTIONS = {"model": "teachlm", "temperature": 0}


@pytest.fixture(scope="module")
def client(base_url: str) -> OpenAI:
    return OpenAI(base_url=base_url, api_key="none", max_retries=0)


def test_an_answer_is_the_same_whole_streamed_and_asynchronous(client: OpenAI, base_url: str) -> None:
    options = {**OPTIONS, "messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 12}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    other = asyncio.run(AsyncOpenAI(base_url=base_url, api_key="none").chat.completions.create(**options))
    assert text == whole.choices[0].message.content == other.choices[0].message.content != ""
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 12


def test_a_tool_is_called_and_its_answer_is_used(client: OpenAI, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    first = client.chat.completions.create(**OPTIONS, messages=messages, tools=[TOOL], max_tokens=80)
    [call] = first.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    second = client.chat.completions.create(**OPTIONS, messages=messages, tools=[TOOL], max_tokens=80)
    assert "sunny" in second.choices[0].message.content


def test_a_streaming_helper_finds_the_call(client: OpenAI, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    with client.chat.completions.stream(**OPTIONS, messages=messages, tools=[TOOL], max_tokens=80) as stream:
        stream.until_done()
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_a_completion_has_log_probabilities(client: OpenAI) -> None:
    answer = client.completions.create(**OPTIONS, prompt=["A KV cache", "Paged attention"], max_tokens=5, logprobs=2)
    for choice in answer.choices:
        assert "".join(choice.logprobs.tokens) == choice.text
        assert [len(each) for each in choice.logprobs.top_logprobs] == [2] * 5


def test_errors_have_their_classes(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-0", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="teachlm", prompt="a", temperature=-1)
    assert [model.id for model in client.models.list()] == ["teachlm"]
