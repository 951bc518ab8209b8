"""What a form, a request of the page or a what-if may hold, and what is refused in one line."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from teachllm.config import EngineConfig
from teachllm.sampling_params import SamplingParams
from teachllm_webui.forms import changes_of, request_of, what_if_of
from teachllm_webui.guard import Guard
from teachllm_webui.page import server_functions
from teachllm_webui.plan import engine_plan
from teachllm_webui.session import LiveSession
from teachllm_webui.what_if import SHAPE_NAMES, WhatIf, run_what_if
from tests.webui.runs import trace_of


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"action": "submit", "form": {"prompt": " "}}, "the prompt is empty"),
        ({"action": "submit", "form": {"prompt": "\ud800"}}, "half a character"),
        ({"action": "submit", "form": {"prompt": "a", "n": 20_000}}, "n: choose a whole number from 1 to 8"),
        ({"action": "submit", "form": {"prompt": "a", "max_tokens": 0}}, "max tokens: choose a whole number from 1"),
        ({"action": "submit", "form": {"prompt": "a", "max_tokens": 2.9}}, "max tokens: choose a whole number"),
        ({"action": "submit", "form": {"prompt": "a", "temperature": float("inf")}}, "temperature: choose a number"),
        ({"action": "submit", "form": {"prompt": "a", "top_p": 0}}, "top_p"),
        ({"action": "submit", "form": {"prompt": "a", "priority": [1]}}, "priority: choose a whole number"),
        ({"action": "fork", "step": None, "form": {}}, "no step to fork at"),
        ({"action": "fork", "step": 0, "form": {"model": "x"}}, "a fork cannot change model"),
        ({"action": "fork", "step": 0, "form": {"scheduling_policy": "x"}}, "choose one of fcfs, priority, static"),
        ({"action": "fork", "step": 0, "form": {"enable_chunked_prefill": "on"}}, "on or off"),
        ({"action": "drop"}, "no fork to close"),
        ({"action": "speed", "value": "fast"}, "fast"),
        ({"action": "speed", "value": -1}, "choose 0.1 to 1000"),
        ({"action": "what_if", "form": {"requests": None, "blocks": 10**9}}, "blocks: choose a whole number"),
        ({"action": "what_if", "form": {"rate": 1e-308}}, "rate: choose a number from 0.001"),
        ({"action": "dance"}, "no order 'dance'"),
        ({}, "no order None"),
    ],
    ids=str,
)
def test_whatever_a_form_holds_the_answer_is_one_line(session: LiveSession, order: Any, words: str) -> None:
    drive = server_functions(session)[-1]
    answer = drive({"generation": session.generation} | order)
    assert words in answer["error"] and "\n" not in answer["error"]


def test_fields_that_are_left_empty_have_their_defaults() -> None:
    request = request_of({"prompt": "a", "max_tokens": None, "temperature": "", "chat": True})
    assert request.is_chat and request.params == SamplingParams(max_tokens=64, temperature=0.0)
    assert changes_of({"block_size": None, "max_num_seqs": 3, "scheduling_policy": ""}) == {"max_num_seqs": 3}
    assert what_if_of({"requests": "", "rate": None, "block_size": 8}) == WhatIf(rate=None, block_size=8)


@pytest.mark.parametrize(
    ("host", "headers", "may"),
    [
        ("127.0.0.1", {"host": "127.0.0.1:7860"}, True),
        ("127.0.0.1", {"host": "localhost:7860", "origin": "http://localhost:7860"}, True),
        ("127.0.0.1", {"host": "127.0.0.1:7860", "origin": "https://evil.example"}, False),
        ("127.0.0.1", {"host": "127.0.0.1:7860", "origin": "null"}, False),
        ("127.0.0.1", {"host": "evil.example:7860"}, False),
        ("127.0.0.1", {"host": "evil.example:7860", "origin": "http://evil.example:7860"}, False),
        ("127.0.0.1", {}, False),
        ("0.0.0.0", {"host": "my-machine:7860", "origin": "http://my-machine:7860"}, True),
        ("0.0.0.0", {"host": "my-machine:7860", "origin": "http://evil.example"}, False),
    ],
)
def test_nobody_but_the_page_itself_talks_to_the_server(host: str, headers: dict[str, str], may: bool) -> None:
    entered, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        entered.append(scope)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "path": "/",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    coroutine = Guard(app, host)(scope, None, send)
    with pytest.raises(StopIteration):
        coroutine.send(None)  # it waits for nothing
    assert bool(entered) is may and [m.get("status") for m in sent] == ([] if may else [403, None])


@pytest.mark.parametrize(
    ("path", "query", "cookie", "status", "is_told"),
    [
        ("/", "", "", 401, False),
        ("/", "token=wrong", "", 401, False),
        ("/", "token=secret", "", 200, True),
        ("/x", "", "teachllm_token=secret", 200, False),
        ("/x", "", "teachllm_token=wrong", 401, False),
        ("/gradio_api/startup-events", "", "", 200, False),
        ("/gradio_api/upload", "token=secret", "teachllm_token=secret", 403, False),
    ],
)
def test_where_others_can_reach_the_page_they_need_its_token(
    path: str, query: str, cookie: str, status: int, is_told: bool
) -> None:
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"machine:7860"), (b"cookie", cookie.encode())]
    scope = {"type": "http", "path": path, "query_string": query.encode(), "headers": headers}
    with pytest.raises(StopIteration):
        Guard(app, "0.0.0.0", "secret")(scope, None, send).send(None)
    assert sent[0]["status"] == status
    assert any(name == b"set-cookie" and b"secret" in value for name, value in sent[0]["headers"]) is is_told


def test_files_are_taken_from_nobody() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1:7860")]
    for path in ("/upload", "/gradio_api/upload", "/gradio_api/upload/", "/gradio_api/upload_progress"):
        with pytest.raises(StopIteration):
            Guard(send, "127.0.0.1")({"type": "http", "path": path, "headers": headers}, None, send).send(None)
    assert [message["status"] for message in sent[::2]] == [403] * 4


def test_replicas_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="data_parallel_size=2: the page steps one engine: set it to 1"):
        engine_plan(EngineConfig(data_parallel_size=2)).make_engine(print)


def test_without_gradio_one_line_says_what_installs_it(session: LiveSession, monkeypatch: pytest.MonkeyPatch) -> None:
    from teachllm_webui.page import build

    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ImportError, match=r"pip install 'teachllm\[ui\]'"):
        build(session)


# -- what if


def test_what_if_simulates_what_the_form_says_and_refuses_what_would_take_too_long() -> None:
    result = run_what_if(WhatIf(requests=20, shared=64, blocks=64))
    trace = trace_of(result.lines)
    assert len(trace.replay.requests) == 20 and trace.header["num_blocks"] == 64
    assert result.figures.prefix_hit_rate > 0
    with pytest.raises(ValueError, match="fewer requests, or shorter"):
        run_what_if(WhatIf(requests=500, output_max=5000))


def test_the_form_offers_the_shapes_that_the_simulator_knows() -> None:
    from teachllm.simulator.shapes import SHAPES

    assert set(SHAPE_NAMES) == {"teachlm", *SHAPES}


def test_every_fourth_request_of_a_simulation_is_urgent_and_goes_first_with_the_policy_priority() -> None:
    waits: dict[str, list[float]] = {}
    for policy in ("fcfs", "priority"):
        trace = trace_of(run_what_if(WhatIf(requests=24, seqs=4, policy=policy)).lines)
        requests = list(trace.replay.requests.values())
        urgent = [request for request in requests if request.arrival["priority"] == 0]
        assert urgent == requests[3::4]
        waits[policy] = [request.token_times[0] - request.arrival["time"] for request in urgent]
    assert sum(waits["priority"]) < 0.6 * sum(waits["fcfs"])
