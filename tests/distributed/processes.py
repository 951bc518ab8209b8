"""Runs a function on ranks that are processes, each with a group over gloo; they may compute on one GPU, too."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch
from torch.distributed import TCPStore

from teachllm.distributed.connect import connected
from teachllm.distributed.group import CollectiveError, Group
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import Ranks
from teachllm.distributed.rendezvous import Rendezvous

T = TypeVar("T")


class ThroughHost:
    """As a group of CPUs, for tensors of a GPU: NCCL wants one for each rank, this does not."""

    in_graphs = False

    def __init__(self, group: Group) -> None:
        self._group, self.rank, self.size, self.traffic = group, group.rank, group.size, group.traffic

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._group.all_reduce(x.cpu()))

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
    return Ranks(ranks.place, *(ThroughHost(group) if group.size > 1 else group for group in groups))


def _run(work: Callable[[Ranks], T], layout: Layout, number: int, port: int, timeout_s: float) -> T:
    torch.set_num_threads(1)
    rendezvous, device = Rendezvous("127.0.0.1", port), torch.device("cpu")
    replica, rank = divmod(number, layout.num_ranks)
    with connected(layout.place(rank, replica), rendezvous, device, timeout_s=timeout_s) as ranks:
        return work(ranks)


def on_processes(layout: Layout, work: Callable[[Ranks], T], timeout_s: float = 60.0) -> list[T]:
    """What `work`, a function of a module, returns for every rank; replica by replica."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(layout.num_connected, context) as pool:
        numbers = range(layout.num_connected)
        done = [pool.submit(_run, work, layout, number, store.port, timeout_s) for number in numbers]
        failed = [each.exception() for each in done]
    for error in sorted(filter(None, failed), key=lambda error: isinstance(error, CollectiveError)):
        raise error  # the first that is not for another's sake
    return [each.result() for each in done]
