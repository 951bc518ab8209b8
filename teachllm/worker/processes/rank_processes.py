"""The processes of the ranks that one machine has, and the lines to and from them.

                         ┌── ring (shared memory) ──▶ rank 0 ── pipe ──┐
    write(message) ──────┼──────────────────────────▶ rank 1 ── pipe ──┼──▶ receive() -> frames
                         └──────────────────────────▶ ...    ── pipe ──┘

All read the same messages, each answers in a pipe of its own. See `rank_lines.py` for what these words mean.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, replace

import torch

from teachllm.config import EngineConfig
from teachllm.distributed.layout import layout_of
from teachllm.distributed.rendezvous import Rendezvous, listen_here, rendezvous_at
from teachllm.distributed.ring import RingWriter
from teachllm.distributed.spin_wait import spin_seconds, spin_until
from teachllm.worker.errors import EngineDeadError
from teachllm.worker.processes.answers import Listener
from teachllm.worker.processes.child import how_it_ended, only_here, refuse_elsewhere, start_child, tell, uninterrupted
from teachllm.worker.processes.rank_lines import Frame, RankWork, whole
from teachllm.worker.processes.worker_process import WorkerStart

_SECONDS_TO_END = 4.0
_SECONDS_TO_DIE = 5.0  # from a closed pipe to the end of its process


class RankProcesses:
    """`RankLines` to processes of this machine.

    Args:
        ranks: that are here, of all that the engine has.
        on_end: called with the reason when they end without being told to, in whatever thread notices.
    """

    def __init__(self, ranks: Sequence[int], on_end: Callable[[str], None] | None = None) -> None:
        self.ranks = list(ranks)
        self.frames: deque[Frame] = deque()
        self._lines = _Lines(len(self.ranks), on_end)
        self._listeners = {rank: Listener() for rank in self.ranks}
        self.sentinel = self._lines.sentinel
        self._spin_seconds = 0.0
        self._refuse_elsewhere = refuse_elsewhere()
        # Whoever drops this without closing it leaves no process.
        self._finalizer = weakref.finalize(self, only_here(_Lines.close), self._lines)

    @property
    def death(self) -> str | None:
        """Return why all ranks have ended, if they have."""
        return self._lines.death

    @property
    def processes(self) -> Sequence[subprocess.Popen[bytes]]:
        """Return the processes by rank."""
        return self._lines.processes

    def start(self, work: RankWork) -> None:
        """Implement `RankLines.start`; each gets a device of its own, or a share of PyTorch's threads."""
        self._spin_seconds = spin_seconds(work.config)
        with contextlib.ExitStack() as stack:
            meeting = _meeting(work, stack)
            devices = devices_of(work.config, len(self.ranks))
            num_threads = max(torch.get_num_threads() // max(len(self.ranks), 1), 1)
            for rank, device in zip(self.ranks, devices, strict=True):
                there = meeting if meeting is None or rank == 0 else meeting._replace(listener=None)
                self._start(rank, self._config_of(rank, work, device), replace(work, rendezvous=there), num_threads)
        self._lines.ring.hand_over()

    def _config_of(self, rank: int, work: RankWork, device: str) -> EngineConfig:
        return replace(work.config, device=device)

    def _start(self, rank: int, config: EngineConfig, work: RankWork, num_threads: int) -> None:
        lines, meeting = self._lines, work.rendezvous
        listener = None if meeting is None else meeting.listener
        end = lines.ring.ends[self.ranks.index(rank)]
        answers, answers_end = os.pipe()
        lines.selector.register(answers, selectors.EVENT_READ, rank)
        try:
            with uninterrupted():
                process = start_child(
                    "teachllm.worker.processes.worker_process",
                    pass_fds=[*end.descriptors, answers_end, *([] if listener is None else [listener])],
                    environment={"OMP_NUM_THREADS": str(num_threads)},
                )
                lines.watch(rank, process)
        finally:
            os.close(answers_end)
        place = (rank, work.replica)
        layout = astuple(layout_of(config))
        start = WorkerStart(asdict(config), layout, place, meeting, tuple(end), answers_end, work.times_steps)
        with contextlib.suppress(BrokenPipeError):  # it has ended already, as will be noticed
            tell(process, json.dumps(start).encode())

    def write(self, message: bytes) -> None:
        """Implement `RankLines.write`."""
        self._check()
        try:
            with whole(self.end):
                self._lines.ring.write(message)
        except BrokenPipeError:  # its process is about to end, or has stopped listening, which is as bad
            end = time.monotonic() + _SECONDS_TO_DIE
            while time.monotonic() < end:
                self.receive(end - time.monotonic())
            self.end("a rank has closed its pipe")
            self._check()

    def receive(self, seconds: float | None = None) -> None:
        """Implement `RankLines.receive`."""
        self._check()
        select = self._lines.selector.select
        if seconds != 0:
            spin_until(lambda: select(0), self._spin_seconds)
        ready = select(seconds)
        self._check()
        with whole(self.end):
            for key, _ in ready:
                data = os.read(key.fd, 1 << 20)
                if not data:
                    self._lines.forget(key.fd)  # whoever watches the process will say more
                for frame in self._listeners[key.data].frames(data):
                    self.frames.append((key.data, *frame))

    def end(self, why: str) -> None:
        """Implement `RankLines.end`."""
        self._lines.end(why)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` would not wait."""
        return self._lines.selector.fileno()

    def kill(self) -> None:
        """Implement `RankLines.kill`."""
        self._lines.kill()

    def close(self) -> None:
        """Implement `RankLines.close`."""
        self._finalizer()

    def _check(self) -> None:
        self._refuse_elsewhere()
        if self._lines.is_closed:
            raise RuntimeError("the engine is closed")
        if self._lines.death is not None:
            raise EngineDeadError(self._lines.death)


class _Lines:
    """What is to be given back, and the threads that watch: they know nothing of whoever uses it."""

    def __init__(self, num_ranks: int, on_end: Callable[[str], None] | None) -> None:
        self._on_end = on_end
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
        if self._on_end is not None:
            self._on_end(why)

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
            os.close(key.fd)  # a process that still writes need not wait for a reader
        self.selector.close()
        end = time.monotonic() + _SECONDS_TO_END
        for watcher in self._watchers:
            watcher.join(max(end - time.monotonic(), 0))
        self.kill()
        for watcher in self._watchers:
            watcher.join()
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # an interrupt left something that was not written yet
                process.stdin.close()
        if self.death is None:
            os.close(self._sentinel_end)


def devices_of(config: EngineConfig, count: int) -> list[str]:
    """Return the devices of `count` ranks of this machine; GPUs from the named one on.

    Raises:
        ValueError: there are fewer.
    """
    device = torch.device(config.device)
    if device.type != "cuda":
        return [config.device] * count
    first, there = device.index or 0, torch.cuda.device_count()
    if first + count > there:
        name = "tensor_parallel_size" if config.tensor_parallel_size > 1 else "pipeline_parallel_size"
        sizes = f"tensor_parallel_size={config.tensor_parallel_size}, pipeline_parallel_size="
        each = "" if config.nnodes == 1 else f" on each of nnodes={config.nnodes} machines"
        raise ValueError(
            f"{sizes}{config.pipeline_parallel_size} need {count} GPUs from cuda:{first} on{each}, and this machine "
            f"has {there} CUDA devices: lower {name}"
        )
    return [f"cuda:{first + rank}" for rank in range(count)]


def _meeting(work: RankWork, stack: contextlib.ExitStack) -> Rendezvous | None:
    """Return where the ranks meet, and the socket for it, which `stack` closes here; None: there is one."""
    if work.rendezvous is not None:
        if work.rendezvous.listener is not None:
            stack.callback(os.close, work.rendezvous.listener)
        return work.rendezvous
    if work.config.num_ranks == 1:
        return None
    return rendezvous_at(stack.enter_context(listen_here()))
