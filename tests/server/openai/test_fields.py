"""Every field of a request reaches the engine, or is refused by name: none is ignored silently."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from teachllm.sampling_params import SamplingParams
from teachllm.server.openai import other_fields
from teachllm.server.openai.other_fields import COMING, HARMLESS, REFUSED, is_one_edit
from teachllm.server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from tests.request_kinds import EXAMPLES
from tests.server.fake_engine import FakeEngineClient, Server, error_of, serving

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {TEXT: {"prompt": "a b c"}, CHAT: {"messages": [{"role": "user", "content": "a"}]}}
MODELS = {TEXT: CompletionRequest, CHAT: ChatCompletionRequest}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

# {field: (value, what SamplingParams has then)}; JSON has neither tuples nor numbers as keys.
NO_FIELDS = {"detokenize", "logprobs"}  # an answer is text; a number for one endpoint, a flag for the other
SAMPLING: dict[str, tuple[Any, dict[str, Any]]] = {
    name: (json.loads(json.dumps(value)), {name: value}) for name, value in EXAMPLES.items() if name not in NO_FIELDS
} | {"stop_token_ids": ([9, 9], {"stop_token_ids": (9,)})}
OF_TEXT = {"logprobs": (4, {"logprobs": 4})}
OF_CHAT = {"max_completion_tokens": (6, {"max_tokens": 6}), "logprobs": (True, {"logprobs": 0})}
# Those that mean something to the prompt, the answer or the queue, and are tested with it.
ELSEWHERE = {"model", "stream", "stream_options", "priority", "cache_salt", "return_token_ids", "user"}
ELSEWHERE |= {"return_tokens_as_token_ids", "truncate_prompt_tokens", "length_penalty", "add_special_tokens"}
ELSEWHERE |= {"prompt", "echo", "suffix"}
ELSEWHERE |= {"messages", "tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt", "chat_template"}
ELSEWHERE |= {"continue_final_message", "documents", "reasoning_effort", "chat_template_kwargs", "top_logprobs"}
UNBUILT: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "use_beam_search": True,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(FakeEngineClient()) as running:
        yield running


def asked(server: Server, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The parameters that the engine gets."""
    response = server.post(path, BODIES[path] | fields)
    assert response.status_code == 200, response.text
    params, _ = server.engine_client.asked[-1]
    assert isinstance(params, SamplingParams)
    return asdict(params)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_every_field_of_sampling_reaches_the_engine(server: Server, path: str) -> None:
    table = SAMPLING | (OF_TEXT if path == TEXT else OF_CHAT)
    assert set(MODELS[path].model_fields) == (set(table) | ELSEWHERE | set(UNBUILT)) & set(MODELS[path].model_fields)
    plain = asked(server, path, {})
    for name, (value, expected) in table.items():
        assert asked(server, path, {name: value}) == plain | expected, name
        assert asked(server, path, {name: None}) == plain, name
    everything = {name: value for name, (value, _) in table.items() if name != "max_completion_tokens"}
    together = plain | {k: v for name in everything for k, v in table[name][1].items()}
    assert asked(server, path, everything) == together


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_what_is_not_built_yet_gets_501_and_what_would_change_the_answer_400(server: Server, path: str) -> None:
    for name, value in UNBUILT.items():
        error_of(server.post(path, BODIES[path] | {name: value}), 501)
    for name in COMING:
        assert error_of(server.post(path, BODIES[path] | {name: {"a": 1}}), 501)["param"] == name
    own = MODELS[path].model_fields
    others = {name: advice for name, advice in REFUSED.items() if name not in own}
    other_endpoint = MODELS[CHAT if path == TEXT else TEXT].model_fields
    assert set(other_endpoint) - set(own) - HARMLESS - {"parallel_tool_calls"} <= set(others)
    for name, (harmless, _) in others.items():
        error = error_of(server.post(path, BODIES[path] | {name: {"something": "else"}}), 400)
        assert error["param"] == name and name in error["message"]
        for value in (None, *harmless):
            assert server.post(path, BODIES[path] | {name: value}).status_code == 200, (name, value)
    assert error_of(server.post(path, BODIES[path] | {"best_of": 3}), 400)["param"] == "best_of"
    assert server.post(path, BODIES[path] | {"best_of": 2, "n": 2}).status_code == 200


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_what_changes_nothing_here_is_accepted(server: Server, path: str) -> None:
    plain = asked(server, path, {})
    for name in sorted(HARMLESS):
        value = "me" if name == "user" else {"a": ["b"]}
        assert asked(server, path, {name: value}) == plain, name


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("temperatrue", "temperature"),
        ("stop_token_idss", "stop_token_ids"),
    ],
)
def test_a_slip_is_told_with_the_right_name(server: Server, wrong: str, right: str) -> None:
    error = error_of(server.post(TEXT, BODIES[TEXT] | {wrong: 1}), 400)
    assert error["param"] == wrong and right in error["message"]


def test_a_name_that_nobody_knows_is_logged_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(other_fields, "_logged", set())
    monkeypatch.setattr(other_fields.logger, "warning", lambda _, extra: logged.append(extra["fields"]["field"]))
    for _ in range(2):
        assert server.post(TEXT, BODIES[TEXT] | {"mirostat": 2, "x" * 500: 1}).status_code == 200
    assert sorted(logged) == ["mirostat", "x" * 64]


def test_the_documentation_lists_every_field() -> None:
    text = (Path(__file__).parents[3] / "docs" / "server.md").read_text(encoding="utf-8")
    table = text.split("## Every field")[1].split("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    listed = Counter(name for row in rows for name in re.findall(r"`(\w+)`", row[1]))
    bodies = (CompletionRequest, ChatCompletionRequest, TokenizeTextRequest, TokenizeChatRequest, DetokenizeRequest)
    letters = dict(zip(bodies, "CMTTD", strict=True))
    known = {name for body in bodies for name in body.model_fields}
    assert set(listed) == known | HARMLESS | set(COMING) | set(REFUSED) | {"best_of"} and max(listed.values()) == 1
    for row in rows:
        for name in set(re.findall(r"`(\w+)`", row[1])) & known - {"user"}:
            has = {letters[body] for body in bodies if name in body.model_fields}
            assert has == set(row[2].strip()), name


def test_one_edit() -> None:
    assert all(is_one_edit("seed", other) for other in ("sed", "seeds", "need", "sede", "xseed"))
    assert not any(is_one_edit("seed", other) for other in ("seed", "sd", "eeds!", "seedss", "dees"))
