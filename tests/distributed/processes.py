"""Run a function on ranks that are processes of one test, each with a group over gloo; they may share one GPU.

Or each has a GPU of its own, and groups are NCCL's.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import TCPStore

from teachllm.distributed.connect import connected
from teachllm.distributed.group import CollectiveError, Group
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import Ranks
from teachllm.distributed.rendezvous import Rendezvous
from teachllm_kernels.comm.one_shot_all_reduce import NUM_SLOTS
from tests.waiting import HANG_SECONDS

T = TypeVar("T")


class ThroughHost:
    """As a group of CPUs, for tensors of a GPU: NCCL wants one for each rank, this does not."""

    in_graphs = False

    def __init__(self, group: Group) -> None:
        self._group, self.rank, self.size, self.traffic = group, group.rank, group.size, group.traffic

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._group.all_reduce(x.cpu()))

    def deferred_all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(x)

    def open_symmetric_buffer(self, *of_rows: Any) -> None:
        pass

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.all_gather(x.cpu()).to(x.device)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.reduce_scatter(x.cpu()).to(x.device)

    def all_to_all(self, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        return self._group.all_to_all(x.cpu(), sends, receives).to(x.device)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return x.copy_(self._group.broadcast(x.cpu(), source))

    def send(self, x: torch.Tensor, to: int) -> None:
        self._group.send(x.cpu(), to)

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return x.copy_(self._group.recv(x.cpu(), source))


def through_host(ranks: Ranks) -> Ranks:
    """With groups that take tensors of a GPU."""
    groups = (ranks.tensor, ranks.world, ranks.experts)
    return Ranks(ranks.coords, *(ThroughHost(group) if group.size > 1 else group for group in groups))


def buffers_in(folder: Path, num_ranks: int, num_rows: int, size: int) -> list[torch.Tensor]:
    """Return the `SymmetricBuffer` of each rank, in files that all ranks map; new ones are empty."""
    shape = (NUM_SLOTS, num_ranks, num_rows, size)
    buffers = []
    for rank in range(num_ranks):
        file = folder / f"buffer-{rank}"
        is_new = not file.exists()
        buffers.append(torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=torch.float32).view(shape))
        if is_new:
            buffers[-1].fill_(-0.0)
    return buffers


def _run(work: Callable[[Ranks], T], layout: Layout, number: int, port: int, timeout_s: float, on_gpus: bool) -> T:
    torch.set_num_threads(1)
    rendezvous, device = Rendezvous("127.0.0.1", port), torch.device(f"cuda:{number}" if on_gpus else "cpu")
    replica, rank = divmod(number, layout.num_ranks)
    with connected(layout.coords(rank, replica), rendezvous, device, timeout_s=timeout_s) as ranks:
        return work(ranks)


def on_processes(
    layout: Layout, work: Callable[[Ranks], T], timeout_s: float = HANG_SECONDS, on_gpus: bool = False
) -> list[T]:
    """What `work`, a function of a module, returns for every rank; replica by replica.

    Args:
        on_gpus: each has a GPU of its own, and groups are NCCL's.
    """
    begins = "spawn" if torch.cuda.is_available() else "forkserver"  # a process that has looked for a GPU must not fork
    context = multiprocessing.get_context(begins)
    context.set_forkserver_preload([work.__module__])  # and all that it imports
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    numbers = range(layout.num_connected)
    with ProcessPoolExecutor(len(numbers), context) as pool:  # ranks wait for each other: each needs a process
        done = [pool.submit(_run, work, layout, number, store.port, timeout_s, on_gpus) for number in numbers]
        failed = [each.exception() for each in done]
    for error in sorted(filter(None, failed), key=lambda error: isinstance(error, CollectiveError)):
        raise error  # the first that is not for another's sake
    return [each.result() for each in done]
