"""Fields of vLLM's and the rarer ones of OpenAI's: each does what its documentation says."""

from __future__ import annotations

from typing import Any

import pytest

from teachllm import LLM
from teachllm.server.openai.messages import Messages
from teachllm.server.openai.prompts import _for_template
from tests.server.conftest import running_engine
from tests.server.fake_engine import FakeEngineClient, Server, error_of, serving

TEXT, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
QUESTION = {"role": "user", "content": "What is a KV cache?"}
BEGUN = [QUESTION, {"role": "assistant", "content": "A KV cache keeps"}]
SHOWS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ documents }}{{ reasoning_effort }}{{ kind }}"
)


def tokens(server: Server, **fields: Any) -> list[int]:
    found: list[int] = server.post(TOKENIZE, fields).json()["tokens"]
    return found


def test_an_answer_goes_on_with_the_last_message(server: Server, llm: LLM) -> None:
    assert llm.tokenizer is not None
    begun = llm.tokenizer.render_chat_template(BEGUN, continue_final_message=True)
    header = llm.tokenizer.render_chat_template(BEGUN[:1])
    assert begun == header + "A KV cache keeps"
    request = {"messages": BEGUN, "continue_final_message": True} | GREEDY
    [plain] = server.post(CHAT, request).json()["choices"]
    [completed] = server.post(TEXT, {"prompt": begun, "add_special_tokens": False} | GREEDY).json()["choices"]
    assert plain["message"]["content"] == completed["text"]
    [echoed] = server.post(CHAT, request | {"echo": True}).json()["choices"]
    assert echoed["message"]["content"] == "A KV cache keeps" + completed["text"]
    chunks = [chunk["choices"][0]["delta"] for chunk in server.stream(CHAT, request | {"echo": True})]
    assert chunks[0] == {"role": "assistant", "content": "A KV cache keeps"}
    assert "".join(delta.get("content", "") for delta in chunks) == echoed["message"]["content"]
    error = error_of(server.post(CHAT, request | {"add_generation_prompt": True}), 400)
    assert error["param"] == "continue_final_message"
    without_text = [QUESTION, {"role": "assistant", "content": None}]
    assert "no text to go on with" in error_of(server.post(CHAT, request | {"messages": without_text}), 400)["message"]


def test_a_prompt_is_cut_to_its_end(server: Server) -> None:
    ids = tokens(server, prompt="one two three four five six")
    for prompt in ("one two three four five six", ids, ["one two three four five six"], [ids]):
        request = {"prompt": prompt, "truncate_prompt_tokens": 3, "return_token_ids": True, "echo": True} | GREEDY
        answer = server.post(TEXT, request).json()
        assert answer["choices"][0]["prompt_token_ids"] == ids[-3:] and answer["usage"]["prompt_tokens"] == 3
        assert answer["choices"][0]["text"].startswith(
            server.post("/detokenize", {"tokens": ids[-3:]}).json()["prompt"]
        )
    whole = tokens(server, messages=[QUESTION])
    assert tokens(server, messages=[QUESTION], truncate_prompt_tokens=4) == whole[-4:]
    answer = server.post(CHAT, {"messages": [QUESTION], "truncate_prompt_tokens": 4, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == 4
    fits = server.post(TEXT, {"prompt": [5] * 1023, "truncate_prompt_tokens": -1, "max_tokens": 1})
    assert fits.json()["usage"]["prompt_tokens"] == 1023
    for wrong in (0, -2):
        assert error_of(server.post(TEXT, {"prompt": "a", "truncate_prompt_tokens": wrong}), 400)["param"]


def test_documents_effort_and_usual_variables_reach_the_template(server: Server) -> None:
    usual = {"kind": "usual", "reasoning_effort": "x"}
    with serving(server.engine_client, chat_template=SHOWS, default_chat_template_kwargs=usual) as other:

        def text(**fields: Any) -> str:
            found = tokens(other, messages=[{"role": "wizard", "content": "Hi"}], **fields)
            rendered: str = other.post("/detokenize", {"tokens": found}).json()["prompt"]
            return rendered

        assert text() == "[wizard:Hi]Nonexusual"
        with_header = tokens(other, messages=[QUESTION], add_generation_prompt=True)
        assert tokens(other, messages=[QUESTION]) == with_header
        assert text(documents=[{"text": "d"}]) == "[wizard:Hi][{'text': 'd'}]xusual"
        assert text(reasoning_effort="low") == "[wizard:Hi]Nonelowusual"
        own = {"kind": "own", "reasoning_effort": "high"}
        assert text(chat_template_kwargs=own, reasoning_effort="low") == "[wizard:Hi]Nonehighown"


def test_a_refusal_that_is_sent_back_is_text() -> None:
    from pydantic import TypeAdapter

    sent = [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "But"}]}]
    [message] = TypeAdapter(Messages).validate_python(sent)
    parts = [{"type": "text", "text": "No."}, {"type": "text", "text": "But"}]
    assert _for_template(message)["content"] == parts


def test_of_the_tools_those_that_are_allowed_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("one", "other")]
    engine_client = FakeEngineClient()
    seen: list[Any] = []
    render = engine_client.tokenizer.render_chat_template
    engine_client.tokenizer.render_chat_template = lambda messages, **given: seen.append(given) or render(messages)

    def allow(name: str, mode: str = "auto") -> dict[str, Any]:
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}}]}
        return {
            "messages": [QUESTION],
            "tools": tools,
            "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
        }

    options = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with serving(engine_client, **options) as server:
        assert server.post(CHAT, allow("other")).status_code == 200
        assert [tool["function"]["name"] for tool in seen[-1]["tools"]] == ["other"]
        error_of(server.post(CHAT, allow("other", "required")), 501)
        assert "'nobody'" in error_of(server.post(CHAT, allow("nobody")), 400)["message"]


def test_the_first_chunk_counts_no_tokens_and_the_usage_can_be_forced() -> None:
    engine_client = FakeEngineClient()
    request = {"messages": [QUESTION], "n": 2}
    with serving(engine_client, force_include_usage=True) as server:
        assert server.stream(CHAT, request)[-1]["usage"]["completion_tokens"] == 6
        assert server.stream(TEXT, {"prompt": "a"})[-1]["usage"]["completion_tokens"] == 3
    usage = {"include_usage": True, "continuous_usage_stats": True}
    with serving(engine_client) as server:
        found = server.stream(CHAT, request | {"stream_options": usage})
        firsts = [chunk["usage"] for chunk in found if chunk["choices"] and "role" in chunk["choices"][0]["delta"]]
        assert [each["completion_tokens"] for each in firsts] == [0, 0]
        assert firsts[0]["total_tokens"] == firsts[0]["prompt_tokens"] == 1
        assert found[-1]["usage"]["completion_tokens"] == 6


def test_fields_that_clients_read_are_null_where_nothing_asked_for_them(server: Server) -> None:
    answer = server.post(CHAT, {"messages": [QUESTION]} | GREEDY).json()
    assert answer["prompt_logprobs"] is None and answer["prompt_token_ids"] is None
    assert answer["choices"][0]["token_ids"] is None
    [choice] = server.post(TEXT, {"prompt": "a"} | GREEDY).json()["choices"]
    assert [choice[name] for name in ("prompt_logprobs", "token_ids", "prompt_token_ids")] == [None] * 3


def test_the_whole_vocabulary_is_told_only_where_that_is_allowed(server: Server) -> None:
    chat = {"messages": [QUESTION], "logprobs": True, "top_logprobs": -1, "max_tokens": 2}
    text = {"prompt": "a b", "logprobs": -1, "prompt_logprobs": -1, "max_tokens": 2}
    assert error_of(server.post(CHAT, chat), 400)["param"] == "top_logprobs"
    assert error_of(server.post(TEXT, text), 400)["param"] in ("logprobs", "prompt_logprobs")
    settings = {"max_model_len": 64, "num_gpu_blocks_override": 64, "max_logprobs": -1}
    with running_engine(**settings) as (engine, _), serving(engine) as other:
        [choice] = other.post(CHAT, chat).json()["choices"]
        assert {len(token["top_logprobs"]) for token in choice["logprobs"]["content"]} == {engine.vocab_size}
        [choice] = other.post(TEXT, text).json()["choices"]
        assert {len(entry) for entry in choice["prompt_logprobs"] if entry} == {engine.vocab_size}


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud800"}', '{"a": NaN}', '{"a": Infinity}', '{"a": 1e999}', "[1]", "{", "[" * 5000]
)
def test_broken_arguments_of_a_call_are_refused(server: Server, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    template = "{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    with serving(server.engine_client, chat_template=template) as other:
        error_of(other.post(CHAT, {"messages": messages} | GREEDY), 400)


def test_a_wrong_query_gets_the_error_object() -> None:
    from teachllm.server.trace_endpoint import TraceHub

    with serving(FakeEngineClient(), TraceHub(), trace_endpoint=True) as server:
        assert error_of(server.http.get("/trace?replica=one"), 400)["param"] == "replica"


def test_refusals_and_parameters_are_counted(server: Server) -> None:
    def values() -> dict[str, float]:
        lines = server.service.metrics.text().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    before = values()
    error_of(server.post(TEXT, {"prompt": "a", "n": 0}), 400)
    error_of(server.post(TEXT, {"prompt": "a", "model": "other"}), 404)
    many = [[5]] * 39 + [[4096]]  # there is no such token: the engine refuses it
    error_of(server.post(TEXT, {"prompt": many, "max_tokens": 50}), 400)
    assert server.post(TEXT, {"prompt": "a", "n": 2, "temperature": 1} | {"max_tokens": 5}).status_code == 200
    server.until(lambda: server.service.num_open == 0)
    grown = {name: value - before.get(name, 0) for name, value in values().items()}
    label = 'model_name="teachlm"'
    assert grown[f'teachllm:requests_refused_total{{{label},reason="BadRequestError",status="400"}}'] == 2
    assert grown[f'teachllm:requests_refused_total{{{label},reason="NotFoundError",status="404"}}'] == 1
    assert grown[f"teachllm:request_params_n_sum{{{label}}}"] == 2
    assert grown[f"teachllm:request_params_max_tokens_sum{{{label}}}"] == 5
    error = f'teachllm:request_success_total{{finished_reason="error",{label}}}'
    assert grown.get(error, 0) == 0
    assert 1 <= grown[f"teachllm:request_max_num_generation_tokens_sum{{{label}}}"] <= 5
    assert grown[f"teachllm:request_preemptions_count{{{label}}}"] == 1
    [info] = [name for name in values() if name.startswith("teachllm:cache_config_info")]
    assert f'num_gpu_blocks="{server.engine_client.num_blocks}"' in info and 'block_size="16"' in info
