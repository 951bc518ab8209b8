"""Agents of Pydantic AI."""

from __future__ import annotations

import asyncio

import pytest
from conftest import get_weather
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is a KV cache?"


@pytest.fixture
def model(base_url: str) -> OpenAIChatModel:
    return OpenAIChatModel("teachlm", provider=OpenAIProvider(base_url=base_url, api_key="none"))


def test_an_answer_is_the_same_whole_and_streamed(model: OpenAIChatModel) -> None:
    agent = Agent(model, system_prompt="Answer.", model_settings={"max_tokens": 12, "temperature": 0})
    whole = agent.run_sync(QUESTION)

    async def streamed() -> str:
        async with agent.run_stream(QUESTION) as stream:
            return "".join([text async for text in stream.stream_text(delta=True)])

    assert asyncio.run(streamed()) == whole.output != ""


def test_an_agent_calls_a_tool_and_uses_its_answer(model: OpenAIChatModel, question: str) -> None:
    cities: list[str] = []

    def get_weather_of(city: str) -> str:
        cities.append(city)
        return get_weather(city)

    agent = Agent(model, model_settings={"max_tokens": 80, "temperature": 0})
    agent.tool_plain(name="get_weather", description="The weather of a city.")(get_weather_of)
    answer = agent.run_sync(question)
    assert cities == ["Paris"]
    assert "sunny" in answer.output


def test_a_refusal_reaches_the_caller(model: OpenAIChatModel) -> None:
    with pytest.raises(ModelHTTPError, match="temperature"):
        Agent(model, model_settings={"temperature": -1.0}).run_sync(QUESTION)
