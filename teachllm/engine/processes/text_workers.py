"""TextWorkers: the API process's end of the processes in which strangers' texts are processed (`text_process.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from teachllm.checkpoint.files import find_folder
from teachllm.config import EngineConfig
from teachllm.engine.processes.text_process import KILL, LENGTH_BYTES, TextJob, TextResult, TextStart, frame
from teachllm.worker.processes.child import how_it_ended, start_child

MAX_WORKERS = 4
LARGE = 1 << 16  # bytes of text from which on a job is large: one worker is kept from those
_CPU_SECONDS = 5  # that any job may take
_BYTES_PER_SECOND = 100_000  # of text, for more time; a slow tokenizer on a slow machine does as many
_NUM_BYTES = 256 << 20  # of memory that any job may take
_BYTES_PER_BYTE = 1024  # of memory, for each of text beyond that
_PATIENCE = 0.1  # seconds for a process to end whose sockets are closed
log = logging.getLogger(__name__)


class TextLimitError(ValueError):
    """A text took more time or memory than it may."""


@dataclass(slots=True)
class _Worker:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pid: int


class TextWorkers:
    """Some processes that have a tokenizer. Belongs to one event loop, but for `start` and `close`.

    If the process that forks workers dies, they keep running, and the next job that needs a new worker restarts it.
    """

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._control, self._process = _start(config, folder)
        self._ended: list[subprocess.Popen[bytes]] = []
        self._restarts = asyncio.Lock()
        self._idle: list[_Worker] = []
        self._turns = asyncio.Semaphore(MAX_WORKERS)
        self._turns_of_large = asyncio.Semaphore(MAX_WORKERS - 1)

    @classmethod
    def start(cls, config: EngineConfig) -> TextWorkers:
        """Start a process with the tokenizer of a model; return while it loads.

        Raises:
            ValueError: there is no such model.
        """
        return cls(config, find_folder(config.model, config.revision, config.load_format, config.trust_remote_code))

    def wait_until_loaded(self) -> None:
        """Return when the tokenizer is there.

        Raises:
            ValueError: it cannot be read.
            RuntimeError: the process has ended.
        """
        with self._control.makefile("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not length:
                raise RuntimeError(f"the process for texts has ended with {how_it_ended(self._process.wait())}")
            _value(msgspec.msgpack.decode(file.read(length), type=TextResult))

    async def run(self, name: str, arguments: bytes) -> Any:
        """Run a job of `text_jobs.py`. Cancelled, it ends at once, wherever it is.

        Args:
            arguments: as JSON; the more there is of it, the longer it may take.

        Raises:
            ValueError: the text is refused, or takes too long.
            RuntimeError: the process that workers come from has ended, and cannot be started again.
        """
        if len(arguments) < LARGE:
            return await self._run(name, arguments)
        async with self._turns_of_large:
            return await self._run(name, arguments)

    async def _run(self, name: str, arguments: bytes) -> Any:
        seconds = _CPU_SECONDS + len(arguments) // _BYTES_PER_SECOND
        num_bytes = _NUM_BYTES + len(arguments) * _BYTES_PER_BYTE
        async with self._turns:
            worker = self._idle.pop() if self._idle else await self._fork()
            is_done = False
            try:
                worker.writer.write(frame(TextJob(name, arguments, seconds, num_bytes)))
                await worker.writer.drain()
                result = await _receive(worker.reader)
                is_done = True
            except (ConnectionError, EOFError):
                raise TextLimitError(
                    f"processing the text took more than {seconds} seconds of CPU time or {num_bytes >> 20} MiB: "
                    "shorten it, or if it is short, look what the chat template does"
                ) from None
            finally:
                if is_done and len(arguments) < LARGE:
                    self._idle.append(worker)
                else:  # with a large one's memory
                    self._end(worker)
            return _value(result)

    async def _fork(self) -> _Worker:
        while True:
            if self._process.poll() is not None:
                await self._restart()
            asked = self._process
            try:
                return await self._ask_for_worker()
            except (OSError, EOFError):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    asked.wait(_PATIENCE)
                    continue
                raise

    async def _ask_for_worker(self) -> _Worker:
        ours, its = socket.socketpair()
        with its:
            socket.send_fds(self._control, [bytes(LENGTH_BYTES)], [its.fileno()])
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            return _Worker(reader, writer, _value(await _receive(reader)))
        except BaseException:
            writer.close()
            raise

    async def _restart(self) -> None:
        """Start the process again, while all jobs that need it wait."""
        async with self._restarts:
            if (code := self._process.poll()) is None:  # another one has done it
                return
            log.warning("the process for texts has ended with %s: it is started again", how_it_ended(code))
            self._ended.append(self._process)
            self._control.close()
            self._control, self._process = _start(self._config, self._folder)
            await asyncio.to_thread(self.wait_until_loaded)

    def _end(self, worker: _Worker) -> None:
        worker.writer.close()
        with contextlib.suppress(OSError):
            self._control.sendall(KILL + worker.pid.to_bytes(LENGTH_BYTES - len(KILL), "little"))

    def close(self) -> None:
        """End the processes; jobs under way end, too."""
        self._control.close()
        self._process.kill()
        for process in (*self._ended, self._process):
            process.wait()
            assert process.stdin is not None
            process.stdin.close()  # which its workers notice


def _start(config: EngineConfig, folder: Path) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, its = socket.socketpair()
    with its:
        process = start_child("teachllm.engine.processes.text_process", str(its.fileno()), pass_fds=(its.fileno(),))
    ours.sendall(frame(TextStart(config, str(folder))))
    return ours, process


async def _receive(reader: asyncio.StreamReader) -> TextResult:
    length = await reader.readexactly(LENGTH_BYTES)
    data = await reader.readexactly(int.from_bytes(length, "little"))
    return msgspec.msgpack.decode(data, type=TextResult)


def _value(result: TextResult) -> Any:
    if result.error is not None:
        raise ValueError(result.error)
    return result.value
