"""What one request may cost is bounded, and counted: characters that are tokenized, ids that a step looks at."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from teachllm.engine.text.text_jobs import MAX_INLINE
from teachllm.engine.text.tokenizer import Tokenizer
from teachllm.server.http import body as http_body
from teachllm.server.http.errors import ApiError
from teachllm.server.openai import params
from teachllm.server.openai.messages import MAX_MESSAGES, MAX_PARTS
from teachllm.server.openai.protocol import ChatCompletionRequest
from tests.server.conftest import running_engine
from tests.server.fake_engine import Server, error_of, serving

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A server whose context holds 64 tokens."""
    with running_engine(max_model_len=64, num_gpu_blocks_override=64) as (engine, _), serving(engine) as running:
        yield running


@pytest.fixture
def tokenized(small: Server, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(characters, in the event loop or the engine's thread) of every text that is tokenized."""
    found: list[tuple[int, bool]] = []
    encode = Tokenizer.encode
    busy = {small._thread, small.engine_client._thread}

    def note(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        found.append((len(text), threading.current_thread() in busy))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", note)
    return found


def test_a_text_that_cannot_fit_is_not_tokenized(small: Server, tokenized: list[tuple[int, bool]]) -> None:
    longest = small.engine_client.tokenizer.max_characters_per_token
    for prompt in ("a " * 100_000, " " * (64 * longest + 1), ["a", "\N{ROCKET}" * 100_000]):
        error = error_of(small.post(TEXT, {"prompt": prompt}), 400)
        assert error["param"] == "prompt" and f"no more than {64 * longest}: shorten it" in error["message"]
    error_of(small.post("/tokenize", {"prompt": "a " * 100_000}), 400)
    assert not tokenized
    error_of(small.post(CHAT, {"messages": [USER | {"content": "a " * 100_000}]}), 400)
    assert not tokenized


def test_neither_loop_nor_engine_tokenizes_more_than_a_short_text(
    small: Server, tokenized: list[tuple[int, bool]]
) -> None:
    longest = small.engine_client.tokenizer.max_characters_per_token
    words = [f"word number {i}" for i in range(900)]
    error_of(small.post(TEXT, {"prompt": "a" * (64 * longest)}), 400)  # fits, until it is tokenized
    small.post(TEXT, {"prompt": ["a" * 60] * 80, "max_tokens": 1})
    assert small.post(TEXT, {"prompt": "a", "bad_words": words, "max_tokens": 2}).status_code == 200
    small.post(CHAT, {"messages": [USER] * 200, "max_tokens": 1})
    assert sum(count for count, is_busy in tokenized if not is_busy) > 2 * MAX_INLINE
    small.post("/tokenize", {"prompt": "a" * 500})
    assert sum(count for count, is_busy in tokenized if is_busy) <= MAX_INLINE


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"prompt": [5] * 5000}, "prompt"),
        (TEXT, {"prompt": [5] * 5000, "echo": True}, "prompt"),
        (TEXT, {"stop": ["x" * 257]}, "stop"),
        (TEXT, {"stop_token_ids": list(range(5, 1100))}, "stop_token_ids"),
        (TEXT, {"bad_words": ["x" * 16_385]}, "bad_words"),
        (TEXT, {"bad_words": ["word"] * 1025}, "bad_words"),
        (TEXT, {"allowed_token_ids": list(range(3000)), "n": 100}, "allowed_token_ids"),
        (TEXT, {"logit_bias": {str(i): 1 for i in range(3000)}, "n": 100}, "logit_bias"),
        (TEXT, {"logprobs": 20, "n": 128, "max_tokens": 60, "prompt": ["a"] * 8}, "logprobs"),
        (TEXT, {"prompt_logprobs": 20, "max_tokens": 1, "prompt": [[5] * 60] * 200}, "prompt_logprobs"),
        (CHAT, {"messages": [USER] * (MAX_MESSAGES + 1)}, "messages"),
        (CHAT, {"messages": [USER | {"content": [{"type": "text", "text": ""}] * (MAX_PARTS + 1)}]}, "messages"),
        ("/detokenize", {"tokens": [5] * 65}, "tokens"),
    ],
)
def test_more_than_one_request_may_ask_for_is_refused(
    small: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    body: dict[str, Any] = {TEXT: {"prompt": "a"}, CHAT: {"messages": [USER]}}.get(path, {})
    assert error_of(small.post(path, body | fields), 400)["param"] == param


def test_what_is_wrong_in_a_mapping_makes_no_error_of_each_entry(
    small: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    of_validation = http_body.of_validation

    def counting(error: ValidationError) -> ApiError:
        counted.append(error.error_count())
        return of_validation(error)

    monkeypatch.setattr(http_body, "of_validation", counting)
    for path, body in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": [USER]})):
        for entries in ({f"{i:x}z": "" for i in range(50_000)}, dict.fromkeys(map(str, range(50_000)), 1)):
            assert error_of(small.post(path, body | {"logit_bias": entries}), 400)["param"] == "logit_bias"
    assert counted == [1] * 4


def test_without_a_number_of_tokens_an_answer_with_logprobs_is_as_long_as_it_may_be(
    small: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 20, "n": 8, "ignore_eos": True, "temperature": 1}
    many = ChatCompletionRequest.model_validate(body | {"n": 128})
    assert params.most_tokens(small.service, many, 10, 20) * 128 * 21 <= 1 << 17
    monkeypatch.setattr(params, "_LEAST_MOST_ENTRIES", 0)  # as many as the context holds remain
    answer = small.post(CHAT, body)
    assert answer.status_code == 200
    assert {len(choice["logprobs"]["content"]) for choice in answer.json()["choices"]} == {64 // 8}


def test_a_body_is_bounded_by_the_context(small: Server) -> None:
    assert small.service.max_request_bytes == 1 << 20
    error_of(small.post(TEXT, {"prompt": "a", "user": "x" * (1 << 20)}), 413)
    assert small.post(TEXT, {"prompt": "a", "user": "x" * 900_000, "max_tokens": 1}).status_code == 200


def test_a_host_that_is_not_this_machine_is_refused(small: Server) -> None:
    hosts = ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.nip.io")
    for host in (*hosts, "[::1]evil.example", "localhost:x@evil.example", "localhost:80:80"):
        assert host.removesuffix(":80") in error_of(small.http.get("/health", headers={"Host": host}), 403)["message"]
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"):
        assert small.http.get("/health", headers={"Host": host}).status_code == 200


def test_logprobs_join_to_the_text_with_characters_of_several_tokens(small: Server) -> None:
    for text in ("A KV cache 🚀 keeps", "naïve café — ok", "🚀🚀", "A KV cache keeps"):
        request = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 2}
        [choice] = small.post(TEXT, request).json()["choices"]
        told = choice["logprobs"]
        assert "".join(told["tokens"]) == choice["text"] == text
        pairs = zip(told["tokens"], told["text_offset"], strict=True)
        assert all(text[offset : offset + len(token)] == token for token, offset in pairs)
    ids = small.post("/tokenize", {"prompt": "🚀"}).json()["tokens"]
    assert len(ids) > 1
    body = {"messages": [USER], "logprobs": True, "temperature": 0, "max_tokens": len(ids)}
    body |= {"allowed_token_ids": ids, "seed": 1}
    [choice] = small.post(CHAT, body).json()["choices"]
    data = [byte for token in choice["logprobs"]["content"] for byte in token["bytes"]]
    text = choice["message"]["content"]
    assert bytes(data).decode() == text


F, HELLO = 72, [403, 3255]
E_ACUTE, ROCKET = [130, 105], [175, 256, 251, 225]  # ids of single bytes


@pytest.mark.parametrize(
    "prompt",
    [[256] * 3 + HELLO, [175, *HELLO], [256], [F, 130], [F, 175, 256, F, 256], [*ROCKET, *ROCKET[:3]], " a", [1]],
)
def test_logprobs_join_to_the_text_with_bytes_that_are_no_character(small: Server, prompt: list[int] | str) -> None:
    body = {"logprobs": 1, "temperature": 2.0, "allowed_token_ids": [*E_ACUTE, *ROCKET, F, 0, 2]}
    for seed, special in enumerate([{}, {"max_tokens": 1}, {"skip_special_tokens": False, "ignore_eos": True}]):
        request = body | {"prompt": prompt, "echo": True, "seed": seed, "max_tokens": 8} | special
        [choice] = small.post(TEXT, request).json()["choices"]
        told, text = choice["logprobs"], choice["text"]
        ends = [*told["text_offset"][1:], len(text)]
        pieces = [text[first:last] for first, last in zip(told["text_offset"], ends, strict=True)]
        assert "".join(pieces) == text
        # Names of tokens that the text leaves out.
        hidden = [] if "ignore_eos" in special else ["<|endoftext|>", "<|im_end|>"]
        assert pieces == ["" if token in hidden else token for token in told["tokens"]]
    request = body | {"messages": [USER], "logprobs": True, "seed": 3, "max_tokens": 9, "ignore_eos": True}
    [choice] = small.post(CHAT, request).json()["choices"]
    data = [byte for token in choice["logprobs"]["content"] for byte in token["bytes"] or []]
    assert bytes(data).decode() == choice["message"]["content"]
    assert "\N{REPLACEMENT CHARACTER}" in choice["message"]["content"]


def test_tokens_may_be_named_by_their_ids(small: Server) -> None:
    body = {"prompt": "A KV cache", "logprobs": 1, "max_tokens": 3, "temperature": 0}
    [plain] = small.post(TEXT, body | {"return_token_ids": True}).json()["choices"]
    [named] = small.post(TEXT, body | {"return_tokens_as_token_ids": True}).json()["choices"]
    assert named["logprobs"]["tokens"] == [f"token_id:{i}" for i in plain["token_ids"]]
    assert named["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    assert json.dumps(named["logprobs"]["top_logprobs"][0]).startswith('{"token_id:')
