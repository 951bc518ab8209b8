"""POST /v1/chat/completions: answers equal the library's, whole and streamed, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import pytest

from teachllm import LLM, SamplingParams
from tests.server.fake_engine import FakeEngineClient, Server, error_of, serving

PATH = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def text_of(found: list[dict[str, Any]], index: int = 0) -> str:
    deltas = [choice["delta"] for chunk in found for choice in chunk["choices"] if choice["index"] == index]
    return "".join(delta.get("content") or "" for delta in deltas)


def test_an_answer_is_the_library_s(server: Server, llm: LLM) -> None:
    whole = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)[0]
    answer = server.post(PATH, {"model": "teachlm", "messages": QUESTION, "temperature": 0}).json()
    assert answer["object"] == "chat.completion" and answer["model"] == "teachlm"
    assert answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == whole.outputs[0].text
    assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("stop", 0, None)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(whole.prompt_token_ids)
    assert usage["completion_tokens"] == len(whole.outputs[0].token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_stream_is_the_same_text_in_pieces_under_one_id(server: Server) -> None:
    plain = {"messages": QUESTION, "temperature": 0, "max_tokens": 20}
    request = plain | {"stream_options": {"include_usage": True}}
    whole = server.post(PATH, plain).json()
    found = server.stream(PATH, request)
    assert text_of(found) == whole["choices"][0]["message"]["content"]
    assert len(found) > 10
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in found}) == 1
    assert found[0]["object"] == "chat.completion.chunk"
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    reasons = [choice["finish_reason"] for chunk in found for choice in chunk["choices"]]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    *others, last = found
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in others)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]


def test_without_stream_options_no_chunk_tells_the_usage(server: Server) -> None:
    found = server.stream(PATH, {"messages": QUESTION, "max_tokens": 3})
    assert all("usage" not in chunk and chunk["choices"] for chunk in found)


def test_continuous_usage_counts_up(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = server.stream(PATH, {"messages": QUESTION, "max_tokens": 5, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts) and counts[-1] == 5


def test_several_answers_come_under_their_index_and_a_seed_repeats_them(server: Server) -> None:
    request = {"messages": QUESTION, "n": 3, "temperature": 5.0, "seed": -7, "max_tokens": 8}
    whole = server.post(PATH, request).json()["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in whole]
    assert len(set(texts)) > 1
    found = server.stream(PATH, request)
    assert [text_of(found, index) for index in range(3)] == texts


def test_a_second_question_finds_its_beginning_in_the_cache(server: Server) -> None:
    request = {"messages": [{"role": "user", "content": "Please tell me about blocks. " * 20}], "max_tokens": 1}
    request["cache_salt"] = "mine"
    cached = [
        server.post(PATH, each).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for each in (request, request, request | {"cache_salt": "yours"})
    ]
    assert cached[0] == 0 and cached[1] > 50 and cached[2] == 0


def test_logprobs_name_every_token_and_the_likeliest_beside_it(server: Server) -> None:
    request = {"messages": QUESTION, "max_tokens": 4, "logprobs": True, "top_logprobs": 2, "temperature": 0}
    [choice] = server.post(PATH, request).json()["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        first, second = entry["top_logprobs"]
        assert first["token"] == entry["token"]  # greedy
        assert 0 >= first["logprob"] >= second["logprob"] >= -9999
    found = server.stream(PATH, request)
    streamed = [each["logprobs"]["content"] for chunk in found for each in chunk["choices"] if each["logprobs"]]
    assert [entry["token"] for entries in streamed for entry in entries] == [entry["token"] for entry in content]
    [choice] = server.post(PATH, request | {"top_logprobs": 0}).json()["choices"]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])


def test_token_ids_and_prompt_logprobs_come_on_request(server: Server, llm: LLM) -> None:
    expected = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0]
    request = {"messages": QUESTION, "max_tokens": 5, "return_token_ids": True, "temperature": 0}
    answer = server.post(PATH, request | {"prompt_logprobs": 1}).json()
    assert answer["prompt_token_ids"] == expected.prompt_token_ids
    assert answer["choices"][0]["token_ids"] == expected.outputs[0].token_ids
    assert answer["prompt_logprobs"][0] is None
    for token_id, entry in zip(expected.prompt_token_ids[1:], answer["prompt_logprobs"][1:], strict=True):
        assert entry[str(token_id)]["rank"] >= 1
    found = server.stream(PATH, request)
    assert found[0]["prompt_token_ids"] == expected.prompt_token_ids
    ids = [each for chunk in found for choice in chunk["choices"] for each in choice.get("token_ids", ())]
    assert ids == expected.outputs[0].token_ids


def test_an_empty_list_of_calls_reaches_no_template(engine: tuple[Any, Any]) -> None:
    """Clients send back what they were given, and templates take any list for calls."""
    template = "{% for m in messages %}{% if m.tool_calls is defined %}calls{% endif %}{{ m.content }}{% endfor %}"
    messages = [*QUESTION, {"role": "assistant", "content": "A cache.", "tool_calls": []}]
    with serving(engine[0], chat_template=template) as server:
        tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
        prompt = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert prompt == "What is a KV cache?A cache."


def test_stop_strings_end_an_answer_and_are_told(server: Server) -> None:
    request = {"messages": QUESTION, "stop": ["attention"], "temperature": 0}
    [choice] = server.post(PATH, request).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "attention")
    assert "attention" not in choice["message"]["content"]
    assert text_of(server.stream(PATH, request)) == choice["message"]["content"]


def test_content_in_parts_and_answers_of_tools_are_understood(server: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "How is "}, {"type": "text", "text": "the weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    response = server.post("/tokenize", {"messages": messages})
    text = server.post("/detokenize", {"tokens": response.json()["tokens"]}).json()["prompt"]
    assert "How is the weather?" in text and '"arguments": {"city": "Oslo"}' in text and "rain" in text
    assert server.post(PATH, {"messages": messages, "max_tokens": 2}).status_code == 200
    broken = [*messages[:2], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]
    assert "JSON object" in error_of(server.post(PATH, {"messages": broken}), 400)["message"]


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": None}, 400, "messages"),
        ({"messages": [{"role": "", "content": "x"}]}, 400, "role"),
        ({"messages": [{"role": "x" * 65, "content": "x"}]}, 400, "role"),
        ({"messages": [{"role": "user"}]}, 400, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text"),
        ({"model": "gpt"}, 404, "gpt"),
        ({"max_tokens": 5000}, 400, "5014"),
        ({"max_completion_tokens": 1024}, 400, "max_model_len=1024"),
        ({"top_logprobs": 2}, 400, "logprobs to true"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs=21 is more"),
        ({"stream_options": {"include_usage": True}}, 400, "stream"),
        ({"stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs"),
        ({"chat_template": "{{ messages }}"}, 400, "--trust-request-chat-template"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
        ({"tools": TOOLS}, 400, "--enable-auto-tool-choice"),
        ({"tool_choice": "required"}, 400, "add tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, 501, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}, 501, "weather"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "time"}}}, 400, "time"),
        ({"response_format": {"type": "json_object"}}, 501, "structured output"),
        ({"response_format": {"type": "json_schema"}}, 400, "json_schema"),
        ({"structured_outputs": {"regex": "a+"}}, 501, "structured output"),
        ({"structured_outputs": {"regex": "a+", "choice": ["a"]}}, 400, "exactly one"),
        ({"use_beam_search": True}, 501, "beam search"),
    ],
)
def test_what_cannot_be_answered_says_why(server: Server, changes: dict[str, Any], status: int, said: str) -> None:
    message = error_of(server.post(PATH, {"messages": QUESTION, "max_tokens": 1} | changes), status)["message"]
    assert said in message
    assert server.post(PATH, {"messages": QUESTION, "max_tokens": 1}).status_code == 200


def test_calls_of_tools_are_told_apart_from_text_whole_and_streamed() -> None:
    words = ["Let me look. ", *CALL]
    with serving(FakeEngineClient(words), enable_auto_tool_choice=True, tool_call_parser="hermes") as server:
        request = {"messages": QUESTION, "tools": TOOLS}
        [choice] = server.post(PATH, request).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"].strip() == "Let me look."
        [call] = choice["message"]["tool_calls"]
        assert call["id"] and call["type"] == "function"
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
        found = server.stream(PATH, request)
        deltas = [choice["delta"] for chunk in found for choice in chunk["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Oslo"}'
        assert [call["function"].get("name") for call in calls] == ["weather"] + [None] * (len(calls) - 1)
        assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
        [choice] = server.post(PATH, request | {"tool_choice": "none"}).json()["choices"]
        assert choice["message"]["content"] == "".join(words) and choice["finish_reason"] == "stop"
        [choice] = server.post(PATH, {"messages": QUESTION}).json()["choices"]
        assert choice["message"]["content"] == "".join(words)


def test_only_the_first_call_counts_where_calls_may_not_be_parallel() -> None:
    with serving(
        FakeEngineClient([CALL, "\n", CALL]), enable_auto_tool_choice=True, tool_call_parser="hermes"
    ) as server:
        request = {"messages": QUESTION, "tools": TOOLS}
        assert len(server.post(PATH, request).json()["choices"][0]["message"]["tool_calls"]) == 2
        request["parallel_tool_calls"] = False
        assert len(server.post(PATH, request).json()["choices"][0]["message"]["tool_calls"]) == 1


def test_a_request_s_own_template_runs_where_it_is_trusted(engine: tuple[Any, Any]) -> None:
    with serving(engine[0], trust_request_chat_template=True, chat_template="served {{ x }}") as server:
        request: dict[str, Any] = {"messages": QUESTION, "chat_template_kwargs": {"x": "well"}}
        tokens = server.post("/tokenize", request).json()["tokens"]
        assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "served well"
        request["chat_template"] = "own {{ x }}"
        tokens = server.post("/tokenize", request).json()["tokens"]
        assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "own well"
        request["chat_template"] = "{{ ''.__class__.__mro__ }}"
        assert "template" in error_of(server.post("/tokenize", request), 400)["message"]


def test_without_a_limit_of_logprobs_every_number_is_answered() -> None:
    with serving(FakeEngineClient(max_logprobs=-1)) as server:
        for more in ({}, {"logprobs": True, "top_logprobs": 50}):
            assert server.post(PATH, {"messages": QUESTION, "max_tokens": 2} | more).status_code == 200


def test_null_content_is_an_empty_text_for_a_template_that_fails_with_it_and_null_for_others(
    engine: tuple[Any, Any],
) -> None:
    adds = "{% for m in messages %}{{ '<' + m['content'] + '>' }}{% endfor %}"
    asks = "{% for m in messages %}{% if m['content'] is none %}none{% endif %}{% endfor %}"
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    without = ({"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "narrator"})
    for template, expected in ((adds, "<What is a KV cache?><>"), (asks, "none")):
        with serving(engine[0], chat_template=template) as server:
            for message in without:
                tokens = server.post("/tokenize", {"messages": [*QUESTION, message]}).json()["tokens"]
                assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == expected


def test_a_template_gets_integers_of_more_than_64_bits(engine: tuple[Any, Any]) -> None:
    with serving(engine[0], chat_template="{{ messages[0]['n'] }}") as server:
        tokens = server.post("/tokenize", {"messages": [QUESTION[0] | {"n": 2**70}]}).json()["tokens"]
        assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == str(2**70)
