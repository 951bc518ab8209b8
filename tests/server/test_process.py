"""`teachllm serve` as its user starts it: a process that listens at once, and ends as it is told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.door import PATIENCE, chunks, error_of

ROOT = Path(__file__).resolve().parents[2]
WINGS = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "cli", "webui", "lessons"))
ENDLESS = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}


class Process:
    """A server in a process, as soon as it listens."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "teachllm_cli", "serve", "--port", "0", "--log-format", "json", *arguments]
        self.child = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": WINGS, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[dict[str, Any]] = []
        self.other: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.event("listening")["url"]
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)

    def _read(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            with self._news:
                try:
                    self.log.append(json.loads(line))
                except ValueError:
                    self.other.append(line)
                self._news.notify_all()
        with self._news:
            self.log.append({"event": "end of the log"})
            self._news.notify_all()

    def event(self, name: str) -> dict[str, Any]:
        """The line of the log with this event, waited for."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.log if line["event"] in (name, "end of the log")]

        with self._news:
            assert self._news.wait_for(found, PATIENCE), self.other
            assert found()[0]["event"] == name, (self.log, self.other)
            return found()[0]

    def end(self) -> int:
        """The exit code, waited for."""
        code = self.child.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def stream(self, content: dict[str, Any]) -> AbstractContextManager[httpx.Response]:
        return self.http.stream("POST", "/v1/completions", json=content)


@contextmanager
def started(*arguments: str, **environment: str) -> Iterator[Process]:
    process = Process(*arguments, **environment)
    try:
        yield process
    finally:
        process.http.close()
        process.child.kill()
        process.end()


def refusal(*arguments: str) -> str:
    """What a server that does not start says, which has to be one line."""
    command = [sys.executable, "-m", "teachllm_cli", "serve", "--port", "0", *arguments]
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": WINGS}, capture_output=True, text=True, timeout=PATIENCE
    )
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
            process.child.send_signal(signal.SIGTERM)
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


def engine_processes(pid: int) -> list[int]:
    """The engine's own processes: children that are no mere helpers of Python's."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    assert found
    return found


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
