"""A server in a process of its own, for tests that judge it from outside."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx

from tests.clients import http_client
from tests.processes import children, is_for_texts
from tests.programs import start_program
from tests.waiting import HANG_SECONDS


class Process:
    """A server in a process, as soon as it listens."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.child = start_program(
            *("-m", "teachllm_cli", "serve", "--port", "0", "--log-format", "json", *arguments),
            environment=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.log: list[dict[str, Any]] = []
        self.other: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.event("listening")["url"]
        self.http = http_client(self.url)

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
            assert self._news.wait_for(found, HANG_SECONDS), self.other
            assert found()[0]["event"] == name, (self.log, self.other)
            return found()[0]

    def end(self) -> int:
        """The exit code, waited for."""
        code = self.child.wait(HANG_SECONDS)
        self._reader.join(HANG_SECONDS)
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


def engine_processes(pid: int) -> list[int]:
    """The processes of a server's engine: its children, but for the one that works on texts."""
    found = [child for child in children(pid) if not is_for_texts(child)]
    assert found
    return found
