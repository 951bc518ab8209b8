"""OpenAI's own client, as it is installed, against a server with the embedded model.

What is written greedily has to be what `LLM` writes with the same settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from teachllm import LLM, SamplingParams
from teachllm.engine.async_llm import AsyncLLM
from teachllm.outputs import CompletionOutput
from tests.server.conftest import Stats, running_engine
from tests.server.fake_engine import Server, serving
from tests.waiting import HANG_SECONDS, wait_for

KEY = "secret"
MODEL, ALIAS = "teachlm", "alias"
MAX_NUM_SEQS, MAX_QUEUED = 16, 4
PROMPT = "A KV cache keeps"
QUESTION: list[Any] = [{"role": "user", "content": "What is a KV cache?"}]
LONG = "The prefix of a prompt is computed once. " * 8
ENDLESS: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
GREEDY = SamplingParams(temperature=0, max_tokens=6)

TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[AsyncLLM, Stats]]:
    with running_engine(max_num_seqs=MAX_NUM_SEQS) as found:
        yield found


@pytest.fixture(scope="module")
def server(engine: tuple[AsyncLLM, Stats]) -> Iterator[Server]:
    engine_client, stats = engine
    limits = {"max_queued_requests": MAX_QUEUED, "tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    with serving(engine_client, served_model_names=(MODEL, ALIAS), api_keys=(KEY,), **limits) as running:
        stats.sink = running.service.metrics.on_step
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=HANG_SECONDS) as client:
        yield client


def completed(llm: LLM, prompt: str, params: SamplingParams = GREEDY) -> CompletionOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def chatted(llm: LLM, messages: list[Any], params: SamplingParams = GREEDY) -> CompletionOutput:
    return llm.chat(messages, params, use_tqdm=False)[0].outputs[0]


def said(chunks: list[Any], index: int = 0) -> str:
    """What one choice of a streamed conversation comes to."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def written(chunks: list[Any], index: int = 0) -> str:
    """The same of a streamed completion."""
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


def reason(chunks: list[Any], index: int = 0) -> str:
    """Why it ended, which has to be said once."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    [found] = [choice.finish_reason for choice in choices if choice.finish_reason is not None]
    return found


def until_idle(server: Server) -> None:
    """Wait until the engine holds nothing any more."""

    def is_idle() -> bool:
        lines = server.http.get("/metrics").text.splitlines()
        values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("teachllm:")}
        return not any(
            values[f"teachllm:{name}"]
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        )

    wait_for(is_idle)


# -- texts -------------------------------------------------------------------------------------------------


def test_a_completion_is_the_library_s_whole_and_streamed(client: OpenAI, llm: LLM) -> None:
    expected = completed(llm, PROMPT)
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**options)
    assert (whole.object, whole.model, whole.id[:5]) == ("text_completion", MODEL, "cmpl-")
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected.text, expected.finish_reason)
    assert whole.usage is not None and whole.usage.completion_tokens == len(expected.token_ids)
    chunks = list(client.completions.create(**options, stream=True))
    assert len(chunks) > 1
    assert (written(chunks), reason(chunks)) == (expected.text, expected.finish_reason)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_a_conversation_is_the_library_s_whole_and_streamed(client: OpenAI, llm: LLM) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": [{"type": "text", "text": "What is a KV cache?"}]},
        {"role": "assistant", "content": "A store of keys and values."},
        {"role": "user", "content": "And a prefix cache?"},
    ]
    plain = [{**message, "content": message["content"]} for message in messages]
    plain[1]["content"] = "What is a KV cache?"
    expected = chatted(llm, plain)
    options: dict[str, Any] = {"model": ALIAS, "messages": messages, "max_completion_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert (whole.object, whole.model, whole.id[:9]) == ("chat.completion", ALIAS, "chatcmpl-")
    [choice] = whole.choices
    assert (choice.message.role, choice.message.tool_calls, choice.message.refusal) == ("assistant", None, None)
    assert (choice.message.content, choice.finish_reason) == (expected.text, expected.finish_reason)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert (said(chunks), reason(chunks)) == (expected.text, expected.finish_reason)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1


def test_a_text_ends_at_a_stop_string(client: OpenAI, llm: LLM) -> None:
    for text, ask in (
        (completed(llm, PROMPT).text, _completion_until),
        (chatted(llm, QUESTION).text, _chat_until),
    ):
        stop = text[10:14]
        before = text[: text.index(stop)]
        for given, stream in ((stop, False), (["never written", stop], True)):
            assert ask(client, given, stream) == (before, "stop")
            assert ask(client, given, stream, include_stop_str_in_output=True) == (before + stop, "stop")
    choice = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=6, stop=" ").choices[0]
    assert choice.model_extra is not None and choice.model_extra["stop_reason"] == " "


def _completion_until(client: OpenAI, stop: Any, stream: bool, **extra: Any) -> tuple[str, str]:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 6, "stop": stop}
    if stream:
        chunks = list(client.completions.create(**options, stream=True, extra_body=extra))
        return written(chunks), reason(chunks)
    choice = client.completions.create(**options, extra_body=extra).choices[0]
    return choice.text, choice.finish_reason


def _chat_until(client: OpenAI, stop: Any, stream: bool, **extra: Any) -> tuple[str | None, str]:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 6, "stop": stop}
    if stream:
        chunks = list(client.chat.completions.create(**options, stream=True, extra_body=extra))
        return said(chunks), reason(chunks)
    choice = client.chat.completions.create(**options, extra_body=extra).choices[0]
    return choice.message.content, choice.finish_reason


# -- what is told beside the text --------------------------------------------------------------------------


def test_logprobs_of_a_completion_are_the_library_s(client: OpenAI, llm: LLM) -> None:
    expected = completed(llm, PROMPT, SamplingParams(temperature=0, max_tokens=8, logprobs=2))
    assert expected.logprobs is not None
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 2}
    told = client.completions.create(**options).choices[0].logprobs
    assert told is not None and "".join(told.tokens or ()) == expected.text
    values = [entry[token_id].logprob for entry, token_id in zip(expected.logprobs, expected.token_ids, strict=True)]
    assert told.token_logprobs == pytest.approx(values, abs=1e-4)
    tokens = told.tokens or []
    for token, value, top in zip(tokens, values, told.top_logprobs or (), strict=True):
        assert len(top) == 2 and top[token] == pytest.approx(value, abs=1e-4) == max(top.values())
    assert told.text_offset == [len("".join(tokens[:i])) for i in range(len(tokens))]
    parts = [choice.logprobs for chunk in client.completions.create(**options, stream=True) for choice in chunk.choices]
    assert [token for part in parts if part for token in part.tokens or ()] == told.tokens


def test_logprobs_of_a_conversation_are_the_library_s(client: OpenAI, llm: LLM) -> None:
    expected = chatted(llm, QUESTION, SamplingParams(temperature=0, max_tokens=8, logprobs=3))
    assert expected.logprobs is not None
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    options |= {"logprobs": True, "top_logprobs": 3}
    told = client.chat.completions.create(**options).choices[0].logprobs
    assert told is not None and told.content is not None
    assert "".join(entry.token for entry in told.content) == expected.text
    for entry, given, token_id in zip(told.content, expected.logprobs, expected.token_ids, strict=True):
        assert entry.logprob == pytest.approx(given[token_id].logprob, abs=1e-4)
        assert bytes(entry.bytes or ()).decode() == entry.token
        ranked = sorted((each.logprob for each in given.values()), reverse=True)
        assert [each.logprob for each in entry.top_logprobs] == pytest.approx(ranked[:3], abs=1e-4)
    chunks = list(client.chat.completions.create(**options, stream=True))
    parts = [choice.logprobs.content or [] for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [entry.token for part in parts for entry in part] == [entry.token for entry in told.content]
    plain = client.chat.completions.create(**options | {"top_logprobs": openai.omit}).choices[0].logprobs
    assert plain is not None and plain.content is not None and plain.content[0].top_logprobs == []


def test_usage_counts_tokens_and_those_that_were_cached(client: OpenAI, llm: LLM) -> None:
    num_prompt = len(llm.generate(LONG, GREEDY, use_tqdm=False)[0].prompt_token_ids)
    options: dict[str, Any] = {"model": MODEL, "prompt": LONG, "max_tokens": 6, "temperature": 0}
    options["extra_body"] = {"cache_salt": "usage", "ignore_eos": True}
    num_cached = []
    for _ in range(2):
        usage = client.completions.create(**options).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        assert counts == (num_prompt, 6, num_prompt + 6)
        num_cached.append(usage.prompt_tokens_details.cached_tokens)
    assert num_cached[0] == 0 and num_cached[1] == (num_prompt - 1) // 16 * 16
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == [] and chunks[-1].usage == usage


# -- models, ids, raw answers ------------------------------------------------------------------------------


def test_models_are_listed_and_looked_up(client: OpenAI) -> None:
    listed = list(client.models.list())
    assert [(model.id, model.object, model.owned_by) for model in listed] == [
        (name, "model", "teachllm") for name in (MODEL, ALIAS)
    ]
    found = client.models.retrieve(ALIAS)
    assert found == listed[1]
    assert found.model_extra is not None and found.model_extra["max_model_len"] == 1024


def test_the_client_sees_the_request_s_id_in_answers_and_in_errors(client: OpenAI) -> None:
    own = {"X-Request-Id": "job-7"}
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 1, "extra_headers": own}
    raw = client.chat.completions.with_raw_response.create(**options)
    answer = raw.parse()
    assert (raw.status_code, raw.request_id, raw.headers["x-request-id"]) == (200, "job-7", "job-7")
    assert (answer._request_id, answer.id) == ("job-7", "chatcmpl-job-7")
    made = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
    assert made._request_id and made.id == f"cmpl-{made._request_id}"
    with client.completions.with_streaming_response.create(
        model=MODEL, prompt=PROMPT, max_tokens=2, stream=True, extra_headers=own
    ) as response:
        assert response.request_id == "job-7"
        assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=-1, extra_headers=own)
    assert refused.value.request_id == "job-7"


# -- errors ------------------------------------------------------------------------------------------------


def refused(client: OpenAI, kind: type[openai.APIStatusError], path: str, content: Any) -> openai.APIStatusError:
    """The error that the client makes of an answer."""
    with pytest.raises(openai.APIStatusError) as caught:
        client.post(path, body=content, cast_to=object)
    assert type(caught.value) is kind
    assert caught.value.code == str(caught.value.status_code)
    return caught.value


@pytest.mark.parametrize(
    ("field", "content"),
    [
        ("temperature", {"prompt": "a", "temperature": -1}),
        ("prompt", {}),
        ("messages", {"messages": [{"role": 7, "content": "a"}]}),
        ("tool_choice", {"messages": QUESTION, "tool_choice": "required"}),
    ],
)
def test_what_is_malformed_is_a_bad_request_that_names_its_field(
    client: OpenAI, field: str, content: dict[str, Any]
) -> None:
    path = "/chat/completions" if "messages" in content else "/completions"
    error = refused(client, openai.BadRequestError, path, {"model": MODEL, **content})
    assert (error.status_code, error.type, error.param) == (400, "BadRequestError", field)
    assert error.message and isinstance(error.body, dict) and error.body["message"]


@pytest.mark.parametrize(
    ("field", "feature", "content"),
    [
        ("response_format", "json_schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}),
        ("tool_choice", "required", {"tools": [TOOL], "tool_choice": "required"}),
        ("use_beam_search", "beam search", {"use_beam_search": True}),
    ],
)
def test_what_is_not_built_is_named(client: OpenAI, field: str, feature: str, content: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": QUESTION, **content}
    error = refused(client, openai.InternalServerError, "/chat/completions", body)
    assert (error.status_code, error.type, error.param) == (501, "NotImplementedError", field)
    assert feature in error.message


def test_who_has_no_key_is_not_let_in(client: OpenAI) -> None:
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError) as caught:
        stranger.models.list()
    assert (caught.value.code, caught.value.type) == ("401", "AuthenticationError")
    with pytest.raises(openai.AuthenticationError):
        stranger.completions.create(model=MODEL, prompt="a", stream=True)


def test_what_does_not_exist_is_not_found(client: OpenAI) -> None:
    body = {"model": "gpt-4", "messages": QUESTION}
    error = refused(client, openai.NotFoundError, "/chat/completions", body)
    assert (error.type, error.param) == ("NotFoundError", "model") and "gpt-4" in error.message
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        client.embeddings.create(model=MODEL, input="a")


def test_who_comes_when_the_queue_is_full_may_try_again_later(server: Server, client: OpenAI, llm: LLM) -> None:
    until_idle(server)
    limit = MAX_NUM_SEQS + MAX_QUEUED
    with client.completions.create(**ENDLESS, n=limit, stream=True) as stream:
        next(stream)
        error = refused(client, openai.RateLimitError, "/completions", {"model": MODEL, "prompt": "a"})
        assert error.type == "RateLimitError" and int(error.response.headers["retry-after"]) > 0
    patient = client.with_options(max_retries=10)  # by itself, it comes back
    answer = patient.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0)
    assert answer.choices[0].text == completed(llm, PROMPT).text


# -- many at once, and those who leave ---------------------------------------------------------------------


def test_many_streams_at_once_are_each_what_they_are_alone(server: Server, client: OpenAI, llm: LLM) -> None:
    until_idle(server)
    questions = [[{"role": "user", "content": f"What is step {i} of inference?"}] for i in range(6)]
    expected = [output.outputs[0].text for output in llm.chat(questions, GREEDY, use_tqdm=False)]

    async def ask(client: openai.AsyncOpenAI, messages: Any) -> str:
        options: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0, "stream": True}
        stream = await client.chat.completions.create(messages=messages, **options)
        return said([chunk async for chunk in stream])

    async def ask_all() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=HANG_SECONDS) as client:
            return await asyncio.gather(*(ask(client, messages) for messages in questions))

    assert asyncio.run(ask_all()) == expected


def test_a_stream_that_is_closed_early_holds_nothing_any_more(server: Server, client: OpenAI) -> None:
    with client.completions.create(**ENDLESS, n=4, stream=True) as stream:
        for _ in range(3):
            next(stream)
    until_idle(server)
    messages: list[Any] = [{"role": "user", "content": "a"}]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(chat)
    chat.close()
    until_idle(server)


def test_a_client_that_runs_out_of_time_holds_nothing_any_more(server: Server, client: OpenAI, llm: LLM) -> None:
    hurried = client.with_options(timeout=0.2)
    with pytest.raises(openai.APITimeoutError):
        hurried.completions.create(**ENDLESS, n=8)
    until_idle(server)
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0)
    assert answer.choices[0].text == completed(llm, PROMPT).text
