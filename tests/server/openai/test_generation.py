"""What becomes of a request when something goes wrong: hang-ups, slow readers, a full queue, an engine that fails."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest

from teachllm.engine.llm_engine import EngineDeadError
from tests.clients import http_client
from tests.server.fake_engine import FakeEngineClient, Server, chunks, error_of, serving
from tests.waiting import HANG_SECONDS

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"


def begin(server: Server, content: dict[str, Any], path: str = PATH) -> socket.socket:
    """Sends a request and does not read the answer."""
    body = json.dumps(content).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["one", ["one", "two", "three"]])
def test_a_client_that_hangs_up_frees_what_it_had(stream: bool, prompt: Any) -> None:
    engine_client = FakeEngineClient()
    with serving(engine_client) as server:
        server.call(engine_client.go.clear)  # nothing is ever generated: nobody would notice by writing
        connection = begin(server, {"prompt": prompt, "stream": stream})
        wanted = 1 if prompt == "one" else 3
        server.until(lambda: len(engine_client.open) == wanted)
        connection.close()
        server.until(lambda: not engine_client.open and server.service.num_open == 0)
        assert len(engine_client.aborted) >= wanted
        server.call(engine_client.go.set)
        assert server.post(PATH, {"prompt": "a"}).status_code == 200


def test_a_client_that_hangs_up_in_the_middle_of_a_stream_ends_it() -> None:
    engine_client = FakeEngineClient(["word "] * 100_000)
    with serving(engine_client) as server:
        with httpx.stream("POST", server.url + PATH, json={"prompt": "a", "stream": True}) as response:
            next(response.iter_bytes())
        server.until(lambda: not engine_client.open and server.service.num_open == 0)
        assert engine_client.num_steps < 100_000


def test_a_real_engine_has_its_blocks_back_after_a_hang_up(engine: tuple[Any, Any]) -> None:
    engine_client = engine[0]
    with serving(engine_client) as server:
        for stream in (False, True):
            request = {"prompt": "Tell me all " * 20, "max_tokens": 800, "ignore_eos": True, "stream": stream}
            connection = begin(server, request)
            server.until(lambda: server.service.num_open == 1)
            connection.close()
            server.until(lambda: server.service.num_open == 0)
            assert not engine_client.call(lambda: engine_client._engine.has_unfinished_requests).result(HANG_SECONDS)


def test_a_reader_that_reads_nothing_stops_its_own_stream_alone() -> None:
    words = ["x" * 10_000] * 2000  # 20 MB
    engine_client = FakeEngineClient(words)
    with serving(engine_client) as server:
        slow = begin(server, {"prompt": "a", "stream": True})
        server.until(lambda: engine_client.num_steps > 0)
        steps, num_still = -1, 0
        while num_still < 20:  # until it stands still
            server.http.get("/health")
            now = server.call(lambda: engine_client.num_steps)
            num_still = num_still + 1 if now == steps else 0
            steps = now
        assert server.call(lambda: server.service.num_open) == 1
        assert steps < 1500
        engine_client.words = ["fine"]
        assert server.post(PATH, {"prompt": "a"}).json()["choices"][0]["text"] == "fine"
        engine_client.words = words
        slow.close()
        server.until(lambda: server.service.num_open == 0)


def test_past_the_queue_s_end_requests_are_told_to_come_again() -> None:
    engine_client = FakeEngineClient(max_num_seqs=2)
    with serving(engine_client, max_queued_requests=1) as server:
        server.call(engine_client.go.clear)
        waiting = [begin(server, {"prompt": "a", "n": n}) for n in (2, 1)]
        server.until(lambda: len(engine_client.open) == 2)
        for path, content in ((PATH, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
            response = server.post(path, content)
            assert "3 completions are open" in error_of(response, 429)["message"]
            assert response.headers["retry-after"] == "1"
        assert server.http.get("/health").status_code == 200
        server.call(engine_client.go.set)
        server.until(lambda: server.service.num_open == 0)
        assert server.post(PATH, {"prompt": "a", "n": 3}).status_code == 200
        assert "takes 3 at once" in error_of(server.post(PATH, {"prompt": "a", "n": 4}), 400)["message"]
        for connection in waiting:
            connection.close()


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_a_step_that_fails_ends_streams_with_an_error_and_done_and_no_more(path: str) -> None:
    engine_client = FakeEngineClient()
    engine_client.fails_with = RuntimeError("the step failed")
    content = {"prompt": "a"} if path == PATH else {"messages": [{"role": "user", "content": "a"}]}
    with serving(engine_client) as server:
        *_, last = chunks(server.post(path, content | {"stream": True}).text)
        assert last["error"]["code"] == 500 and "the step failed" in last["error"]["message"]
        assert "the step failed" in error_of(server.post(path, content), 500)["message"]
        server.until(lambda: server.service.num_open == 0)
        failed = 'request_success_total{finished_reason="error",model_name="fake"} 2.0'
        assert failed in server.http.get("/metrics").text
        engine_client.fails_with = None
        assert server.post(path, content).status_code == 200


def test_who_learns_that_the_engine_has_died_learns_it_for_all() -> None:
    engine_client = FakeEngineClient()
    engine_client.fails_with = EngineDeadError("the engine has died")
    with serving(engine_client) as server:
        *_, last = chunks(server.post(PATH, {"prompt": "a", "stream": True}).text)
        assert last["error"]["code"] == 500 and "the engine has died" in last["error"]["message"]
        assert server.http.get("/health").json() == {"status": "dead"}
        error_of(server.post(PATH, {"prompt": "a"}), 503)


@pytest.mark.parametrize(("num_prompts", "refused"), [(2, 1), (3, 0), (70, 50)])
def test_a_prompt_that_the_engine_refuses_ends_the_others_of_its_request(num_prompts: int, refused: int) -> None:
    engine_client = FakeEngineClient()
    with serving(engine_client) as server:
        submit, asked = engine_client.submit, []

        async def refuse_one(*arguments: Any, **options: Any) -> Any:
            asked.append(1)
            if len(asked) == refused + 1:
                raise ValueError("no such prompt")
            return await submit(*arguments, **options)

        engine_client.submit = refuse_one  # type: ignore[method-assign]
        assert error_of(server.post(PATH, {"prompt": ["a"] * num_prompts}), 400)["message"] == "no such prompt"
        assert set(engine_client.aborted) == set(engine_client.open) and len(engine_client.open) >= refused
        assert server.call(lambda: server.service.num_open) == 0


def test_a_bug_of_the_server_is_an_error_object_with_the_request_s_id() -> None:
    engine_client = FakeEngineClient()
    engine_client.refuses_with = KeyError("oops")
    with serving(engine_client) as server:
        response = server.post(PATH, {"prompt": "a"}, **{"X-Request-Id": "mine"})
        error_of(response, 500)
        assert response.headers["x-request-id"] == "mine"
        del engine_client.tokenizer
        response = server.post(PATH, {"prompt": "a"}, **{"X-Request-Id": "mine"})
        assert "AttributeError" in error_of(response, 500)["message"]
        assert response.headers["x-request-id"] == "mine"


def test_priority_and_salt_reach_the_engine() -> None:
    engine_client = FakeEngineClient(scheduling_policy="priority")
    with serving(engine_client) as server:
        server.post(PATH, {"prompt": "a", "priority": -5, "cache_salt": "s"})
        server.post(CHAT, {"messages": [{"role": "user", "content": "a"}]})
        (_, options), (params, plain) = engine_client.asked
        assert options == {"priority": -5, "cache_salt": "s"}
        assert plain == {"priority": 0, "cache_salt": None}
        assert params.max_tokens == 999  # all that a prompt of one token leaves


def test_defaults_are_the_request_s_then_the_checkpoint_s_then_openai_s() -> None:
    engine_client = FakeEngineClient()
    engine_client.generation_defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 50}
    with serving(engine_client) as server:
        server.post(CHAT, {"messages": [{"role": "user", "content": "a"}], "top_k": 5})
        server.post(PATH, {"prompt": "a", "temperature": 0.1})
        (chat, _), (text, _) = engine_client.asked
        assert (chat.temperature, chat.top_k, chat.top_p, chat.max_tokens) == (0.6, 5, 1.0, 50)
        assert (text.temperature, text.top_k, text.max_tokens) == (0.1, 20, 16)
        engine_client.generation_defaults = {"max_tokens": 9}
        for asked in ({}, {"max_tokens": 12}):
            server.post(PATH, {"prompt": "a"} | asked)
        assert [params.max_tokens for params, _ in engine_client.asked[-2:]] == [9, 12]


def test_what_is_open_when_time_runs_out_is_told_so() -> None:
    engine_client = FakeEngineClient()
    with serving(engine_client) as server:
        server.call(engine_client.go.clear)
        with http_client(server.url) as other:
            request = other.build_request("POST", PATH, json={"prompt": "a", "stream": True})
            response = other.send(request, stream=True)
            server.until(lambda: len(engine_client.open) == 1)
            server.call(server.service.stop)
            error_of(server.post(PATH, {"prompt": "a"}), 503)
            [generation] = server.service.open
            asyncio.run_coroutine_threadsafe(generation.abort(), server.loop).result(HANG_SECONDS)
            *_, last = chunks(response.read().decode())
            assert last["error"]["code"] == 503 and "shut down" in last["error"]["message"]
