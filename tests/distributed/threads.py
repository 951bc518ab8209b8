"""Ranks that are threads of one process: a group whose exchanges any test can afford."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from teachllm.distributed.group import Group, Traffic
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import Ranks

T = TypeVar("T")
_SECONDS = 60.0


class _Shared:
    """What the ranks of a group have in common."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[torch.Tensor] = [torch.empty(0)] * size
        self.queues: dict[tuple[int, int], SimpleQueue[torch.Tensor]] = {
            (a, b): SimpleQueue() for a in range(size) for b in range(size)
        }


class ThreadGroup:
    """As `Group`, of threads. Counts nothing: what ranks send is `ProcessGroup`'s to say."""

    in_graphs = False

    def __init__(self, shared: _Shared, rank: int) -> None:
        self._shared, self.rank, self.size = shared, rank, len(shared.slots)
        self.traffic = Traffic()

    def _exchanged(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What all ranks gave."""
        self._shared.barrier.wait(_SECONDS)
        self._shared.slots[self.rank] = x.clone()
        self._shared.barrier.wait(_SECONDS)
        return list(self._shared.slots)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._exchanged(x)).sum(0))

    def deferred_all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(x)

    def open_symmetric_buffer(self, *of_rows: Any) -> None:
        pass

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchanged(x))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchanged(x)).sum(0)[self.rank]

    def all_to_all(self, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        parts = list(x.split(list(sends)))
        for other in range(self.size):
            self.send(parts[other], other)
        return torch.cat([self._shared.queues[other, self.rank].get(timeout=_SECONDS) for other in range(self.size)])

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return x.copy_(self._exchanged(x)[source])

    def send(self, x: torch.Tensor, to: int) -> None:
        self._shared.queues[self.rank, to].put(x.clone())

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return x.copy_(self._shared.queues[source, self.rank].get(timeout=_SECONDS))


def on_ranks(layout: Layout, work: Callable[[Ranks], T]) -> list[T]:
    """What `work` returns for every rank, each in a thread; replica by replica."""
    worlds = [_Shared(layout.num_ranks) for _ in range(layout.replicas)]
    stages = [[_Shared(layout.tensor) for _ in range(layout.pipeline)] for _ in range(layout.replicas)]
    experts = [_Shared(layout.replicas * layout.tensor) for _ in range(layout.pipeline)]

    def run(number: int) -> T:
        replica, rank = divmod(number, layout.num_ranks)
        place = layout.coords(rank, replica)
        tensor: Group = ThreadGroup(stages[replica][place.stage], place.tensor_rank)
        among = ThreadGroup(experts[place.stage], place.expert_rank) if layout.replicas > 1 else tensor
        try:
            return work(Ranks(place, tensor, ThreadGroup(worlds[replica], rank), among))
        except BaseException:
            for each in (*worlds, *stages[replica], *experts):
                each.barrier.abort()
            raise

    with ThreadPoolExecutor(layout.num_connected) as pool:
        done = [pool.submit(run, number) for number in range(layout.num_connected)]
    failed = [each.exception() for each in done]
    for error in sorted(filter(None, failed), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error  # the first that is not for another's sake
    return [each.result() for each in done]
