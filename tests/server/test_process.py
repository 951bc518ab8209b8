"""`teachllm serve` as its user starts it: a process that listens at once, and ends as it is told to."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.programs import run_program
from tests.server.door import PATIENCE, chunks, error_of
from tests.server.process import engine_processes, started

ENDLESS = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}


def refusal(*arguments: str) -> str:
    """What a server that does not start says, which has to be one line."""
    command = ("-m", "teachllm_cli", "serve", "--port", "0", *arguments)
    result = run_program(*command, timeout=PATIENCE)
    assert result.returncode == 1, result.stderr
    [line] = [line for line in result.stderr.splitlines() if "listening" not in line]
    return line


def test_it_listens_at_once_says_when_it_is_ready_and_finishes_what_is_open() -> None:
    began = time.monotonic()
    with started("teachlm", TEACHLLM_API_KEY="secret") as process:
        response = process.http.get("/health")
        assert (response.status_code, response.json()) == (503, {"status": "starting"})
        process.event("ready")
        assert process.http.get("/health").json() == {"status": "healthy"}
        assert time.monotonic() - began < 30  # 3 on an idle machine
        error_of(process.http.get("/v1/models"), 401)
        process.http.headers["Authorization"] = "Bearer secret"
        assert process.http.get("/v1/models").json()["data"][0]["id"] == "teachlm"
        with process.stream({**ENDLESS, "max_tokens": 600}) as stream:
            pieces = stream.iter_text()
            text = next(pieces)
            for pid in (process.child.pid, *engine_processes(process.child.pid)):  # as systemd does
                os.kill(pid, signal.SIGTERM)
            process.event("ending")
            error_of(process.http.post("/v1/completions", json={"prompt": "a"}), 503)
            assert process.http.get("/health").json() == {"status": "stopping"}
            text += "".join(pieces)
        assert chunks(text)[-1]["choices"][0]["finish_reason"] == "length"
        assert process.end() == 0
        assert process.other == []
        [line] = [line for line in process.log if line.get("completion_tokens") == 600]
        assert (line["path"], line["status"]) == ("/v1/completions", 200)


def test_ctrl_c_ends_what_takes_too_long_with_an_error() -> None:
    with started("--shutdown-timeout", "0.1") as process:
        process.event("ready")
        with process.stream(ENDLESS) as stream:
            pieces = stream.iter_text()
            text = next(pieces)
            process.child.send_signal(signal.SIGINT)
            text += "".join(pieces)
        assert chunks(text)[-1]["error"]["code"] == 503
        assert process.end() == 0


def test_it_can_be_told_to_end_while_the_model_loads() -> None:
    with started() as process:
        process.child.send_signal(signal.SIGTERM)
        assert process.end() == 0


def test_an_engine_that_dies_ends_everything_with_an_error() -> None:
    with started() as process:
        process.event("ready")
        with process.stream(ENDLESS) as stream:
            pieces = stream.iter_text()
            text = next(pieces)
            for child in engine_processes(process.child.pid):
                os.kill(child, signal.SIGKILL)
            text += "".join(pieces)
        assert chunks(text)[-1]["error"]["code"] == 500
        response = process.http.get("/health")
        assert (response.status_code, response.json()) == (503, {"status": "dead"})
        error_of(process.http.post("/v1/completions", json={"prompt": "a"}), 503)
        assert process.end() == 1
        assert process.event("the engine died")["error"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--block-size", "0"), "block_size=0"),
        (("no-such-model",), "no-such-model"),
        (("--max-model-len", "100000"), "max_model_len=100000"),
        (("--enable-auto-tool-choice",), "--tool-call-parser"),
        (("--tool-call-parser", "nobody's"), "hermes"),
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
        (("teachlm", "--model", "other"), "give one"),
        (("--chat-template", "no-such-file"), "no-such-file"),
        (("--ssl-keyfile", "no-such-file"), "no-such-file"),
    ],
)
def test_what_is_refused_is_one_line_and_exit_code_1(arguments: tuple[str, ...], said: str) -> None:
    assert said in refusal(*arguments)
