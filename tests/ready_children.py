"""Processes of an engine that have imported PyTorch when they begin: forked, in tests, from one that has and idles.

A fresh interpreter takes four seconds of a processor to import what a rank or a core needs, and tests start hundreds.
So `start_child` asks a nursery, which is started once and only imports: nobody patches anything there. What it forks
has the descriptors, environment and session that a fresh interpreter would have, and is this process's own child: the
nursery forks one that forks it and ends, and meanwhile this process adopts orphans. A core, which starts ranks in turn,
has a nursery of its own from its first moment. What programs of tests start begins as always.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import socket
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from teachllm.worker.processes import child

_SET_NAME, _SUBREAPER = 15, 36  # of prctl
NURSERY = "nursery"  # its name in /proc
_CORE, _RANK = "teachllm.engine.core_process", "teachllm.worker.processes.worker_process"
_MOST_DESCRIPTORS = 64
_lock = threading.Lock()
_nursery: list[tuple[int, socket.socket]] = []  # its pid, and the wire to it

start_fresh_child = child.start_child


class ReadyChild(subprocess.Popen):  # type: ignore[type-arg]
    """A child that is there already."""

    def __init__(self, pid: int, arguments: list[str], stdin: int) -> None:
        self.pid, self.args, self.returncode = pid, arguments, None
        self.stdin, self.stdout, self.stderr = os.fdopen(stdin, "wb"), None, None
        self._waitpid_lock, self._child_created = threading.Lock(), True
        self._sigint_wait_secs, self._communication_started = 0.25, False
        self._input, self.text_mode, self.encoding, self.errors = None, None, None, None


def start_nursery() -> None:
    """For the whole run, if there is none."""
    if _nursery:
        return
    ours, its = socket.socketpair()
    with its:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.ready_children", str(its.fileno())],
            stdin=subprocess.DEVNULL,
            env=child.child_environment(),
            pass_fds=[its.fileno()],
            start_new_session=True,
        )
    _nursery.append((process.pid, ours))
    atexit.register(ours.close)


def nursery_pid() -> int | None:
    """That of this process's own, which has its name only once it has imported what it needs."""
    return _nursery[0][0] if _nursery else None


def start_ready_child(
    module: str, *arguments: str, pass_fds: Sequence[int] = (), environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """As `start_child`."""
    if module not in (_CORE, _RANK):
        return start_fresh_child(module, *arguments, pass_fds=pass_fds, environment=environment)
    start_nursery()
    read, write = os.pipe()
    asked = {"module": module, "arguments": arguments, "cwd": os.getcwd(), "to": list(pass_fds)}
    message = json.dumps(asked | {"environment": child.child_environment(environment)}).encode()
    with _lock:
        wire = _nursery[0][1]
        _prctl(_SUBREAPER, 1)
        try:
            descriptors = array.array("i", [read, 2, *pass_fds])
            wire.sendmsg([struct.pack("I", len(message))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            wire.sendall(message)
            (pid,) = struct.unpack("I", wire.recv(4, socket.MSG_WAITALL))
        finally:
            _prctl(_SUBREAPER, 0)
            os.close(read)
    return ReadyChild(pid, [sys.executable, "-m", module, *arguments], write)


def install() -> None:
    """From now on `start_child` is this one's: for modules that are imported after this."""
    child.start_child = start_ready_child


def _prctl(option: int, argument: int | bytes) -> None:
    """Linux's; looked up when it is called, since elsewhere this file is only imported."""
    ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def _serve(wire: socket.socket) -> dict[str, Any]:
    """Forks until this is a fork: returns what it was asked for."""
    _prctl(_SET_NAME, NURSERY.encode())
    while True:
        size, ancillary, *_ = wire.recvmsg(4, socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS))
        if not size:
            os._exit(0)
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data[: len(data) // 4 * 4])
        (length,) = struct.unpack("I", size)
        message = wire.recv(length, socket.MSG_WAITALL)
        told, tells = os.pipe()
        middle = os.fork()
        if middle == 0:
            if os.fork():
                os._exit(0)
            _prctl(_SET_NAME, b"python")  # before anybody can look for it
            os.write(tells, struct.pack("I", os.getpid()))
            asked = json.loads(message)
            wire.detach()
            _take(descriptors, asked["to"])
            return asked
        os.waitpid(middle, 0)  # now it has its new parent
        os.close(tells)
        pid_bytes = os.read(told, 4)
        os.close(told)
        for descriptor in descriptors:
            os.close(descriptor)
        wire.sendall(pid_bytes)


def _take(descriptors: Sequence[int], to: Sequence[int]) -> None:
    """Standard input, standard error for both outputs, the others under the numbers that they had; none beside."""
    os.setsid()
    above = 1 + max([_MOST_DESCRIPTORS, *descriptors, *to])
    high = [os.dup2(descriptor, above + i) for i, descriptor in enumerate(descriptors)]
    os.closerange(0, above)
    for source, target in zip(high, (0, 2, *to), strict=True):
        os.dup2(source, target)
    os.dup2(2, 1)
    os.closerange(above, above + len(high))


def _fork_nursery() -> None:
    """For a process that has just been forked, and has no thread yet."""
    ours, its = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)  # or whoever waits for its parent's input to end would wait for this one, too
        os.setsid()
        _run(_serve(its))
    its.close()
    _nursery[:] = [(pid, ours)]


def _run(asked: Mapping[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(asked["environment"])
    with contextlib.suppress(FileNotFoundError):
        os.chdir(asked["cwd"])
    path = asked["environment"]["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    sys.argv = [asked["module"], *asked["arguments"]]
    sys.stdin = os.fdopen(0, closefd=False)
    if asked["module"] == _CORE:
        _fork_nursery()
    warnings.filterwarnings("ignore", message=".*found in sys.modules.*", category=RuntimeWarning)
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    sys.exit()


def main() -> None:
    wire = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(wire.fileno(), False)
    install()
    for module in (_CORE, _RANK):
        __import__(module)
    gc.collect()
    gc.freeze()
    _run(_serve(wire))


if __name__ == "__main__":
    main()
