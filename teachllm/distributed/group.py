"""Exchange tensors between ranks that compute together, by a few operations (lesson 12).

    all_reduce       every rank gets the sum            2 (n - 1) / n of the tensor's bytes, for each of n ranks to send
    all_gather       every rank gets all parts          (n - 1) parts
    reduce_scatter   every rank gets a part of the sum  (n - 1) / n
    all_to_all       a part for every rank              all but one's own
    send, recv       from one stage to the next         the tensor
    broadcast        from one to all                    the tensor, of the one

Every call is counted by what a rank sends in a ring, which is the least that any algorithm without help of the network
has to; a small sum through the memory that GPUs have for each other, by what is written there. A rank that waits in
vain gets an error that names the rank, the operation and the group. A group of one computes without any of this, so
layers need not know whether they are alone.

With a trace, calls are timed too, waiting included.

Source: Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch

from teachllm.distributed.peer_memory import Whereabouts, open_symmetric_buffer, reaches, whereabouts
from teachllm_kernels.comm.one_shot_all_reduce import DeferredAllReduce, SymmetricBuffer

log = logging.getLogger(__name__)


class CollectiveError(RuntimeError):
    """An exchange between ranks failed, or took too long."""


Counts = dict[str, tuple[int, int]]  # (calls, bytes sent) by operation


@dataclass(slots=True)
class Traffic:
    """Count what a rank has exchanged since the last `take`.

    Attributes:
        counts: what it has sent.
        spans: (operation, begin, end) of each call; None: not recorded.
        moment: what begin and end are: seconds, unless a device has moments of its own.
    """

    counts: Counts = field(default_factory=dict)
    spans: list[tuple[str, Any, Any]] | None = None
    moment: Callable[[], Any] = time.perf_counter

    def add(self, operation: str, num_bytes: int, num_calls: int = 1) -> None:
        """Count a call, or several."""
        calls, total = self.counts.get(operation, (0, 0))
        self.counts[operation] = calls + num_calls, total + num_bytes

    def take(self) -> Counts:
        """Return the counts so far and start again from none."""
        counts, self.counts = self.counts, {}
        return counts

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Counts]:
        """Record calls inside instead of timing them; yield their counts, for `replay`."""
        counts, spans = self.counts, self.spans
        self.counts, self.spans = {}, None
        try:
            yield self.counts
        finally:
            self.counts, self.spans = counts, spans

    def replay(self, recorded: Counts) -> None:
        """Count what a replay of the recorded calls sends."""
        for operation, (calls, num_bytes) in recorded.items():
            self.add(operation, num_bytes, calls)


class Group(Protocol):
    """Define a group of ranks, of which this process is one.

    Attributes:
        rank: this one's place among them.
        size: how many there are.
        traffic: of all groups of this process.
        in_graphs: whether a CUDA graph can hold its operations.
    """

    rank: int
    size: int
    traffic: Traffic
    in_graphs: bool

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x, of any shape; it may be written over x."""
        ...

    def deferred_all_reduce(self, x: torch.Tensor) -> torch.Tensor | DeferredAllReduce:
        """Return a deferred sum, for a reader that can add it up while it reads; otherwise the sum."""
        ...

    def open_symmetric_buffer(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Send sums of a few rows of this size through symmetric memory from now on, on GPUs that can."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the x of all ranks, [...] -> [size, ...], by rank."""
        ...

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of this rank's row over all ranks' x, [size, ...] -> [...]."""
        ...

    def all_to_all(self, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """Send and receive rows: map [sum(sends), ...] to [sum(receives), ...].

        Args:
            sends: rows for each rank.
            receives: rows from each.
        """
        ...

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Return the x of the rank `source`, written in place."""
        ...

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send x, contiguous, to a rank that receives it."""
        ...

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Fill x with what a rank sends and return it."""
        ...


class Alone:
    """Implement a group of one, which exchanges nothing."""

    rank = 0
    size = 1
    in_graphs = True

    def __init__(self, traffic: Traffic | None = None) -> None:
        self.traffic = traffic or Traffic()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Implement `Group.all_reduce`."""
        return x

    def deferred_all_reduce(self, x: torch.Tensor) -> torch.Tensor | DeferredAllReduce:
        """Implement `Group.deferred_all_reduce`."""
        return x

    def open_symmetric_buffer(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Implement `Group.open_symmetric_buffer`."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Implement `Group.all_gather`."""
        return x[None]

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Implement `Group.reduce_scatter`."""
        return x[0]

    def all_to_all(self, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """Implement `Group.all_to_all`."""
        return x

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Implement `Group.broadcast`."""
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        """Implement `Group.send`."""
        raise AssertionError("there is no other rank")

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Implement `Group.recv`."""
        raise AssertionError("there is no other rank")


ALONE = Alone()


class ProcessGroup:
    """Group ranks that are processes, over torch.distributed: NCCL between GPUs, gloo between CPUs.

    Args:
        ranks: of the world, in order; this process is one of them.
        timeout_s: how long an operation may take.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float, traffic: Traffic) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self._ranks, self._timeout_s, self.traffic = list(ranks), timeout_s, traffic
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(ranks)
        self.in_graphs = dist.get_backend() == "nccl"
        self._symmetric_buffer: SymmetricBuffer | None = None
        # Made by its own ranks alone: the others need not know of it.
        self._group: Any = dist.new_group(
            self._ranks, timeout=timedelta(seconds=timeout_s), use_local_synchronization=True
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Implement `Group.all_reduce`."""
        if (deferred := self._deferred(x)) is not None:
            return deferred.sum()
        with self._named("all_reduce", 2 * (self.size - 1) * _num_bytes(x) // self.size):
            self._dist.all_reduce(x, group=self._group)
        return x

    def deferred_all_reduce(self, x: torch.Tensor) -> torch.Tensor | DeferredAllReduce:
        """Implement `Group.deferred_all_reduce`."""
        return self._deferred(x) or self.all_reduce(x)

    def _deferred(self, x: torch.Tensor) -> DeferredAllReduce | None:
        """Count a sum that goes through the symmetric buffer and return it deferred; None if it does not."""
        if self._symmetric_buffer is None or not self._symmetric_buffer.takes(x):
            return None
        self.traffic.add("all_reduce", (self.size - 1) * _num_bytes(x))
        return DeferredAllReduce(x, self._symmetric_buffer)

    def open_symmetric_buffer(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Implement `Group.open_symmetric_buffer`. All ranks must call it."""
        if device.type != "cuda" or size * dtype.itemsize % 16:
            return
        own = whereabouts(device)
        said = self.all_gather(torch.tensor(own, device=device)).tolist()
        all_can = self.all_gather(torch.tensor([reaches(own, [Whereabouts(*each) for each in said])], device=device))
        if all_can.all():
            with self._named(
                "open_symmetric_buffer (disable_custom_all_reduce=True does without)", 0, "open_symmetric_buffer"
            ):
                symmetric_buffer = open_symmetric_buffer(self._group, self.rank, self.size, size, dtype, device)
            self.all_gather(torch.zeros(1, device=device)).tolist()  # no rank sends before all are empty
            self._symmetric_buffer = symmetric_buffer
        else:
            log.info("all sums of ranks go through NCCL: not every GPU can write to the others' memory")

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Implement `Group.all_gather`."""
        parts = x.new_empty((self.size, *x.shape))
        with self._named("all_gather", (self.size - 1) * _num_bytes(x)):
            if self.in_graphs:  # NCCL fills one tensor at once
                self._dist.all_gather_into_tensor(parts, x.contiguous(), group=self._group)
            else:
                self._dist.all_gather(list(parts.unbind(0)), x.contiguous(), group=self._group)
        return parts

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Implement `Group.reduce_scatter`."""
        part = x.new_empty(x.shape[1:])
        with self._named("reduce_scatter", (self.size - 1) * _num_bytes(x) // self.size):
            self._dist.reduce_scatter(part, list(x.contiguous().unbind(0)), group=self._group)
        return part

    def all_to_all(self, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """Implement `Group.all_to_all`."""
        got = x.new_empty((sum(receives), *x.shape[1:]))
        others = len(x) - sends[self.rank]
        with self._named("all_to_all", others * _num_bytes(x) // max(len(x), 1)):
            self._dist.all_to_all_single(got, x.contiguous(), list(receives), list(sends), group=self._group)
        return got

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Implement `Group.broadcast`."""
        with self._named("broadcast", _num_bytes(x) if self.rank == source else 0):
            self._dist.broadcast(x, self._ranks[source], group=self._group)
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        """Implement `Group.send`."""
        with self._named(f"send to rank {self._ranks[to]}", _num_bytes(x), "send"):
            self._dist.send(x.contiguous(), self._ranks[to], group=self._group)

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Implement `Group.recv`."""
        with self._named(f"recv from rank {self._ranks[source]}", 0, "recv"):
            self._dist.recv(x, self._ranks[source], group=self._group)
        return x

    @contextlib.contextmanager
    def _named(self, what: str, num_bytes: int, operation: str | None = None) -> Iterator[None]:
        """Count an operation, time it if spans are recorded, and name it where it fails."""
        operation, spans = operation or what, self.traffic.spans
        self.traffic.add(operation, num_bytes)
        began = None if spans is None else self.traffic.moment()
        try:
            yield
            if spans is not None:
                spans.append((operation, began, self.traffic.moment()))
        except RuntimeError as error:
            ranks = ", ".join(map(str, self._ranks))
            reason = str(error).splitlines()[0]
            raise CollectiveError(
                f"rank {self._ranks[self.rank]}: {what} among ranks {ranks} failed (limit {self._timeout_s:g} s): "
                f"{reason}"
            ) from error


def agreed_least(group: Group, number: int, device: torch.device) -> int:
    """Return the least of all ranks' numbers, exchanged as tensors of this device."""
    return int(group.all_gather(torch.tensor([number], device=device)).min())


def barrier(group: Group, device: torch.device) -> None:
    """Wait until all ranks are here."""
    agreed_least(group, 0, device)


def _num_bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()
