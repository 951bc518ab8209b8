"""The processes of the ranks that one machine has, and the lines to and from them.

                         ┌── ring (shared memory) ──▶ rank 0 ── pipe ──┐
    write(message) ──────┼──────────────────────────▶ rank 1 ── pipe ──┼──▶ receive() -> frames
                         └──────────────────────────▶ ...    ── pipe ──┘

All read the same messages, each answers in a pipe of its own. The death of one is the end of all: half of a model
computes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from teachllm.distributed.ring import RingEnd, RingWriter
from teachllm.worker.answers import Kind, Listener
from teachllm.worker.child import how_it_ended, start_child, uninterrupted
from teachllm.worker.errors import EngineDeadError
from teachllm.worker.worker_process import LENGTH, Start

_SECONDS_TO_END = 4.0
_SECONDS_TO_DIE = 5.0  # from a closed pipe to the end of its process
Frame: TypeAlias = tuple[int, Kind, int, bytes]  # a rank, and what it says, see `answers.py`


class RankProcesses:
    """All but `end` is for one thread.

    Args:
        ranks: what those that it starts are called.

    Attributes:
        frames: what was received and nobody has taken yet, in the order of each rank.
        sentinel: readable from the moment on at which one has ended and nobody told it to.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self.frames: deque[Frame] = deque()
        self._lines = _Lines(len(self.ranks))
        self._listeners = {rank: Listener() for rank in self.ranks}
        self.sentinel = self._lines.sentinel
        # Whoever drops this without closing it leaves no process.
        self._finalizer = weakref.finalize(self, _Lines.close, self._lines)

    @property
    def death(self) -> str | None:
        """Why all have ended, if they have."""
        return self._lines.death

    @property
    def processes(self) -> Sequence[subprocess.Popen[bytes]]:
        """By rank."""
        return self._lines.processes

    def start(self, make: Callable[[int, RingEnd, int], Start], num_threads: int) -> None:
        """Starts them.

        Args:
            make: what a rank begins with, given its end of the ring and the descriptor of its pipe.
            num_threads: for the libraries that compute, each.
        """
        lines = self._lines
        for rank, end in zip(self.ranks, lines.ring.ends, strict=True):
            answers, answers_end = os.pipe()
            lines.selector.register(answers, selectors.EVENT_READ, rank)
            try:
                start = make(rank, end, answers_end)
                listener = None if start.rendezvous is None else start.rendezvous[2]
                with uninterrupted():
                    process = start_child(
                        "teachllm.worker.worker_process",
                        pass_fds=[*end.descriptors, answers_end, *([] if listener is None else [listener])],
                        environment={"OMP_NUM_THREADS": str(num_threads)},
                    )
                    lines.watch(rank, process)
            finally:
                os.close(answers_end)
            data = json.dumps(start).encode()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already, as will be noticed
                process.stdin.write(LENGTH.pack(len(data)) + data)
                process.stdin.flush()
        lines.ring.hand_over()

    def write(self, message: bytes) -> None:
        """Tells all.

        Raises:
            EngineDeadError: a process has ended.
        """
        self._check()
        try:
            with self._whole():
                self._lines.ring.write(message)
        except BrokenPipeError:  # its process is about to end, or has stopped listening, which is as bad
            end = time.monotonic() + _SECONDS_TO_DIE
            while time.monotonic() < end:
                self.receive(end - time.monotonic())
            self.end("a rank has closed its pipe")
            self._check()

    def receive(self, seconds: float | None = None) -> None:
        """Waits until any of them says something, or for so long; `frames` has it then.

        Raises:
            EngineDeadError: a process has ended.
        """
        self._check()
        ready = self._lines.selector.select(seconds)
        self._check()
        with self._whole():
            for key, _ in ready:
                data = os.read(key.fd, 1 << 20)
                if not data:
                    self._lines.forget(key.fd)  # whoever watches the process will say more
                for frame in self._listeners[key.data].frames(data):
                    self.frames.append((key.data, *frame))

    def end(self, why: str) -> None:
        """Ends all at once. The first reason counts; what it leads to does not."""
        self._lines.end(why)

    def fileno(self) -> int:
        """Readable when `receive` would not wait."""
        return self._lines.selector.fileno()  # type: ignore[attr-defined, no-any-return]

    def kill(self) -> None:
        """So that `close` need not wait: who loads may take minutes."""
        self._lines.kill()

    def close(self) -> None:
        """Ends the processes, after what they are doing, and waits for that."""
        self._finalizer()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Ctrl-C in here would leave half of a message, and the ranks waiting for the rest of it."""
        try:
            yield
        except KeyboardInterrupt:
            self.end("interrupted in the middle of a message")
            raise

    def _check(self) -> None:
        if self._lines.is_closed:
            raise RuntimeError("the engine is closed")
        if self._lines.death is not None:
            raise EngineDeadError(self._lines.death)


class _Lines:
    """What is to be given back, and the threads that watch: they know nothing of whoever uses it."""

    def __init__(self, num_ranks: int) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.death: str | None = None
        self.is_closed = False
        self._lock = threading.Lock()
        self._watchers: list[threading.Thread] = []
        self.selector = selectors.DefaultSelector()
        self.sentinel, self._sentinel_end = os.pipe()
        self.selector.register(self.sentinel, selectors.EVENT_READ)
        self.ring = RingWriter(num_ranks)

    def watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        def wait() -> None:
            self.end(f"the process of rank {rank} has ended with {how_it_ended(process.wait())}")

        self.processes.append(process)
        self._watchers.append(threading.Thread(target=wait, name=f"rank {rank}", daemon=True))
        self._watchers[-1].start()

    def end(self, why: str) -> None:
        with self._lock:
            if self.is_closed or self.death is not None:
                return
            self.death = why
            os.close(self._sentinel_end)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def forget(self, descriptor: int) -> None:
        self.selector.unregister(descriptor)
        os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
        self.ring.close()
        for key in list(self.selector.get_map().values()):
            os.close(key.fd)  # who still has something to say need not wait for somebody to hear it
        self.selector.close()
        end = time.monotonic() + _SECONDS_TO_END
        for watcher in self._watchers:
            watcher.join(max(end - time.monotonic(), 0))
        self.kill()
        for watcher in self._watchers:
            watcher.join()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        if self.death is None:
            os.close(self._sentinel_end)
