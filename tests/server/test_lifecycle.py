"""A server's life from listening to its exit code, in this process, in front of an engine that does as it is told."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from teachllm.config import EngineConfig
from teachllm.server import freed_memory, lifecycle
from teachllm.server.http import connections
from teachllm.server.options import ServerOptions
from teachllm.startup_progress import StartupProgress
from tests.clients import http_client
from tests.server.fake_engine import FakeEngineClient, FakeWorkers, chunks, error_of
from tests.waiting import HANG_SECONDS, wait_for

PATH = "/v1/completions"


class Engine(FakeEngineClient):
    """Holds its requests until `go` is set in the server's thread."""

    async def submit(self, *arguments: Any, **options: Any) -> Any:
        self.loop = asyncio.get_running_loop()
        return await super().submit(*arguments, **options)

    def go_on(self) -> None:
        self.loop.call_soon_threadsafe(self.go.set)


class Life:
    """One server in the main thread, and what its client in another thread needs.

    Attributes:
        engine_client: The engine, once `loads` is set.
        loads: Loading ends when it is set; it fails with `refusal`, if there is one.
        log: Events of the server, each with its fields.
        left_with: The exit code of a process that is left in the middle of loading.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.options = ServerOptions(port=0, **options)
        self.loads = threading.Event()
        self.refusal: Exception | None = None
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.left_with: int | None = None
        self._started = threading.Event()
        monkeypatch.setattr(lifecycle, "start_engine", self._start)
        monkeypatch.setattr(lifecycle, "start_text_workers", lambda config: FakeWorkers())
        monkeypatch.setattr(lifecycle, "_leave_at_once", lambda code: setattr(self, "left_with", code))
        monkeypatch.setattr(lifecycle, "_LINGER", 0.0)
        monkeypatch.setattr(lifecycle, "_LAST_WORDS", int(HANG_SECONDS))
        monkeypatch.setattr(lifecycle.log, "set_up", lambda *_: None)
        monkeypatch.setattr(lifecycle.logger, "_log", self._note)
        monkeypatch.setattr(lifecycle.logger, "level", logging.INFO)

    def _start(
        self, config: EngineConfig, *, on_end: Callable[[Exception], None], progress: StartupProgress, **_: Any
    ) -> Engine:
        self.progress = progress
        self._started.set()
        assert self.loads.wait(HANG_SECONDS)
        if self.refusal is not None:
            raise self.refusal
        self.on_end = on_end
        self.engine_client = Engine()
        return self.engine_client

    def _note(self, level: int, message: str, *_: Any, extra: Any, **__: Any) -> None:
        self.log.append((message, extra["fields"]))

    def fields(self, event: str) -> dict[str, Any]:
        """Wait for an event, and return its fields."""
        wait_for(lambda: event in dict(self.log))
        return dict(self.log)[event]

    def run(self, client: Callable[[httpx.Client], Any]) -> int:
        """Serve until the end, with a client beside it in a thread; return the exit code."""

        def use() -> None:
            with http_client(self.fields("listening")["url"]) as http:
                client(http)

        with ThreadPoolExecutor(1) as pool:
            used = pool.submit(use)
            code = lifecycle.serve(EngineConfig(model="m"), self.options)
            used.result(HANG_SECONDS)
        return code

    def hold(self) -> None:
        """Let no request of the engine go on."""
        self.engine_client.go = asyncio.Event()


@pytest.fixture(autouse=True)
def settings_of_the_process() -> Iterator[None]:
    interval, handlers = sys.getswitchinterval(), [signal.getsignal(number) for number in lifecycle.SIGNALS]
    yield
    sys.setswitchinterval(interval)
    for number, handler in zip(lifecycle.SIGNALS, handlers, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Life]:
    return lambda **options: Life(monkeypatch, **options)


def tell(number: int) -> None:
    os.kill(os.getpid(), number)


def ask(http: httpx.Client, life: Life, meanwhile: Callable[[], Any]) -> list[dict[str, Any]]:
    """Stream a request, do something while it is open, and return its chunks."""
    with http.stream("POST", PATH, json={"prompt": "a", "stream": True}) as response:
        wait_for(lambda: life.engine_client.open)
        meanwhile()
        return chunks(response.read().decode())


def test_a_server_listens_at_once_and_finishes_what_is_open_when_it_is_told_to_end(make: Callable[..., Life]) -> None:
    life = make(shutdown_timeout=HANG_SECONDS)

    def client(http: httpx.Client) -> None:
        response = http.get("/health")
        assert (response.status_code, response.json()) == (503, {"status": "starting"})
        life.loads.set()
        assert life.fields("ready")["model"] == "m"
        assert http.get("/health").json() == {"status": "healthy"}
        life.hold()

        def end() -> None:
            tell(signal.SIGTERM)
            assert life.fields("ending") == {"open": 1}
            error_of(http.post(PATH, json={"prompt": "a"}), 503)
            assert http.get("/health").json() == {"status": "stopping"}
            life.engine_client.go_on()

        assert ask(http, life, end)[-1]["choices"][0]["finish_reason"] == "stop"

    assert life.run(client) == 0
    assert "aborting" not in dict(life.log)


@pytest.mark.parametrize("timeout", [0.01, 2 * HANG_SECONDS], ids=["time runs out", "a second Ctrl-C"])
def test_what_is_open_ends_with_an_error_when_time_runs_out_or_at_a_second_signal(
    make: Callable[..., Life], timeout: float
) -> None:
    life = make(shutdown_timeout=timeout)
    life.loads.set()

    def client(http: httpx.Client) -> None:
        life.fields("ready")
        life.hold()

        def end() -> None:
            tell(signal.SIGINT)
            life.fields("ending")
            if timeout > 1:
                tell(signal.SIGINT)

        last = ask(http, life, end)[-1]
        assert last["error"]["code"] == 503

    assert life.run(client) == 0
    assert life.fields("aborting") == {"open": 1}


@pytest.mark.parametrize("number", lifecycle.SIGNALS)
def test_a_server_that_is_told_to_end_while_the_model_loads_leaves_at_once(
    make: Callable[..., Life], number: int
) -> None:
    life = make()

    def client(http: httpx.Client) -> None:
        assert life._started.wait(HANG_SECONDS)
        tell(number)

    code = life.run(client)
    life.loads.set()
    assert (code, life.left_with) == (0, 0)


def test_an_engine_that_dies_ends_everything_with_an_error(make: Callable[..., Life]) -> None:
    life = make()
    life.loads.set()

    def client(http: httpx.Client) -> None:
        life.fields("ready")
        life.hold()

        def die() -> None:
            life.engine_client.fails_with = RuntimeError("killed")
            life.on_end(RuntimeError("killed"))
            life.fields("the engine died")
            error_of(http.post(PATH, json={"prompt": "a"}), 503)
            life.engine_client.go_on()

        assert ask(http, life, die)[-1]["error"]["code"] == 500

    assert life.run(client) == 1
    assert life.fields("the engine died")["error"] == "RuntimeError: killed"


def test_health_and_the_log_tell_how_far_a_start_has_come(make: Callable[..., Life]) -> None:
    life = make()

    def client(http: httpx.Client) -> None:
        assert life._started.wait(HANG_SECONDS)
        for done in (1, 83):
            life.progress("kernels", done, 83)
            startup = {"stage": "kernels", "done": done, "of": 83}
            assert http.get("/health").json() == {"status": "starting", "startup": startup}
        assert [fields for event, fields in life.log if event == "starting"] == [{"stage": "kernels", "of": 83}]
        life.loads.set()
        life.fields("ready")
        assert http.get("/health").json() == {"status": "healthy"}
        tell(signal.SIGTERM)

    assert life.run(client) == 0


def test_a_model_that_is_refused_ends_the_server_with_the_reason(make: Callable[..., Life]) -> None:
    life = make()
    life.refusal = ValueError("max_model_len=100000: too much")

    def client(http: httpx.Client) -> None:
        assert http.get("/health").json() == {"status": "starting"}
        life.loads.set()

    with pytest.raises(ValueError, match="max_model_len=100000"):
        life.run(client)


def test_an_address_that_is_taken_is_refused_by_name(make: Callable[..., Life]) -> None:
    life = make(host="192.0.2.1")  # of no machine
    with pytest.raises(ValueError, match=r"cannot listen on 192\.0\.2\.1:0: .*: choose another --port or --host"):
        lifecycle.serve(EngineConfig(model="m"), life.options)


def test_a_wrong_name_of_a_tool_parser_is_refused_at_the_start() -> None:
    options = ServerOptions(port=0, enable_auto_tool_choice=True, tool_call_parser="none")
    with pytest.raises(ValueError, match="none"):
        lifecycle.serve(EngineConfig(model="m"), options)


def test_freed_memory_goes_back_again_and_again_where_the_c_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    async def three_times() -> None:
        trimming = asyncio.create_task(freed_memory.give_back_freed_memory())
        while len(asked) < 3:
            await asyncio.sleep(0)
        trimming.cancel()

    asked: list[int] = []
    monkeypatch.setattr(freed_memory, "_INTERVAL", 0.0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=asked.append))
    asyncio.run(three_times())
    assert asked[:3] == [0, 0, 0]  # nothing is kept at the end of the heap
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    asyncio.run(freed_memory.give_back_freed_memory())  # it returns at once


def test_a_server_on_a_unix_socket_takes_any_host_and_closes_silent_connections(
    make: Callable[..., Life], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connections, "PATIENCE", 0.05)
    path = tmp_path / "server.sock"
    life = make(uds=str(path))
    life.loads.set()

    def client() -> None:
        assert life.fields("listening")["url"] == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any.example") as http:
            life.fields("ready")
            assert http.get("/health").json() == {"status": "healthy"}
        for begun in (b"", b"GET /health HTTP/1.1\r\nHost: x"):
            with socket.socket(socket.AF_UNIX) as silent:
                silent.settimeout(HANG_SECONDS)
                silent.connect(str(path))
                silent.sendall(begun)
                assert silent.recv(1) == b""  # it is closed
        tell(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        used = pool.submit(client)
        assert lifecycle.serve(EngineConfig(model="m"), life.options) == 0
        used.result(HANG_SECONDS)
    with closing(lifecycle._listen(life.options)):  # what a server has left behind is in nobody's way
        assert path.is_socket()
        with pytest.raises(ValueError, match=r"in use: choose another --uds"):
            lifecycle._listen(life.options)
    path.unlink()
    path.touch()
    with pytest.raises(ValueError, match="choose another --uds"):
        lifecycle._listen(life.options)
