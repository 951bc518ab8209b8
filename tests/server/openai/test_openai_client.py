"""OpenAI's own client, as it is installed, against the server as its users start it: a process of its own.

What is written greedily has to be what `LLM` writes with the same settings.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI

from teachllm import LLM, SamplingParams
from teachllm.outputs import CompletionOutput
from tests.server.checkpoints import reciting_checkpoint
from tests.server.door import PATIENCE
from tests.server.process import Process, started

KEY = "secret"
MODEL, ALIAS = "teachlm", "alias"
MAX_NUM_SEQS, MAX_QUEUED = 16, 4
PROMPT = "A KV cache keeps"
QUESTION: list[Any] = [{"role": "user", "content": "What is a KV cache?"}]
LONG = "The prefix of a prompt is computed once. " * 8
ENDLESS: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
GREEDY = SamplingParams(temperature=0, max_tokens=24)

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
CITIES = ["Paris", "Oslo é🎲"]
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    names = ("--served-model-name", MODEL, "--served-model-name", ALIAS, "--api-key", KEY)
    limits = ("--max-model-len", "1024", "--max-num-seqs", MAX_NUM_SEQS, "--max-queued-requests", MAX_QUEUED)
    with started(MODEL, "--device", "cpu", *names, *map(str, limits), *TOOLS) as process:
        process.event("ready")
        yield process


@pytest.fixture(scope="module")
def client(process: Process) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{process.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(MODEL, device="cpu", max_model_len=1024, max_num_seqs=MAX_NUM_SEQS)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client of a server whose model calls tools, whatever it is asked."""
    checkpoint = reciting_checkpoint(tmp_path_factory.mktemp("reciting"), CALLS)
    arguments = ("--device", "cpu", "--max-model-len", "1024", "--served-model-name", MODEL, *TOOLS)
    with started(checkpoint, *arguments) as process:
        process.event("ready")
        with OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
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


def until_idle(process: Process) -> None:
    """Waits until the engine holds nothing any more; each look is a request, so that it cannot spin."""
    for _ in range(2000):
        lines = process.http.get("/metrics").text.splitlines()
        values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("teachllm:")}
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        if not any(values[f"teachllm:{name}"] for name in names):
            return
    raise AssertionError(f"requests are left in the engine: {values}")


# -- texts -------------------------------------------------------------------------------------------------


def test_a_completion_is_the_library_s_whole_and_streamed(client: OpenAI, llm: LLM) -> None:
    expected = completed(llm, PROMPT)
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
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
    options: dict[str, Any] = {"model": ALIAS, "messages": messages, "max_completion_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert (whole.object, whole.model, whole.id[:9]) == ("chat.completion", ALIAS, "chatcmpl-")
    [choice] = whole.choices
    assert (choice.message.role, choice.message.tool_calls, choice.message.refusal) == ("assistant", None, None)
    assert (choice.message.content, choice.finish_reason) == (expected.text, expected.finish_reason)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert (said(chunks), reason(chunks)) == (expected.text, expected.finish_reason)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1


def test_an_answer_may_end_by_itself(client: OpenAI, llm: LLM) -> None:
    expected = chatted(llm, QUESTION, SamplingParams(temperature=0, max_tokens=900))
    assert expected.finish_reason == "stop"
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    answer = client.chat.completions.create(**options)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected.text, "stop")
    with client.chat.completions.stream(**options) as stream:  # the client's helper puts the answer together
        final = stream.get_final_completion()
    assert final.choices[0].message.content == expected.text


def test_several_prompts_and_several_completions_are_numbered(client: OpenAI, llm: LLM) -> None:
    prompts = [PROMPT, "Continuous batching means"]
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=24, temperature=0)
    assert [choice.text for choice in answer.choices] == [completed(llm, prompt).text for prompt in prompts]
    options: dict[str, Any] = {"model": MODEL, "n": 3, "temperature": 3, "seed": 5, "max_tokens": 12}
    options["extra_body"] = {"ignore_eos": True}
    texts = [choice.text for choice in client.completions.create(**options, prompt=PROMPT).choices]
    assert len(set(texts)) == 3
    chunks = list(client.completions.create(**options, prompt=PROMPT, stream=True))
    assert [written(chunks, i) for i in range(3)] == texts
    choices = client.chat.completions.create(**options, messages=QUESTION).choices
    replies = [choice.message.content for choice in choices]
    assert len(set(replies)) == 3
    chunks = list(client.chat.completions.create(**options, messages=QUESTION, stream=True))
    assert [said(chunks, i) for i in range(3)] == replies
    assert [reason(chunks, i) for i in range(3)] == ["length"] * 3


def test_the_same_seed_writes_the_same_text(client: OpenAI) -> None:
    def texts(seed: int) -> tuple[str, str | None]:
        options: dict[str, Any] = {"model": MODEL, "seed": seed, "temperature": 3, "max_tokens": 12}
        completion = client.completions.create(**options, prompt=PROMPT)
        answer = client.chat.completions.create(**options, messages=QUESTION)
        return completion.choices[0].text, answer.choices[0].message.content

    first, again, other = texts(1), texts(1), texts(2)
    assert first == again
    assert first[0] != other[0] and first[1] != other[1]


def test_a_text_ends_at_a_stop_string(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=200)
    for text, ask in (
        (completed(llm, PROMPT, params).text, _completion_until),
        (chatted(llm, QUESTION, params).text, _chat_until),
    ):
        stop = text[20:26]
        before = text[: text.index(stop)]
        for given in (stop, [stop], ["never written", stop]):
            for stream in (False, True):
                assert ask(client, given, stream) == (before, "stop")
                assert ask(client, given, stream, include_stop_str_in_output=True) == (before + stop, "stop")
    choice = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=200, stop=" ").choices[0]
    assert choice.model_extra is not None and choice.model_extra["stop_reason"] == " "


def _completion_until(client: OpenAI, stop: Any, stream: bool, **extra: Any) -> tuple[str, str]:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 200, "stop": stop}
    if stream:
        chunks = list(client.completions.create(**options, stream=True, extra_body=extra))
        return written(chunks), reason(chunks)
    choice = client.completions.create(**options, extra_body=extra).choices[0]
    return choice.text, choice.finish_reason


def _chat_until(client: OpenAI, stop: Any, stream: bool, **extra: Any) -> tuple[str | None, str]:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 200, "stop": stop}
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


def test_usage_of_a_conversation_is_the_same_whole_and_streamed(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": LONG}], "max_tokens": 6}
    options |= {"temperature": 0, "n": 2, "extra_body": {"cache_salt": "chat usage", "ignore_eos": True}}
    first, again = (client.chat.completions.create(**options).usage for _ in range(2))
    assert first is not None and again is not None and again.prompt_tokens_details is not None
    assert first.completion_tokens == 12 and first.total_tokens == first.prompt_tokens + 12
    assert (again.prompt_tokens_details.cached_tokens or 0) >= first.prompt_tokens - 16
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage == again
    assert all(chunk.usage is None for chunk in chunks[:-1])


# -- tools -------------------------------------------------------------------------------------------------


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


def test_without_tools_or_where_they_are_not_to_be_called_a_call_is_text(caller: OpenAI, client: OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = caller.chat.completions.create(**options, **more).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("".join(CALLS), "stop")
        assert choice.message.tool_calls is None
    choice = client.chat.completions.create(**options, tools=[WEATHER], tool_choice="auto").choices[0]
    assert choice.message.content and choice.message.tool_calls is None  # the embedded model calls nothing


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
        ("max_tokens", {"prompt": "a", "max_tokens": 5000}),
        ("prompt", {}),
        ("prompt", {"prompt": [4096]}),
        ("n", {"prompt": "a", "n": "two"}),
        ("stream_options", {"prompt": "a", "stream_options": {"include_usage": True}}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "nobody", "content": "a"}]}),
        ("top_logprobs", {"messages": QUESTION, "top_logprobs": 2}),
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
        ("response_format", "json_object", {"response_format": {"type": "json_object"}}),
        ("tool_choice", "required", {"tools": [WEATHER], "tool_choice": "required"}),
        (
            "tool_choice",
            "get_weather",
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
        ("structured_outputs", "structured output", {"structured_outputs": {"regex": "a+"}}),
        ("use_beam_search", "beam search", {"use_beam_search": True}),
    ],
)
def test_what_is_not_built_is_named(client: OpenAI, field: str, feature: str, content: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": QUESTION, **content}
    error = refused(client, openai.InternalServerError, "/chat/completions", body)
    assert (error.status_code, error.type, error.param) == (501, "NotImplementedError", field)
    assert feature in error.message


def test_adapters_are_not_built_either(client: OpenAI) -> None:
    for path, content in (("/load_lora_adapter", {"lora_path": "b"}), ("/unload_lora_adapter", {})):
        error = refused(client, openai.InternalServerError, path, {"lora_name": "a", **content})
        assert error.status_code == 501 and "LoRA" in error.message


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


def test_who_comes_when_the_queue_is_full_may_try_again_later(process: Process, client: OpenAI, llm: LLM) -> None:
    until_idle(process)
    limit = MAX_NUM_SEQS + MAX_QUEUED
    with client.completions.create(**ENDLESS, n=limit, stream=True) as stream:
        next(stream)
        error = refused(client, openai.RateLimitError, "/completions", {"model": MODEL, "prompt": "a"})
        assert error.type == "RateLimitError" and int(error.response.headers["retry-after"]) > 0
    patient = client.with_options(max_retries=10)  # by itself, it comes back
    answer = patient.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.choices[0].text == completed(llm, PROMPT).text


# -- many at once, and those who leave ---------------------------------------------------------------------


def test_sixteen_streams_at_once_are_each_what_they_are_alone(process: Process, client: OpenAI, llm: LLM) -> None:
    until_idle(process)
    questions = [[{"role": "user", "content": f"What is step {i} of inference?"}] for i in range(MAX_NUM_SEQS)]
    expected = [output.outputs[0].text for output in llm.chat(questions, GREEDY, use_tqdm=False)]

    async def ask(client: openai.AsyncOpenAI, messages: Any) -> str:
        options: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "temperature": 0, "stream": True}
        stream = await client.chat.completions.create(messages=messages, **options)
        return said([chunk async for chunk in stream])

    async def ask_all() -> list[str]:
        url = f"{process.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=PATIENCE) as client:
            return await asyncio.gather(*(ask(client, messages) for messages in questions))

    assert asyncio.run(ask_all()) == expected


def test_threads_may_share_a_client(client: OpenAI, llm: LLM) -> None:
    def ask(_: int) -> str:
        return client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {completed(llm, PROMPT).text}


def test_a_stream_that_is_closed_early_holds_nothing_any_more(process: Process, client: OpenAI) -> None:
    with client.completions.create(**ENDLESS, n=4, stream=True) as stream:
        for _ in range(3):
            next(stream)
    until_idle(process)
    messages: list[Any] = [{"role": "user", "content": "a"}]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(chat)
    chat.close()
    until_idle(process)


def test_a_client_that_runs_out_of_time_holds_nothing_any_more(process: Process, client: OpenAI, llm: LLM) -> None:
    hurried = client.with_options(timeout=0.2)
    with pytest.raises(openai.APITimeoutError):
        hurried.completions.create(**ENDLESS, n=8)
    until_idle(process)
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.choices[0].text == completed(llm, PROMPT).text


def test_all_that_ended_is_in_the_log_and_nothing_went_wrong(process: Process, client: OpenAI) -> None:
    client.models.list()
    until_idle(process)
    assert process.other == []
    assert [line for line in process.log if line.get("level") in ("ERROR", "CRITICAL")] == []
    paths = {line["path"] for line in process.log if line["event"] == "request"}
    assert "/v1/models" in paths
