"""Calls of tools, as OpenAI's own client sees them: from a model that calls tools whatever it is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.server.checkpoints import reciting_checkpoint
from tests.server.conftest import running_engine
from tests.server.fake_engine import FakeEngineClient, serving
from tests.waiting import HANG_SECONDS

MODEL = "teachlm"
QUESTION: list[Any] = [{"role": "user", "content": "What is a KV cache?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# What the reciting checkpoint writes, a token each.
CALLS = ("Let me see.", "<tool_call>", '{"name": "', "get_weather", '", "arguments": {"', 'city": ', '"Paris', '"}}')
CALLS += ("</tool_call>", "\n<tool_call>\n", '{"name": "get', '_weather", ', '"arguments": ', '{"city": "', "Os")
CALLS += ("lo é🎲", '"}', "}\n", "\n</tool_call>")
TOOLS: dict[str, Any] = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
CITIES = ["Paris", "Oslo é🎲"]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    checkpoint = reciting_checkpoint(tmp_path_factory.mktemp("reciting"), CALLS)
    with (
        running_engine(model=checkpoint) as (engine, _),
        serving(engine, served_model_names=(MODEL,), **TOOLS) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=HANG_SECONDS) as client,
    ):
        yield client


def said(chunks: list[Any]) -> str:
    """Return what a streamed conversation comes to."""
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def reason(chunks: list[Any]) -> str:
    """Return why it ended, which has to be said once."""
    [found] = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason is not None]
    return found


def test_calls_of_tools_are_told_apart_from_what_is_said(caller: OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "temperature": 0}
    choice = caller.chat.completions.create(**options).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    calls: Any = choice.message.tool_calls
    assert [call.type for call in calls] == ["function"] * 2 and len({call.id for call in calls}) == 2
    assert [call.function.name for call in calls] == ["get_weather"] * 2
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": city} for city in CITIES]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
    followed = caller.chat.completions.create(
        **options | {"messages": [*QUESTION, choice.message.model_dump(exclude_none=True), *results]}
    )
    assert followed.usage is not None and followed.usage.prompt_tokens > 0 and followed.choices[0].message.tool_calls
    [only] = caller.chat.completions.create(**options, parallel_tool_calls=False).choices[0].message.tool_calls or ()
    assert json.loads(only.model_dump()["function"]["arguments"]) == {"city": CITIES[0]}


def test_calls_of_tools_are_streamed_as_they_are_written(caller: OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "temperature": 0}
    chunks = list(caller.chat.completions.create(**options, stream=True))
    assert (said(chunks), reason(chunks)) == ("Let me see.", "tool_calls")
    parts = [part for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or ()]
    for index, city in enumerate(CITIES):
        [first, *more] = [part for part in parts if part.index == index]
        assert first.id and first.type == "function" and first.function is not None
        assert first.function.name == "get_weather"
        assert not any(part.id or (part.function and part.function.name) for part in more)
        arguments = "".join(part.function.arguments or "" for part in (first, *more) if part.function)
        assert json.loads(arguments) == {"city": city}
    with caller.chat.completions.stream(**options) as stream:  # the client's helper puts the calls together
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final: Any = stream.get_final_completion().choices[0].message
    assert [json.loads(event.arguments) for event in done] == [{"city": city} for city in CITIES]
    assert [call.function.name for call in final.tool_calls] == ["get_weather"] * 2


def test_calls_that_a_client_reads_at_once_with_the_end_are_all_told() -> None:
    with (
        serving(FakeEngineClient(["".join(CALLS)]), served_model_names=(MODEL,), **TOOLS) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=HANG_SECONDS) as client,
        client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=[WEATHER]) as stream,
    ):
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{"city": city} for city in CITIES]


def test_without_tools_or_where_they_are_not_to_be_called_a_call_is_text(caller: OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = caller.chat.completions.create(**options, **more).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("".join(CALLS), "stop")
        assert choice.message.tool_calls is None
