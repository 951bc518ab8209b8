"""A server's life: it listens at once, loads the model beside that, and ends in one of three ways.

told to (SIGTERM, Ctrl-C)   accepts no more requests, finishes what is open or runs out of time; exit code 0
the model is refused        ends with the reason
the engine dies             every request ends with an error, /health says so for a moment; exit code 1
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn

from teachllm.config import EngineConfig
from teachllm.server.app import create_app
from teachllm.server.freed_memory import give_back_freed_memory
from teachllm.server.http import log
from teachllm.server.http.connections import PatientProtocol
from teachllm.server.options import ServerOptions
from teachllm.server.service import Service
from teachllm.server.start import EngineClient, start_engine, start_text_workers
from teachllm.server.trace_endpoint import TraceHub
from teachllm.startup_progress import StartupStage

if TYPE_CHECKING:
    from teachllm.engine.processes.text_workers import TextWorkers

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LINGER = 2.0  # seconds in which whoever asks for the health of a dead engine learns of it
_TURN = 0.001  # seconds after which the event loop, when it is busy, lets the engine's thread pass its news on
# Seconds until a silent connection is asked whether it is there, between two such questions, and how many of them;
# milliseconds for which what was sent may stay unacknowledged.
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 120_000}
_LAST_WORDS = 5  # seconds for answers to reach their clients after everything has been aborted
logger = logging.getLogger("teachllm.server")


def serve(config: EngineConfig, options: ServerOptions) -> int:
    """Serves until it is told to end.

    Returns:
        The exit code of the process.

    Raises:
        ValueError: the settings or the checkpoint are refused, or the address cannot be listened on.
    """
    log.set_up(options.log_format, options.uvicorn_log_level)
    sys.setswitchinterval(_TURN)
    if options.tool_call_parser is not None:
        from teachllm.server.openai.tool_parsers import tool_parser

        tool_parser(options.tool_call_parser)  # a wrong name is refused now, not by the first request
    lifecycle = _ServerLifecycle(config, options)
    with contextlib.closing(_listen(options)) as listener:
        with asyncio.Runner(loop_factory=lifecycle.server.config.get_loop_factory()) as runner:
            code = runner.run(lifecycle.run(listener))
        if options.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(options.uds)
        if lifecycle.is_loading:  # nothing can interrupt that, and ending under it can crash
            _leave_at_once(code)
    return code


class _Server(uvicorn.Server):
    """uvicorn, which leaves signals to us: its own handling ends the process by the signal, not with exit code 0."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


class _ServerLifecycle:
    """One server from its beginning to its end."""

    def __init__(self, config: EngineConfig, options: ServerOptions) -> None:
        self._config, self._options = config, options
        self._traces = [TraceHub() for _ in range(config.data_parallel_size if options.trace_endpoint else 0)]
        self._service = Service(config.model, options, self._traces)
        self.server = _Server(
            uvicorn.Config(
                create_app(self._service),
                log_config=None,
                log_level=options.uvicorn_log_level,
                access_log=False,
                http=PatientProtocol,
                lifespan="off",
                ws="none",
                server_header=False,
                ssl_keyfile=options.ssl_keyfile,
                ssl_certfile=options.ssl_certfile,
                ssl_ca_certs=options.ssl_ca_certs,
                ssl_cert_reqs=options.ssl_cert_reqs,
                ssl_ciphers=options.ssl_ciphers,
                timeout_graceful_shutdown=_LAST_WORDS,
            )
        )
        try:
            self.server.config.load()
        except OSError as error:  # of TLS, too
            raise ValueError(f"--ssl-keyfile and --ssl-certfile: {error}") from error
        self._told_to_end = self._told_again = self._died = asyncio.Event()
        self.is_loading = False
        self._workers: TextWorkers | None = None

    async def run(self, listener: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        self._told_to_end, self._told_again, self._died = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self.server.serve(sockets=[listener]))
        logger.info("listening", extra={"fields": {"url": self._url(listener)}})
        trimming = asyncio.create_task(give_back_freed_memory())
        try:
            if await self._load():
                await _first_of(self._told_to_end, self._died)
            return await self._end()
        finally:
            trimming.cancel()
            for hub in self._traces:
                hub.close()
            self.server.should_exit = True
            await serving
            if self._workers is not None:
                self._workers.close()
            if self._service.client is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(_in_thread(self._service.client.close)), _LAST_WORDS)

    def _url(self, listener: socket.socket) -> str:
        if self._options.uds is not None:
            return f"unix:{self._options.uds}"
        scheme = "https" if self._options.ssl_keyfile else "http"
        host, port = listener.getsockname()[:2]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def _load(self) -> bool:
        """Loads the model; False if the server was told to end meanwhile."""
        began = time.perf_counter()
        self.is_loading = True
        loop = asyncio.get_running_loop()

        def on_end(error: Exception | None) -> None:
            if error is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._on_death, error)

        def load() -> EngineClient:
            self._workers = workers = start_text_workers(self._config)  # they load beside the model
            client = start_engine(
                self._config,
                on_stats=self._service.metrics.on_step,
                on_end=on_end,
                trace_sinks=[hub.sink for hub in self._traces],
                progress=self._on_progress,
            )
            workers.wait_until_loaded()
            gc.collect()
            gc.freeze()  # what is loaded stays: a collection would stop every stream while it looked at all of that
            return client

        loading = _in_thread(load)
        told = asyncio.create_task(self._told_to_end.wait())
        both: set[asyncio.Future[Any]] = {loading, told}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if not loading.done():
            return False
        self.is_loading = False
        self._service.started(loading.result(), self._workers)
        seconds = round(time.perf_counter() - began, 2)
        logger.info("ready", extra={"fields": {"model": self._config.model, "seconds": seconds}})
        return True

    def _on_progress(self, stage: StartupStage, done: int, total: int) -> None:
        """Note how far the engine is, in a thread of its own, and log where a stage begins."""
        if self._service.startup.get("stage") != stage:
            logger.info("starting", extra={"fields": {"stage": stage, "of": total}})
        self._service.starts(stage, done, total)

    async def _end(self) -> int:
        if self._died.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._service.idle(), _LAST_WORDS)
            await asyncio.sleep(_LINGER)
            return 1
        self._service.stop()
        logger.info("ending", extra={"fields": {"open": self._service.num_open}})
        idle = asyncio.create_task(self._service.idle())
        again, died = (asyncio.create_task(event.wait()) for event in (self._told_again, self._died))
        timeout = self._options.shutdown_timeout
        await asyncio.wait({idle, again, died}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done():
            logger.warning("aborting", extra={"fields": {"open": self._service.num_open}})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS):
                    for generation in list(self._service.open):
                        await generation.abort()
                    await asyncio.wait({idle})
        for task in (idle, again, died):
            task.cancel()
        return 1 if self._died.is_set() else 0

    def _on_signal(self) -> None:
        (self._told_again if self._told_to_end.is_set() else self._told_to_end).set()

    def _on_death(self, error: Exception) -> None:
        logger.error("the engine died", extra={"fields": {"error": f"{type(error).__name__}: {error}"}})
        self._service.died()
        self._died.set()


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="loader", daemon=True).start()
    return future


def _listen(options: ServerOptions) -> socket.socket:
    listener = None
    try:
        listener = _unix_socket(options.uds) if options.uds is not None else _tcp_socket(options.host, options.port)
        listener.listen()  # who reads that it does may come at once
    except OSError as error:
        if listener is not None:
            listener.close()
        reason = error.strerror or str(error)
        if options.uds is not None:
            raise ValueError(f"cannot listen on {options.uds}: {reason}: choose another --uds") from error
        where = f"{options.host}:{options.port}"
        raise ValueError(f"cannot listen on {where}: {reason}: choose another --port or --host") from error
    return listener


def _tcp_socket(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = sorted(found, key=lambda each: each[0] != socket.AF_INET)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Of all connections: one whose other end has gone without a word is found out, and closed.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _unix_socket(path: str) -> socket.socket:
    if _is_left_over(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
    except OSError:
        listener.close()
        raise
    return listener


def _is_left_over(path: str) -> bool:
    """Return whether the path is a socket that no process listens on, as a killed server leaves it."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)  # of one that has no time to answer
        return probe.connect_ex(path) == errno.ECONNREFUSED


def _leave_at_once(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
