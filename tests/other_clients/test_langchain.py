"""LangChain's models for servers of OpenAI's kind."""

from __future__ import annotations

import asyncio

import pytest
from conftest import get_weather
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

QUESTION = "What is a KV cache?"


@pytest.fixture
def options(base_url: str) -> dict:
    return {"model": "teachlm", "base_url": base_url, "api_key": "none", "temperature": 0, "max_retries": 0}


def test_an_answer_is_the_same_whole_streamed_and_asynchronous(options: dict) -> None:
    model = ChatOpenAI(**options, max_tokens=12)
    whole = model.invoke(QUESTION)
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == whole.content != ""
    assert asyncio.run(model.ainvoke([("human", QUESTION)])).content == whole.content
    assert whole.usage_metadata["output_tokens"] == 12


def test_a_tool_is_called_whole_and_streamed_and_its_answer_is_used(options: dict, question: str) -> None:
    model = ChatOpenAI(**options, max_tokens=80).bind_tools([get_weather])
    asked = model.invoke(question)
    [call] = asked.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    first, *others = model.stream(question)
    [streamed] = sum(others, first).tool_calls
    assert streamed["args"] == call["args"]
    answer = ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])
    assert "sunny" in model.invoke([HumanMessage(question), asked, answer]).content


def test_several_texts_are_completed_at_once(options: dict) -> None:
    model = OpenAI(**options, max_tokens=5)
    assert model.batch(["A KV cache", "A"]) == [model.invoke("A KV cache"), model.invoke("A")]
