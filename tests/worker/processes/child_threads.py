"""Cores and ranks that are threads of the test: the code of both ends and every byte between them, but no process.

A thread cannot be killed. `kill` is noted, and whoever waits for another rank hears of it; the thread ends by itself as
soon as the parent has closed its ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from teachllm.distributed.rendezvous import Rendezvous
from teachllm.engine.processes import core_link, core_process
from teachllm.engine.processes.core_messages import FromCore, Start, decode_to_core, encode
from teachllm.worker import rank_worker
from teachllm.worker.processes import rank_processes, worker_process
from teachllm.worker.processes.child import LENGTH, start_child
from teachllm.worker.processes.rank_lines import RankWork
from tests.distributed.threads import abort_meetings, connected_in_threads
from tests.waiting import HANG_SECONDS

_NO_FREEZING = SimpleNamespace(collect=lambda: None, freeze=lambda: None)  # the test's own objects are to be collected


class _Stdin:
    """A pipe that has both ends here: it is closed as a whole."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        self._file = open(writer, "wb")  # noqa: SIM115 (closed by whoever started the child)
        self.write, self.flush = self._file.write, self._file.flush

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()
            os.close(self.reader)


class ChildThread:
    """Stands for the `subprocess.Popen` of a process.

    Args:
        main: what it does, given this; `SystemExit` is its exit code, another error is exit code 1.
        pass_fds: descriptors of which it has copies, as a process has.

    Attributes:
        killed: set by `kill`.
        copies: of the descriptors, by the number of each.
    """

    def __init__(self, main: Callable[[ChildThread], object], pass_fds: Sequence[int] = ()) -> None:
        self._main, self._children = main, list[ChildThread]()
        if (parent := getattr(_current, "child", None)) is not None:
            parent._children.append(self)
        self.killed = threading.Event()
        self.signals: list[int] = []
        self.returncode: int | None = None
        self.copies = {descriptor: os.dup(descriptor) for descriptor in pass_fds}
        self.stdin = _Stdin()
        self._thread = threading.Thread(target=self._run, name="child", daemon=True)
        self.pid = id(self)
        self._thread.start()

    def _run(self) -> None:
        _current.child = self
        returncode = 0
        try:
            self._main(self)
        except SystemExit as end:
            returncode = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
            returncode = 1
        self.returncode = -signal.SIGKILL if self.killed.is_set() else returncode
        for descriptor in self.copies.values():
            os.close(descriptor)

    def read(self, num_bytes: int) -> bytes:
        """Read from what is the child's standard input."""
        data = b""
        while len(data) < num_bytes:
            more = os.read(self.stdin.reader, num_bytes - len(data))
            if not more:
                raise SystemExit(1)
            data += more
        return data

    def copy(self, descriptor: int | None) -> int | None:
        """Return its own copy of a descriptor that was passed on."""
        return None if descriptor is None else self.copies[descriptor]

    def has_closed(self, descriptor: int) -> None:
        """Note that its code closes a copy itself."""
        self.copies = {number: copy for number, copy in self.copies.items() if copy != descriptor}

    # -- as a `Popen` --------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(HANG_SECONDS if timeout is None else timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("child", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        if number == signal.SIGKILL and self._thread.is_alive():
            self.killed.set()
            self._abort_meetings()

    def _abort_meetings(self) -> None:
        """Abort the meetings of this child and of its children: a rank ends with its core."""
        abort_meetings(self._thread)
        for child in self._children:
            child._abort_meetings()


_current = threading.local()  # `child`: the one whose thread this is


def ranks_in_threads(patch: pytest.MonkeyPatch) -> None:
    """Have ranks be threads, which exchange tensors as `threads.py` says."""

    def start(module: str, *, pass_fds: Sequence[int], environment: Any) -> ChildThread:
        assert module == worker_process.__name__
        return ChildThread(lambda child: worker_process.main(), pass_fds)

    def what_to_do() -> bytes:
        child: ChildThread = _current.child
        start = worker_process.WorkerStart(*json.loads(child.read(*LENGTH.unpack(child.read(LENGTH.size)))))
        meeting = start.rendezvous and (*start.rendezvous[:2], child.copy(start.rendezvous[2]))
        ring = (*map(child.copy, start.ring[:3]), *start.ring[3:])
        return json.dumps(start._replace(rendezvous=meeting, ring=ring, answers=child.copy(start.answers))).encode()

    _be_harmless(patch, worker_process)
    patch.setattr(rank_processes, "start_child", start)
    patch.setattr(worker_process, "what_to_do", what_to_do)
    patch.setattr(rank_worker, "connected", connected_in_threads)


def cores_in_threads(patch: pytest.MonkeyPatch) -> None:
    """Have cores be threads, and their ranks."""

    def start(module: str, address: str, *, pass_fds: Sequence[int]) -> ChildThread:
        assert module == core_process.__name__
        return ChildThread(lambda child: core_process.main(address), pass_fds)

    def decode(data: bytes) -> list[Any]:
        messages = decode_to_core(data)
        return [own(each) if isinstance(each, Start) else each for each in messages]

    def own(start: Start) -> Start:
        child: ChildThread = _current.child
        meeting, lockstep = start.rendezvous, start.lockstep
        if meeting is not None:
            meeting = meeting._replace(listener=child.copy(meeting.listener))
        if lockstep is not None:
            hears, tells = child.copy(lockstep.hears), tuple(map(child.copy, lockstep.tells))
            lockstep = lockstep._replace(hears=hears, tells=tells)
        return Start(start.config, start.traces, start.replica, meeting, lockstep)

    find_meeting = rank_processes._meeting

    def meeting_of(work: RankWork, stack: contextlib.ExitStack) -> Rendezvous | None:
        if work.rendezvous is not None and work.rendezvous.listener is not None:
            _current.child.has_closed(work.rendezvous.listener)
        return find_meeting(work, stack)

    ranks_in_threads(patch)
    _be_harmless(patch, core_process)
    patch.setattr(rank_processes, "_meeting", meeting_of)
    patch.setattr(core_link, "start_child", start)
    patch.setattr(core_process, "decode_to_core", decode)
    patch.setattr(core_process, "take_share_of_threads", lambda config: None)


def _be_harmless(patch: pytest.MonkeyPatch, module: Any) -> None:
    """Leave out what a process does to itself alone."""
    patch.setattr(module, "leave_signals_to_the_parent", lambda: None)
    patch.setattr(module, "end_with_the_parent", lambda: None)
    patch.setattr(module, "gc", _NO_FREEZING)


def saying(message: FromCore) -> Callable[[ChildThread, str], None]:
    """Return what a core does that says this alone, and ends with exit code 1."""
    import zmq

    def core(child: ChildThread, address: str) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.bind(address)
            socket.recv()
            socket.send(encode(message))
        raise SystemExit(1)

    return core


def loading(child: ChildThread, *_: str) -> None:
    """Say nothing until it is killed: what a core or a rank does that loads for long."""
    child.killed.wait()


def put_in_place(patch: pytest.MonkeyPatch, *cores: Callable[[ChildThread, str], None]) -> list[str]:
    """Have these started in place of cores, and return where they are to listen, as soon as they are."""
    addresses = list[str]()

    def start(module: str, address: str, *, pass_fds: Sequence[int]) -> ChildThread:
        addresses.append(address)
        core = cores[len(addresses) - 1]
        return ChildThread(lambda child: core(child, address))

    patch.setattr(core_link, "start_child", start)
    return addresses


@contextlib.contextmanager
def in_processes() -> Iterator[None]:
    """Have what is started inside of the block be processes again."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (core_link, rank_processes):
            patch.setattr(module, "start_child", start_child)
        yield


@contextlib.contextmanager
def patched(*how: Callable[[pytest.MonkeyPatch], None]) -> Iterator[None]:
    """Apply patches, such as `cores_in_threads`, inside of the block."""
    with pytest.MonkeyPatch.context() as patch:
        for each in how:
            each(patch)
        yield
