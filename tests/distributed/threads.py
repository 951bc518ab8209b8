"""Ranks that are threads of one process: any test can afford them.

Their groups are `ProcessGroup`, which counts and names what it exchanges; what stands for torch.distributed below it
hands tensors from thread to thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from teachllm.distributed.group import Alone, CollectiveError, Group, ProcessGroup, Traffic
from teachllm.distributed.layout import Layout, RankCoords
from teachllm.distributed.ranks import Ranks
from tests.waiting import HANG_SECONDS

T = TypeVar("T")


class _Shared:
    """What the ranks of a group have in common."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[torch.Tensor] = [torch.empty(0)] * size
        self.queues: dict[tuple[int, int], SimpleQueue[torch.Tensor | None]] = {
            (a, b): SimpleQueue() for a in range(size) for b in range(size)
        }

    def abort(self) -> None:
        """End every wait with an error."""
        self.barrier.abort()
        for queue in self.queues.values():
            queue.put(None)


class _Exchange:
    """Stands for torch.distributed, as `ProcessGroup` calls it: other ranks go by their global numbers."""

    def __init__(self, shared: _Shared, rank: int, ranks: Sequence[int]) -> None:
        self._shared, self._rank, self._ranks = shared, rank, list(ranks)

    def _exchanged(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return what all ranks gave."""
        try:
            self._shared.barrier.wait(HANG_SECONDS)
            self._shared.slots[self._rank] = x.clone()
            self._shared.barrier.wait(HANG_SECONDS)
        except threading.BrokenBarrierError as error:
            raise RuntimeError("another rank has gone") from error
        return list(self._shared.slots)

    @torch.no_grad()
    def all_reduce(self, x: torch.Tensor, group: Any) -> None:
        x.copy_(torch.stack(self._exchanged(x)).sum(0))

    @torch.no_grad()
    def all_gather(self, parts: list[torch.Tensor], x: torch.Tensor, group: Any) -> None:
        for part, given in zip(parts, self._exchanged(x), strict=True):
            part.copy_(given)

    @torch.no_grad()
    def reduce_scatter(self, part: torch.Tensor, x: list[torch.Tensor], group: Any) -> None:
        part.copy_(torch.stack(self._exchanged(torch.stack(x))).sum(0)[self._rank])

    @torch.no_grad()
    def all_to_all_single(
        self, got: torch.Tensor, x: torch.Tensor, receives: list[int], sends: list[int], group: Any
    ) -> None:
        for to, rows in zip(self._ranks, x.split(sends), strict=True):
            self.send(rows, to, group)
        for source, rows in zip(self._ranks, got.split(receives), strict=True):
            self.recv(rows, source, group)

    @torch.no_grad()
    def broadcast(self, x: torch.Tensor, source: int, group: Any) -> None:
        x.copy_(self._exchanged(x)[self._ranks.index(source)])

    def send(self, x: torch.Tensor, to: int, group: Any) -> None:
        self._shared.queues[self._rank, self._ranks.index(to)].put(x.clone())

    @torch.no_grad()
    def recv(self, x: torch.Tensor, source: int, group: Any) -> None:
        got = self._shared.queues[self._ranks.index(source), self._rank].get(timeout=HANG_SECONDS)
        if got is None:
            raise RuntimeError("another rank has gone")
        x.copy_(got)


class ThreadGroup(ProcessGroup):
    """A group of threads."""

    def __init__(self, shared: _Shared, number: int, ranks: Sequence[int], traffic: Traffic) -> None:
        self._ranks, self._timeout_s, self.traffic = list(ranks), HANG_SECONDS, traffic
        self.rank, self.size, self.in_graphs = self._ranks.index(number), len(ranks), False
        self._dist, self._group, self._symmetric_buffer = _Exchange(shared, self.rank, ranks), None, None


class Meeting:
    """All groups of some ranks.

    Attributes:
        threads: of the ranks that have met here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.threads = set[threading.Thread]()
        self._shared: dict[tuple[str, tuple[int, ...]], _Shared] = {}

    def ranks(self, place: RankCoords) -> Ranks:
        """Return the groups of one rank, as `connected` makes them."""
        traffic, layout, engine = Traffic(), place.layout, place.engine_ranks

        def group(name: str, ranks: list[int]) -> Group:
            if len(ranks) == 1:
                return Alone(traffic)
            with self._lock:
                shared = self._shared.setdefault((name, tuple(ranks)), _Shared(len(ranks)))
            return ThreadGroup(shared, place.number, ranks, traffic)

        stage = group("stage", [engine[rank] for rank in layout.stage(place.stage)])
        world = stage if layout.pipeline == 1 else group("world", engine)
        experts = group("experts", place.expert_ranks) if layout.replicas > 1 else stage
        return Ranks(place, stage, world, experts)

    def abort(self) -> None:
        """End every wait for another rank with an error."""
        with self._lock:
            for shared in self._shared.values():
                shared.abort()


def on_ranks(layout: Layout, work: Callable[[Ranks], T]) -> list[T]:
    """Return what `work` returns for every rank, each in a thread; replica by replica."""
    meeting = Meeting()

    def run(number: int) -> T:
        replica, rank = divmod(number, layout.num_ranks)
        try:
            return work(meeting.ranks(layout.coords(rank, replica)))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(layout.num_connected) as pool:
        done = [pool.submit(run, number) for number in range(layout.num_connected)]
    failed = [each.exception() for each in done]
    for error in sorted(filter(None, failed), key=lambda error: isinstance(error, CollectiveError)):
        raise error  # the first that is not for another's sake
    return [each.result() for each in done]


_meetings: dict[int, Meeting] = {}  # by port
_lock = threading.Lock()


@contextlib.contextmanager
def connected_in_threads(place: RankCoords, rendezvous: Any, device: torch.device, **limits: Any) -> Iterator[Ranks]:
    """Stand for `connected` where ranks are threads: those with the same rendezvous meet."""
    with _lock:
        meeting = _meetings.setdefault(rendezvous.port, Meeting())
        meeting.threads.add(threading.current_thread())
    try:
        yield meeting.ranks(place)
    except BaseException:
        meeting.abort()  # no rank goes on without the others
        raise
    finally:
        with _lock:
            _meetings.pop(rendezvous.port, None)


def abort_meetings(thread: threading.Thread) -> None:
    """End every wait of the ranks that have met with this one."""
    with _lock:
        for meeting in _meetings.values():
            if thread in meeting.threads:
                meeting.abort()
