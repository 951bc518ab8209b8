"""Process texts where it can be ended: a chat template is a stranger's program, and tokenizing cannot be interrupted.

    the API process              this process                          its children, the workers

    a worker is needed   ─────▶  has the tokenizer, and nothing to do
                                 forks, in milliseconds       ─────▶   one job after another, each within
    job  ──────────────────────────────────────────────────────────▶   limits of CPU time and memory
    ◀──────────────────────────────────────────────────────── result

Who waits for a result may give up: the worker is then killed, and the next job that needs one gets a new one. The other
end is `text_workers.py`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

from teachllm.config import EngineConfig
from teachllm.engine.text.text_jobs import run_text_job
from teachllm.engine.text.token_texts import load_tokenizer
from teachllm.engine.text.tokenizer import Tokenizer
from teachllm.worker.processes.child import end_with_the_parent, leave_signals_to_the_parent

LENGTH_BYTES = 8  # of a frame's length in front of it, and of a command
_NICENESS = 10  # steps go first where there are few cores
KILL = b"kill"  # before a worker's process id


class TextStart(msgspec.Struct, array_like=True):
    """What to load."""

    config: EngineConfig
    folder: str


class TextJob(msgspec.Struct, array_like=True):
    """One job, its arguments as JSON, and what it may cost beyond what its worker has used."""

    name: str
    arguments: bytes
    cpu_seconds: int
    num_bytes: int


class TextResult(msgspec.Struct, array_like=True):
    """What a job gave, or why the text is refused."""

    value: Any = None
    error: str | None = None


encode = msgspec.msgpack.Encoder().encode


def main(descriptor: str) -> None:
    """Load a tokenizer, then fork a worker for each socket that arrives.

    Args:
        descriptor: of the socket to the API process.
    """
    leave_signals_to_the_parent()
    end_with_the_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core is enough for strangers' texts
    control = socket.socket(fileno=int(descriptor))
    start = msgspec.msgpack.decode(_receive(control), type=TextStart)
    try:
        tokenizer = load_tokenizer(start.config, start.folder)
        assert tokenizer is not None
        tokenizer.max_characters_per_token  # noqa: B018 - found once, for all workers
    except ValueError as error:
        _send(control, TextResult(error=str(error)))
        return
    gc.collect()
    gc.freeze()  # the workers share this memory, as long as none writes to it
    _send(control, TextResult())
    workers: set[int] = set()
    while True:
        command, sockets, _, _ = socket.recv_fds(control, LENGTH_BYTES, 1)
        _reap(workers)
        if not command:
            return
        if sockets:
            workers.add(_fork(sockets[0], control, tokenizer))
        elif (pid := int.from_bytes(command[len(KILL) :], "little")) in workers:  # which no other process can be
            os.kill(pid, signal.SIGKILL)


def _fork(descriptor: int, control: socket.socket, tokenizer: Tokenizer) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            end_with_the_parent()
            work(socket.socket(fileno=descriptor), tokenizer)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(descriptor)
    return pid


def _reap(workers: set[int]) -> None:
    with contextlib.suppress(ChildProcessError):  # there is none
        while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            workers.discard(ended)


def work(connection: socket.socket, tokenizer: Tokenizer) -> None:
    """Work on jobs until the other end closes; a limit ends the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _come_last()
    decoder = msgspec.msgpack.Decoder(TextJob)
    with contextlib.suppress(EOFError, ConnectionError):
        _send(connection, TextResult(os.getpid()))
        while True:
            job = decoder.decode(_receive(connection))
            _limit(job.cpu_seconds, job.num_bytes)
            _send(connection, _result(tokenizer, job))


def _come_last() -> None:
    """Let every other process be computed before this one: the engine's steps, above all."""
    os.nice(_NICENESS)
    # Where Linux groups processes by session, which this one has to itself, the groups have a niceness of their own.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICENESS), encoding="ascii")


def _result(tokenizer: Tokenizer, job: TextJob) -> TextResult:
    try:
        return TextResult(run_text_job(tokenizer, job.name, json.loads(job.arguments)))
    except ValueError as error:  # which may quote half a character that was sent
        return TextResult(error=str(error).encode("utf-8", "replace").decode())
    except MemoryError:
        return TextResult(error=f"the text needs more than the {job.num_bytes >> 20} MiB that it may: shorten it")


def _limit(cpu_seconds: int, num_bytes: int) -> None:
    """Let this process use so much more, and no more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + cpu_seconds)
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:  # on Linux alone
        _set_limit(resource.RLIMIT_AS, int(file.read().split()[0]) * resource.getpagesize() + num_bytes)


def _set_limit(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def frame(content: msgspec.Struct) -> bytes:
    """Return a message as it travels: its length, and it."""
    data = encode(content)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def _send(connection: socket.socket, content: msgspec.Struct) -> None:
    connection.sendall(frame(content))


def _receive(connection: socket.socket) -> bytes:
    return _receive_exactly(connection, int.from_bytes(_receive_exactly(connection, LENGTH_BYTES), "little"))


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


if __name__ == "__main__":
    main(sys.argv[1])
