"""`teachllm viz --attach`: what a server's engine does is on the page, also after the server has been away."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from contextlib import closing
from typing import Any

import pytest
from typer.testing import CliRunner

from teachllm.trace.reader import parse_trace
from teachllm_cli.app import app
from teachllm_webui import attach
from teachllm_webui.latecomer import Latecomer
from teachllm_webui.session import LiveSession
from teachllm_webui.timeline import Seen, Timeline
from tests.clients import certificates
from tests.waiting import wait_for
from tests.webui.trace_server import Serve

HEADER, OTHER = '{"event":"header","time":1}', '{"event":"header","time":2}'


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "WAITS_S", (0.01, 0.05))
    monkeypatch.setattr(ssl, "create_default_context", certificates)  # read once


def shown(session: LiveSession) -> list[str]:
    return session.sides[0].log.upto()


def status(session: LiveSession) -> dict[str, Any]:
    return dict(session.news(Seen())["now"])


# -- following


def test_lines_come_to_the_page_as_the_server_sends_them_and_nothing_here_drives_its_engine(
    session: LiveSession, serve: Serve
) -> None:
    server = serve(HEADER, "a")
    session.attach(server.url)
    wait_for(lambda: shown(session) == [HEADER, "a"])
    server.push("b", "ü")
    wait_for(lambda: shown(session) == [HEADER, "a", "b", "ü"])
    now = status(session)
    assert (now["title"], now["connection"], now["notice"]) == (server.url, "attached", None)
    assert now["follows"] and now["can_fork"] and not now["is_live"] and session.runs == []


def test_a_server_whose_engine_is_not_there_yet_is_waited_for(session: LiveSession, serve: Serve) -> None:
    server = serve()
    session.attach(server.url)
    assert shown(session) == [] and status(session)["connection"] == "waiting for the server's engine"
    server.push(HEADER)
    wait_for(lambda: shown(session) == [HEADER])
    assert status(session)["connection"] == "attached"


def test_a_connection_that_breaks_is_made_again_and_no_line_is_missing_or_there_twice(
    session: LiveSession, serve: Serve
) -> None:
    server = serve(HEADER, "a", "b")
    session.attach(server.url)
    wait_for(lambda: len(shown(session)) == 3)
    generation = session.generation
    server.num_gone = 1  # of which this page has all
    server.cut()
    server.push("c")
    wait_for(lambda: shown(session) == [HEADER, "a", "b", "c"])
    assert session.generation == generation
    wait_for(lambda: status(session)["connection"] == "the server is back")
    assert status(session)["notice"] is None and status(session)["can_fork"]


def test_a_server_that_is_gone_is_said_to_be_and_another_one_in_its_place_begins_anew(
    session: LiveSession, serve: Serve
) -> None:
    first = serve(HEADER, "a")
    session.attach(first.url)
    wait_for(lambda: len(shown(session)) == 2)
    first.close()
    wait_for(lambda: "Connection refused" in (status(session)["notice"] or ""))
    assert status(session)["notice"].startswith(f"{first.url} does not answer")
    assert status(session)["connection"] == "gone, trying again"
    assert shown(session) == [HEADER, "a"]
    generation = session.generation
    serve(OTHER, "x", port=first.port)
    wait_for(lambda: shown(session) == [OTHER, "x"])
    assert session.generation == generation + 1
    wait_for(lambda: status(session)["connection"] == "the server is back")
    assert status(session)["notice"] is None


def test_a_server_that_comes_back_without_its_endpoint_is_told_about(session: LiveSession, serve: Serve) -> None:
    server = serve(HEADER)
    session.attach(server.url)
    wait_for(lambda: shown(session) == [HEADER])
    server.status = 404
    server.cut()
    wait_for(lambda: "--trace-endpoint" in (status(session)["notice"] or ""))


def test_an_engine_with_nothing_to_do_is_not_taken_for_one_that_is_gone(session: LiveSession, serve: Serve) -> None:
    server = serve(HEADER)
    session.attach(server.url)
    wait_for(lambda: shown(session) == [HEADER])
    timeouts = session.sides[0].source._request.extensions["timeout"]  # type: ignore[union-attr]
    assert timeouts["read"] is None and timeouts["connect"] == attach.CONNECT_S
    server.push("a")
    wait_for(lambda: shown(session) == [HEADER, "a"])
    assert len(server.asked) == 1


def test_what_takes_its_place_on_the_page_ends_the_connection(session: LiveSession, serve: Serve) -> None:
    server = serve(HEADER)
    session.attach(server.url)
    wait_for(lambda: server.num_open == 1)
    session.attach(serve(OTHER).url)
    wait_for(lambda: server.num_open == 0)
    wait_for(lambda: shown(session) == [OTHER])
    wait_for(lambda: [thread.name for thread in threading.enumerate()].count("trace of a server") == 1)
    assert len(server.asked) == 1


# -- a trace without its beginning


def test_lines_that_a_server_has_let_go_of_are_told_and_the_rest_is_shown(
    session: LiveSession, serve: Serve, trace: list[str]
) -> None:
    server = serve(*trace, num_gone=40)
    session.attach(server.url)
    wait_for(lambda: session.sides[0].log.upto() and len(shown(session)) == len(trace) - 40)
    now = status(session)
    assert "40 lines are gone" in now["notice"] and not now["can_fork"]
    assert json.loads(shown(session)[0])["is_partial"]


def test_a_latecomer_hears_of_those_alone_who_arrive_later() -> None:
    late = Latecomer()
    known = json.loads(late.line('{"event":"arrival","request_id":"new"}'))
    assert known == {"event": "arrival", "request_id": "new"}
    shares = [{"request_id": "old", "num_tokens": 1}, {"request_id": "new", "num_tokens": 2}]
    events = [["allocate", 1, "old"], ["hit", 2, "new"], ["evict", 3], ["commit", 1, "old", "h", "p"]]
    step = {"event": "step", "scheduled": shares, "preempted": ["old"], "block_events": events}
    step |= {"finished": {"old": "stop"}, "waiting": {"new": ["behind_head", "waits"]}}
    assert json.loads(late.line(json.dumps(step))) == step | {
        "scheduled": shares[1:],
        "preempted": [],
        "finished": {},
        "block_events": [["hit", 2, "new"], ["evict", 3], ["commit", 1, "", "h", "p"]],
    }
    abort = {"event": "abort", "time": 1, "request_id": "old", "block_events": [["free", 1, "old"], ["free", 2, "new"]]}
    assert json.loads(late.line(json.dumps(abort))) == {
        "event": "other",
        "time": 1,
        "block_events": [["free", 2, "new"]],
    }
    assert late.line("no JSON") == "no JSON" and late.line("[]") == "[]"


# -- refusals


def test_the_key_is_sent_and_shown_to_nobody(session: LiveSession, serve: Serve) -> None:
    server = serve(HEADER, key="secret")
    session.attach(server.url.replace("//", "//somebody:word@") + "/", "secret")
    wait_for(lambda: shown(session) == [HEADER])
    told = json.dumps(session.news(Seen()))
    assert "secret" not in told and "word" not in told and server.url in told


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ({"key": "secret"}, None, "asks for an API key: give --api-key, or set TEACHLLM_API_KEY"),
        ({"key": "secret"}, "wrong", "does not know this API key"),
        ({"key": "secret"}, "wr\nong", "characters that no request can carry"),
        ({"status": 404}, None, "start it with `teachllm serve --trace-endpoint`"),
        ({"status": 500}, None, "answers 500 Internal Server Error"),
        ({"status": 307}, None, "answers 307"),
        ({"kind": "text/html"}, None, "is no stream of events"),
    ],
)
def test_a_server_that_gives_no_trace_is_one_line_that_says_what_to_do(
    session: LiveSession, serve: Serve, settings: dict[str, Any], key: str | None, words: str
) -> None:
    server = serve(HEADER, **settings)
    with pytest.raises(ValueError, match=words) as refusal:
        session.attach(server.url, key)
    assert "\n" not in str(refusal.value) and "secret" not in str(refusal.value)
    assert session.sides == []


def test_a_server_that_is_not_there_or_says_nothing_is_one_line(
    session: LiveSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"does not answer \(timed out\)"):
            session.attach(url)
    with pytest.raises(ValueError, match=r"does not answer \(Connection refused\): is `teachllm serve --trace-endp"):
        session.attach(url)


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:99999", "http://a\x01b", "http://h?x=1"])
def test_what_is_no_address_is_refused_with_an_example(session: LiveSession, url: str) -> None:
    with pytest.raises(ValueError, match="give one like http://127"):
        session.attach(url)


@pytest.mark.parametrize("flags", [["--replay", "run.jsonl"], ["--model", "other"], ["--max-num-seqs", "3"]])
def test_the_command_takes_a_server_or_something_else(flags: list[str]) -> None:
    result = CliRunner().invoke(app, ["viz", "--no-browser", "--attach", "http://127.0.0.1:1", *flags])
    assert result.exit_code == 1
    wanted = "error: --attach shows what a server does: leave out --replay and the flags of an engine"
    assert result.stderr.splitlines() == [wanted]


def test_the_command_says_in_one_line_what_a_server_lacks(serve: Serve) -> None:
    server = serve(HEADER, key="one")
    command = ["viz", "--no-browser", "--attach", server.url]
    result = CliRunner().invoke(app, command, env={"TEACHLLM_API_KEY": "two three"})
    assert result.exit_code == 1 and server.asked == ["Bearer two"]
    assert result.stderr.splitlines()[-1] == f"error: {server.url} does not know this API key: give another --api-key"


# -- with the real ones


def test_a_real_server_is_watched_and_its_trace_forked(session: LiveSession) -> None:
    pytest.importorskip("fastapi", reason="no fastapi: pip install 'teachllm[serve]'")
    from teachllm.config import EngineConfig
    from teachllm.engine.async_llm import AsyncLLM
    from teachllm.server.trace_endpoint import TraceHub
    from tests.server.fake_engine import serving

    hub = TraceHub()
    config = EngineConfig(model="teachlm", device="cpu", num_gpu_blocks_override=32, max_model_len=256)
    engine_client = AsyncLLM.start(config, own_process=False, trace_sink=hub.sink)
    try:
        with serving(engine_client, hub, api_keys=("secret",)) as server:
            with closing(session):
                session.attach(server.url, "secret")
                question = {"messages": [{"role": "user", "content": "What is a KV cache?"}]}
                question |= {"model": "teachlm", "max_tokens": 12, "temperature": 0}
                answer = server.post("/v1/chat/completions", question, Authorization="Bearer secret")
                left = session.sides[0]
                wait_for(lambda: is_finished(left))
                assert output_text(left) == answer.json()["choices"][0]["message"]["content"]
                session.fork(3, {"block_size": 4})
                wait_for(lambda: len(session.sides) == 2 or session.status.error)
                session.set_speed(None)
                session.play()
                wait_for(lambda: session.runs[0].is_done)
                assert output_text(session.sides[1]) == output_text(left)
                session.drop_fork()
                assert session.sides[0].log is left.log and session.runs == []
            server.until(lambda: not hub.watchers)
    finally:
        engine_client.close()


def is_finished(side: Timeline) -> bool:
    requests = parse_trace(line + "\n" for line in side.log.upto()).replay.requests.values()
    return bool(requests) and not any(request.is_live for request in requests)


def output_text(side: Timeline) -> str:
    """Of its only request."""
    trace = parse_trace(line + "\n" for line in side.log.upto())
    assert trace.problem is None
    (request,) = trace.replay.requests.values()
    return "".join(request.output_text)
