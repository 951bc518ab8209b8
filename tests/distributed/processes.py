"""Runs a function on ranks that are processes, each with a group over gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch
from torch.distributed import TCPStore

from teachllm.distributed.connect import connected
from teachllm.distributed.group import CollectiveError
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import Ranks
from teachllm.distributed.rendezvous import Rendezvous

T = TypeVar("T")


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
