"""Memory that GPUs have for each other: who can have it, how much is sent through it, and sums of two GPUs."""

from __future__ import annotations

import pytest
import torch

from teachllm.distributed.group import ProcessGroup
from teachllm.distributed.layout import Layout
from teachllm.distributed.peer_memory import Whereabouts, most_rows, reaches
from teachllm.distributed.ranks import Ranks
from teachllm.worker.gpu.cuda_graphs import Graphs
from teachllm_kernels.comm.one_shot_all_reduce import DeferredAllReduce
from tests.distributed.processes import on_processes

SIZE = 256


def test_more_ranks_send_fewer_rows_to_everybody() -> None:
    assert most_rows(2, 8192) == 512  # no more than a ring sends
    assert most_rows(4, 8192) == 341  # 3 rows in place of 1.5: 4 MiB are 341 times 1.5 rows
    assert most_rows(8, 8192) == 97
    assert most_rows(4, 1024) == 512


def test_only_gpus_of_one_host_that_reach_each_other_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: {own, other} != {0, 2})
    ranks = [Whereabouts(7, 4, device) for device in range(3)]
    assert reaches(ranks[1], ranks) and reaches(ranks[0], ranks[:2])
    assert not reaches(ranks[0], ranks)  # not the third
    assert not reaches(ranks[0], [ranks[0], Whereabouts(8, 4, 1)])  # of another host
    assert not reaches(ranks[0], [ranks[0], Whereabouts(7, 1, 0)])  # each sees a device of its own alone


def sum_through_memory(ranks: Ranks) -> list[list[float]]:
    """Sums of few and many rows, one by one and in a graph, replayed between others."""
    group, device = ranks.tensor, torch.device("cuda", ranks.tensor.rank)
    assert isinstance(group, ProcessGroup)
    torch.cuda.set_device(device)
    group.open_symmetric_buffer(SIZE, torch.float32, device)
    graphs = Graphs(device)
    x, found = torch.zeros(4, SIZE, device=device), []
    assert isinstance(group.deferred_all_reduce(x), DeferredAllReduce)
    group.all_reduce(x)  # as everybody has begun
    assert graphs.capture("sum", lambda: group.all_reduce(group.all_reduce(x) + 1))
    for number in range(20):
        x.fill_(number + group.rank)
        found.append(graphs.replay("sum").unique().item())
        many = torch.full((1000, SIZE), float(number), device=device)  # more than fit
        found.append(group.all_reduce(many[: 1 if number % 2 else None].contiguous()).unique().item())
    return [found]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_add_up_through_memory() -> None:
    expected = [value for number in range(20) for value in (2 * (2 * number + 1 + 1), 2 * number)]
    assert on_processes(Layout(2), sum_through_memory, on_gpus=True) == [[expected]] * 2
