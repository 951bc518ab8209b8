"""POST /v1/completions: answers equal the library's, whole and streamed, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from teachllm import LLM, SamplingParams
from teachllm.outputs import CompletionOutput, Logprob, RequestOutput
from teachllm.server.openai.completion_answer import CompletionAnswer, CompletionPrompt
from teachllm.server.openai.logprobs import TokenStyle
from teachllm.server.openai.protocol import CompletionRequest
from teachllm.server.openai.response_context import ResponseContext
from tests.server.fake_engine import Server, error_of

PATH = "/v1/completions"
GREEDY = {"temperature": 0}
PROMPTS = ["A KV cache keeps", "Continuous batching means"]


def texts_of(found: list[dict[str, Any]], count: int) -> list[str]:
    choices = [choice for chunk in found for choice in chunk["choices"]]
    return ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in range(count)]


def test_the_library_and_the_server_complete_alike_and_stop_after_16_tokens(server: Server, llm: LLM) -> None:
    expected = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    answer = server.post(PATH, {"prompt": PROMPTS} | GREEDY).json()
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert [choice["text"] for choice in answer["choices"]] == [output.outputs[0].text for output in expected]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    reasons = [output.outputs[0].finish_reason for output in expected]
    assert [choice["finish_reason"] for choice in answer["choices"]] == reasons
    assert answer["usage"]["prompt_tokens"] == sum(len(output.prompt_token_ids) for output in expected)
    assert texts_of(server.stream(PATH, {"prompt": PROMPTS} | GREEDY), 2) == [
        output.outputs[0].text for output in expected
    ]


def test_a_prompt_may_be_text_or_ids_or_a_list_of_either(server: Server) -> None:
    ids = [server.post("/tokenize", {"prompt": prompt}).json()["tokens"] for prompt in PROMPTS]
    texts = {}
    for kind, prompt in {"text": PROMPTS[0], "texts": PROMPTS[:1], "ids": ids[0], "lists": ids[:1]}.items():
        texts[kind] = server.post(PATH, {"prompt": prompt, "max_tokens": 8, **GREEDY}).json()["choices"][0]["text"]
    assert len(set(texts.values())) == 1
    both = server.post(PATH, {"prompt": ids, "max_tokens": 8, **GREEDY}).json()["choices"]
    assert both[0]["text"] == texts["text"]


def test_choices_are_numbered_by_prompt_and_then_by_completion(server: Server) -> None:
    request = {"prompt": PROMPTS, "n": 2, "temperature": 5, "seed": 1, "max_tokens": 6, "echo": True}
    choices = server.post(PATH, request).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"].startswith(PROMPTS[i // 2]) for i, choice in enumerate(choices)] == [True] * 4
    assert texts_of(server.stream(PATH, request), 4) == [choice["text"] for choice in choices]


def test_echo_of_ids_is_their_text(server: Server) -> None:
    ids = server.post("/tokenize", {"prompt": PROMPTS[0]}).json()["tokens"]
    [choice] = server.post(PATH, {"prompt": ids, "echo": True, "max_tokens": 1}).json()["choices"]
    assert choice["text"].startswith(PROMPTS[0])


def test_what_ended_before_its_prompt_was_scored_has_nulls_in_place_of_scores() -> None:
    request = CompletionRequest(prompt=[5, 6, 7], echo=True, logprobs=1)
    completion = CompletionOutput(0, logprobs=[], finish_reason="abort")
    output = RequestOutput("a", None, [5, 6, 7], [completion], prompt_logprobs=[None, {6: Logprob(-0.5, 1, "b")}])
    context = ResponseContext.of("id", "model", request)
    answer = CompletionAnswer(
        context,
        [
            CompletionPrompt([5, 6, 7], "abc"),
        ],
        str,
        TokenStyle(),
        echo=True,
        wants_logprobs=True,
    )
    [choice] = json.loads(asyncio.run(answer.whole([output])))["choices"]
    assert choice["text"] == "abc" and choice["finish_reason"] == "abort"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, None]


def test_logprobs_tell_tokens_values_alternatives_and_offsets(server: Server) -> None:
    request = {"prompt": PROMPTS[0], "max_tokens": 4, "logprobs": 3, **GREEDY}
    [choice] = server.post(PATH, request).json()["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert told["text_offset"] == [len("".join(told["tokens"][:i])) for i in range(4)]
    for token, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert top[token] == logprob == max(top.values())
        assert len(top) in (2, 3)  # two ids may have the same text
    found = server.stream(PATH, request)
    streamed = [choice["logprobs"]["tokens"] for chunk in found for choice in chunk["choices"]]
    assert [token for tokens in streamed for token in tokens] == told["tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt_too(server: Server, llm: LLM, stream: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=1)
    expected = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    request = {"prompt": PROMPTS[0], "max_tokens": 2, "echo": True, "logprobs": 1, **GREEDY}
    found = server.stream(PATH, request) if stream else [server.post(PATH, request).json()]
    parts = [choice["logprobs"] for chunk in found for choice in chunk["choices"]]
    values = [value for part in parts for value in part["token_logprobs"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    scored = zip(expected.prompt_token_ids, expected.prompt_logprobs or [], strict=True)
    wanted = [None if entry is None else entry[token_id].logprob for token_id, entry in scored]
    ids = expected.outputs[0].token_ids
    wanted += [entry[i].logprob for i, entry in zip(ids, expected.outputs[0].logprobs or [], strict=True)]
    assert values[0] is None and values[1:] == pytest.approx(wanted[1:], abs=1e-4)
    assert offsets == sorted(offsets) and offsets[0] == 0 and len(offsets) == len(values)


def test_no_tokens_at_all_score_a_prompt(server: Server) -> None:
    request = {"prompt": PROMPTS[0], "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = server.post(PATH, request).json()
    [choice] = answer["choices"]
    assert choice["text"] == PROMPTS[0] and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"]
    assert texts_of(server.stream(PATH, request), 1) == [PROMPTS[0]]
    assert "echo" in error_of(server.post(PATH, {"prompt": "a", "max_tokens": 0}), 400)["message"]


def test_token_ids_and_prompt_logprobs_come_on_request(server: Server, llm: LLM) -> None:
    expected = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)[0]
    request = {"prompt": PROMPTS[0], "max_tokens": 3, "return_token_ids": True, **GREEDY}
    [choice] = server.post(PATH, request | {"prompt_logprobs": 0}).json()["choices"]
    assert choice["prompt_token_ids"] == expected.prompt_token_ids
    assert choice["token_ids"] == expected.outputs[0].token_ids
    assert [len(entry or ()) for entry in choice["prompt_logprobs"]] == [0] + [1] * (len(expected.prompt_token_ids) - 1)
    found = server.stream(PATH, request)
    assert found[0]["choices"][0]["prompt_token_ids"] == expected.prompt_token_ids
    assert [i for chunk in found for i in chunk["choices"][0]["token_ids"]] == expected.outputs[0].token_ids


def test_every_parameter_reaches_the_sampler(server: Server, llm: LLM) -> None:
    asked: dict[str, Any] = {
        "temperature": 1.5, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 11, "min_tokens": 5, "ignore_eos": True,
        "stop_token_ids": [7], "bad_words": ["cache"], "max_tokens": 12, "skip_special_tokens": False,
    }  # fmt: skip
    params = SamplingParams(**asked, logit_bias={300: 3.0})
    expected = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    request = {"prompt": PROMPTS[0], **asked, "logit_bias": {"300": 3}, "return_token_ids": True}
    [choice] = server.post(PATH, request).json()["choices"]
    assert choice["token_ids"] == expected.token_ids
    assert choice["text"] == expected.text
    request["allowed_token_ids"] = [300, 301]
    [choice] = server.post(PATH, request).json()["choices"]
    assert set(choice["token_ids"]) <= {300, 301}


def test_null_is_the_same_as_absent_and_unknown_fields_are_ignored(server: Server) -> None:
    names = ("model", "n", "max_tokens", "top_p", "stop", "logprobs", "echo", "suffix", "stream", "user", "top_k")
    plain = {"prompt": PROMPTS[0], "seed": 5}
    request = plain | {"best_of": 1, "whatever": {"a": []}} | dict.fromkeys(names)
    assert server.post(PATH, request).json()["choices"] == server.post(PATH, plain).json()["choices"]
    assert server.post(PATH, {"prompt": PROMPTS[0], "n": 2.0}).status_code == 200


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [[]]}, 400, "prompt"),
        ({"prompt": [1, "a"]}, 400, "prompt"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": {"text": "a"}}, 400, "prompt"),
        ({"prompt": [4096]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": [2**70]}, 400, "prompt"),
        ({"prompt": [5] * 1024}, 400, "prompt"),
        ({"prompt": [5] * 1020, "max_tokens": 5}, 400, "max_tokens"),
        ({"prompt": ["a", [4096]]}, 400, "prompt"),
        ({"prompt": [[5], [4096]]}, 400, "prompt"),
        ({"temperature": -0.1}, 400, "temperature"),
        ({"temperature": "0.5"}, 400, "temperature"),
        ({"temperature": True}, 400, "temperature"),
        ({"temperature": 10**400}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 0}, 400, "n"),
        ({"n": 1000}, 400, "n"),
        ({"n": 1.5}, 400, "n"),
        ({"seed": 2**63}, 400, "seed"),
        ({"seed": -(2**63) - 1}, 400, "seed"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 10**30}, 400, "max_tokens"),
        ({"min_tokens": 17}, 400, "min_tokens"),
        ({"stop": [""]}, 400, "stop"),
        ({"stop": 5}, 400, "stop"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"logit_bias": {"a": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"4096": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"5": 101}}, 400, "logit_bias"),
        ({"stop_token_ids": [4096]}, 400, "stop_token_ids"),
        ({"allowed_token_ids": []}, 400, "allowed_token_ids"),
        ({"bad_words": [""]}, 400, "bad_words"),
        ({"suffix": "end"}, 400, "suffix"),
        ({"priority": 1}, 400, "priority"),
        ({"priority": 2**40}, 400, "priority"),
        ({"cache_salt": ""}, 400, "cache_salt"),
        ({"stream": "yes"}, 400, "stream"),
        ({"model": "gpt-4"}, 404, "model"),
        ({"use_beam_search": True}, 501, "use_beam_search"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_malformed_is_refused_before_a_byte_is_streamed(
    server: Server, changes: dict[str, Any], status: int, param: str | None, stream: bool
) -> None:
    request = {"prompt": "a", "stream": stream} | changes
    assert error_of(server.post(PATH, request), status)["param"] == param
    assert server.call(lambda: server.service.num_open) == 0
