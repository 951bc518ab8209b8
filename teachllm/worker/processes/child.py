"""Processes of one's own: a fresh interpreter each, which never outlives the one that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, ParamSpec

P = ParamSpec("P")

_LIBRARY_SETTINGS = {
    # PyTorch and oneDNN keep a plan for each number of rows that a matrix product has met: in the end, hundreds of MB.
    "LRU_CACHE_CAPACITY": "16",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    # An OpenMP thread that waits at a barrier spins this often and then sleeps; GNU's default is 15 times as much. The
    # sleeping thread frees its core for a thread that shares another core with a tokenizing process: the longest gap
    # between two tokens is then half as long.
    "GOMP_SPINCOUNT": "20000",
}
# What Python code may handle, and whose handler may raise in the middle of anything.
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
LENGTH = struct.Struct("=q")  # of what a child is told
_STDERR = 2  # this process's own: `sys.stderr` may be a notebook's, or a test's, which is no file


def start_child(
    module: str, *arguments: str, pass_fds: Sequence[int] = (), environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Run a module in a fresh interpreter, which sees the packages that this one sees.

    A new session: Ctrl-C does not reach it. Its standard input is a pipe that closes when this process ends.

    Args:
        pass_fds: descriptors that it inherits, under the same numbers.
        environment: set for it, whatever this process has.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],  # -P: nothing of the current folder
        stdin=subprocess.PIPE,
        stdout=_STDERR,
        env=child_environment(environment),
        pass_fds=pass_fds,
        start_new_session=True,
    )


def tell(child: subprocess.Popen[bytes], what: bytes) -> None:
    """Write on a child's standard input, before anything else, what `what_to_do` returns there.

    Raises:
        BrokenPipeError: it has ended already.
    """
    assert child.stdin is not None
    child.stdin.write(LENGTH.pack(len(what)) + what)
    child.stdin.flush()


def what_to_do() -> bytes:
    """Return, in the child, what `tell` has written."""
    (length,) = LENGTH.unpack(_read(LENGTH.size))
    return _read(length)


def _read(num_bytes: int) -> bytes:
    """Read from standard input, not a byte more: after that it is the parent's sign of life."""
    data = b""
    while len(data) < num_bytes:
        more = os.read(0, num_bytes - len(data))
        if not more:
            raise SystemExit(1)  # the parent has ended
        data += more
    return data


def child_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what a child finds in its environment: this process's, this one's packages, and what is given."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return _LIBRARY_SETTINGS | os.environ | {"PYTHONPATH": path} | dict(more or {})


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C, and the other signals of `_HANDLED` that Python code handles, back until the block has ended.

    A handler may raise, and half of what the block does would remain. A second signal of the same kind is handled at
    once, so that a block that hangs can be left. However many handlers raise, each signal is handled.
    """
    if threading.current_thread() is not threading.main_thread():  # no other one is interrupted
        yield
        return
    waiting: list[int] = []
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def remember(number: int, frame: FrameType | None) -> None:
        if number in waiting:
            handlers[number](number, frame)
        else:
            waiting.append(number)

    def handle_waiting() -> None:
        with contextlib.ExitStack() as each:
            for number in reversed(waiting):
                each.callback(signal.raise_signal, number)

    with contextlib.ExitStack() as at_the_end:  # runs all of it, whatever raises
        at_the_end.callback(handle_waiting)
        for handled in _HANDLED:
            if callable(handler := signal.getsignal(handled)):
                handlers[handled] = handler
                at_the_end.callback(signal.signal, handled, handler)
                signal.signal(handled, remember)
        yield


def leave_signals_to_the_parent() -> None:
    """Ignore, in the child, Ctrl-C and SIGTERM, which may be sent to all processes at once. The parent may have
    something to finish, and ends the child then; a user who cannot wait for that kills it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def end_with_the_parent() -> None:
    """Watch, in the child, its standard input, and end when the other end closes, as it does with the parent, killed
    or not."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent's end", daemon=True).start()


def only_here(act: Callable[P, None]) -> Callable[P, None]:
    """Return `act` for this process: in a child that is forked from it, it does nothing.

    A child inherits whatever closes what its parent has started, and runs it when it ends.
    """
    here = os.getpid()

    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        if os.getpid() == here:
            act(*args, **kwargs)

    return guarded


def refuse_elsewhere() -> Callable[[], None]:
    """Return a function that refuses in a child that is forked from this process, and does nothing here.

    The child has its parent's ends of pipes and sockets: what it wrote there, the parent's processes would take for
    the parent's, and it would wait for answers that the parent reads.
    """
    here = os.getpid()

    def check() -> None:
        if os.getpid() != here:
            raise RuntimeError("the engine belongs to the process that this one was forked from: make one here, too")

    return check


def how_it_ended(returncode: int) -> str:
    """Name the end of a process for people: the signal's name, or the exit code."""
    return signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"
