"""Processes that have imported PyTorch when they begin: forked, in tests, from one that has and idles.

A fresh interpreter takes four seconds of a processor to import what a rank or a core needs, and tests start hundreds.
So a nursery is asked, which is started once and only imports: nobody patches anything there. What it forks has the
descriptors, environment and session that a fresh interpreter would have, and is this process's own child: the nursery
forks one that forks it and ends, and meanwhile this process adopts orphans. Whoever starts ranks in turn, such as a
core, a program of a test (`start_program`) or a notebook's kernel, has a nursery of its own from its first moment. One
that is to import a copy of the project, with a fault in it, forgets what it has of this one.
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
import tempfile
import threading
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from teachllm.worker.processes import child
from teachllm_lessons import mutants

_SET_NAME, _SUBREAPER = 15, 36  # of prctl
NURSERY = "nursery"  # its name in /proc
_CORE, _RANK = "teachllm.engine.processes.core_process", "teachllm.worker.processes.worker_process"
_IMPORTED = (_CORE, _RANK, "teachllm.server.lifecycle", "matplotlib.figure", "teachllm_lessons.breaking")
_MOST_DESCRIPTORS = 64
_ROOT = str(Path(__file__).resolve().parent.parent)
_lock = threading.Lock()
_nursery: list[tuple[int, socket.socket]] = []  # its pid, and the wire to it

start_fresh_child, start_fresh_python = child.start_child, mutants.start_python


class ReadyChild(subprocess.Popen):  # type: ignore[type-arg]
    """A child that is there already."""

    def __init__(
        self,
        pid: int,
        arguments: Sequence[str],
        stdin: IO[Any] | None = None,
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
    ) -> None:
        self.pid, self.args, self.returncode = pid, [sys.executable, *arguments], None
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self._waitpid_lock, self._child_created = threading.Lock(), True
        self._sigint_wait_secs, self._communication_started = 0.25, False
        self._input, self.text_mode, self.encoding, self.errors = None, True, None, None


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
    read, write = os.pipe()
    command = ["-m", module, *arguments]
    given = {0: read, 1: 2, 2: 2} | {each: each for each in pass_fds}
    try:
        pid = _forked(command, child.child_environment(environment), given)
    finally:
        os.close(read)
    return ReadyChild(pid, command, stdin=os.fdopen(write, "wb"))


def environment_with(**variables: str) -> dict[str, str]:
    """In which a process finds what this one finds."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)} | variables


def start_program(
    *arguments: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None, **pipes: int
) -> subprocess.Popen[str]:
    """Python with these arguments, `-m module` or `-c code` and those of the program, in a session of its own.

    Args:
        environment: set for it, whatever this process has.
        cwd: its folder; this process's if it is not named.
        pipes: `stdin`: PIPE or nothing; `stdout`, `stderr`: PIPE or DEVNULL, this process's if not named. Text.
    """
    known = environment_with(**(environment or {}))
    if sys.platform != "linux":
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, **pipes, "cwd": cwd, "start_new_session": True}
        return subprocess.Popen([sys.executable, *arguments], env=known, text=True, **options)
    null = os.open(os.devnull, os.O_RDWR)
    given, ours = {0: null, 1: 1, 2: 2}, dict[str, IO[str]]()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if pipes.get(name) == subprocess.PIPE:
            ends = os.pipe()
            given[number] = ends[number > 0]
            ours[name] = os.fdopen(ends[number == 0], "r" if number else "w")
        elif pipes.get(name) == subprocess.DEVNULL:
            given[number] = null
    try:
        pid = _forked(arguments, known, given, cwd)
    finally:
        for each in {null, *given.values()} - {1, 2}:
            os.close(each)
    return ReadyChild(pid, arguments, **ours)


def start_python_in(folder: Path, *arguments: str, **pipes: int) -> subprocess.Popen[str]:
    """As `mutants.start_python`."""
    return start_program(*arguments, environment=mutants.environment(folder), cwd=folder, **pipes)


def run_program(
    *arguments: str, environment: Mapping[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Waits for `start_program`; what it printed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_program(*arguments, environment=environment, **pipes) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def launch_kernel(
    command: Sequence[str], env: Mapping[str, str], cwd: Path | str | None = None, **others: Any
) -> subprocess.Popen[str]:
    """As Jupyter's of this name: its kernels have imported what every notebook does."""
    arguments = command[command.index("-m") :]
    environment = environment_with(**env, JPY_PARENT_PID=str(os.getpid()))  # which it ends with
    return ReadyChild(_forked(arguments, environment, {0: 0, 1: 1, 2: 2}, cwd), arguments)


def _forked(
    arguments: Sequence[str], environment: Mapping[str, str], given: Mapping[int, int], cwd: Path | str | None = None
) -> int:
    """The pid of a new process: Python with these arguments; of each of its descriptors, which one it is here."""
    start_nursery()
    asked = {"arguments": arguments, "cwd": str(cwd or os.getcwd()), "to": [*given], "environment": dict(environment)}
    message = json.dumps(asked).encode()
    with _lock:
        wire = _nursery[0][1]
        _prctl(_SUBREAPER, 1)
        try:
            descriptors = array.array("i", given.values())
            wire.sendmsg([struct.pack("I", len(message))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            wire.sendall(message)
            (pid,) = struct.unpack("I", wire.recv(4, socket.MSG_WAITALL))
        finally:
            _prctl(_SUBREAPER, 0)
    return int(pid)


def install() -> None:
    """From now on processes start so, for modules that are imported after this: those of `start_child`, and programs
    that import a copy of the project."""
    child.start_child = start_ready_child
    mutants.start_python = start_python_in


def install_kernels() -> None:
    """And kernels of notebooks; Jupyter's client takes half a second to import."""
    from jupyter_client.provisioning import local_provisioner

    local_provisioner.launch_kernel = launch_kernel


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
    """Each under its new number; none beside."""
    os.setsid()
    above = 1 + max([_MOST_DESCRIPTORS, *descriptors, *to])
    high = [os.dup2(descriptor, above + i) for i, descriptor in enumerate(descriptors)]
    os.closerange(0, above)
    for source, target in zip(high, to, strict=True):
        os.dup2(source, target)
    os.closerange(above, above + len(high))


def _fork_nursery() -> None:
    """For a process that has just been forked, and has no thread yet."""
    ours, its = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):  # or whoever waits for one of its parent's to end would wait for this one, too
            os.dup2(null, standard)
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
    tempfile.tempdir = None  # it is the environment's
    kind, what, *arguments = asked["arguments"]
    sys.argv = [what if kind == "-m" else kind, *arguments]
    sys.stdin = os.fdopen(0, closefd=False)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if _ROOT not in path:
        _forget_the_project()
    elif what != _RANK:
        _fork_nursery()
    if kind == "-m":
        warnings.filterwarnings("ignore", message=".*found in sys.modules.*", category=RuntimeWarning)
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(what, vars(sys.modules["__main__"]))
    sys.exit()


def _forget_the_project() -> None:
    """For a process that has been forked to import a copy of it."""
    for name in [*sys.modules]:
        if name.startswith(("teachllm", "tests.")):
            del sys.modules[name]


def main() -> None:
    wire = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(wire.fileno(), False)
    install()
    if find_spec("jupyter_client"):
        install_kernels()
    for module in _IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # what is not installed no test starts
            __import__(module)
    gc.collect()
    gc.freeze()
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False  # PyTorch would take its libraries apart: a tenth of a second at the end of every child
    _run(_serve(wire))


if __name__ == "__main__":
    main()
