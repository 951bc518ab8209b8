"""What ranks exchange arrives, is counted as rings would send it, and who waits in vain hears of it."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from teachllm.distributed.group import CollectiveError, Counts, ProcessGroup, Traffic
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import Ranks
from tests.distributed.processes import on_processes

THREE = Layout(tensor=3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def exchange(ranks: Ranks) -> tuple[list[torch.Tensor], dict[str, tuple[int, int]]]:
    """One of each operation: what this rank then has, and what it counted."""
    group, rank = ranks.tensor, ranks.tensor.rank
    found = []
    for dtype in DTYPES:
        found.append(group.all_reduce(torch.full((2, 3), rank + 1, dtype=dtype)))
    found.append(group.all_gather(torch.tensor([rank, -rank])))
    found.append(group.reduce_scatter(torch.arange(6.0).view(3, 2) * (rank + 1)))
    sends = [rank + 1] * 3  # rank r sends r + 1 rows to each
    rows = torch.tensor([[10 * rank + to] for to in range(3) for _ in range(rank + 1)])
    found.append(group.all_to_all(rows, sends, [1, 2, 3]))
    found.append(group.broadcast(torch.tensor([7.0 * rank]), 2))
    if rank == 0:
        group.send(torch.tensor([1.5, 2.5]), 2)
    if rank == 2:
        found.append(group.recv(torch.empty(2), 0))
    return found, group.traffic.take()


def test_everybody_gets_what_is_theirs_and_it_is_counted() -> None:
    for rank, (found, counts) in enumerate(on_processes(THREE, exchange)):
        *sums, gathered, part, rows, of_two = found[:8]
        assert [each.dtype for each in sums] == list(DTYPES)
        assert all(torch.equal(each, torch.full((2, 3), 6, dtype=each.dtype)) for each in sums)
        assert gathered.tolist() == [[0, 0], [1, -1], [2, -2]]
        assert part.tolist() == [6.0 * (2 * rank), 6.0 * (2 * rank + 1)]
        assert rows.flatten().tolist() == [rank, *[10 + rank] * 2, *[20 + rank] * 3]
        assert of_two.tolist() == [14.0]
        assert [each.tolist() for each in found[8:]] == ([[1.5, 2.5]] if rank == 2 else [])
        # Of n ranks: 2 (n - 1) / n of 6 numbers of 4, 2, 2 and 8 bytes; 2 others' 2 numbers of 8; ...
        assert counts["all_reduce"] == (4, sum(6 * size * 4 // 3 for size in (4, 2, 2, 8)))
        assert counts["all_gather"] == (1, 2 * 16)
        assert counts["reduce_scatter"] == (1, 6 * 4 * 2 // 3)
        assert counts["all_to_all"] == (1, 2 * (rank + 1) * 8)
        assert counts["broadcast"] == (1, 4 if rank == 2 else 0)
        assert counts.get("send") == ((1, 8) if rank == 0 else None)


def wait_in_vain(ranks: Ranks) -> str:
    if ranks.tensor.rank == 1:
        return "gone"
    with pytest.raises(CollectiveError) as caught:
        ranks.tensor.all_reduce(torch.ones(1))
    return str(caught.value)


def test_who_waits_in_vain_says_which_rank_and_operation() -> None:
    [message, _] = on_processes(Layout(tensor=2), wait_in_vain)
    assert message.startswith("rank 0: all_reduce among ranks 0, 1 failed (limit 180 s): ")


def test_what_is_only_recorded_is_counted_whenever_it_is_replayed() -> None:
    traffic = Traffic()
    traffic.add("all_reduce", 8)
    with traffic.recorded() as once:
        traffic.add("all_reduce", 100)
        traffic.add("send", 7)
    with pytest.raises(RuntimeError), traffic.recorded():
        traffic.add("all_reduce", 1000)
        raise RuntimeError
    assert traffic.counts == {"all_reduce": (1, 8)}
    for _ in range(2):
        traffic.replay(once)
    assert traffic.take() == {"all_reduce": (3, 208), "send": (2, 14)}


def record_and_replay() -> tuple[list[float], list[float], Counts, list[float]]:
    """A sum by NCCL in a graph: what it gives of one number and of another, what was counted meanwhile, and the
    milliseconds of a sum outside of graphs, and of one that is run before it is recorded."""
    import torch.distributed as dist

    from teachllm.worker.gpu.cuda_graphs import Graphs
    from teachllm.worker.rank_watch import RankWatch

    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    group = ProcessGroup([0], 60.0, Traffic())
    graphs = Graphs(device, group.traffic, is_shared=True)
    assert group.in_graphs
    x = torch.zeros(4, device=device)
    assert graphs.capture("sum", lambda: group.all_reduce(x * 2) + group.all_gather(x).sum(0))
    group.traffic.take()
    found: list[list[float]] = []
    for number in (1.0, 5.0):
        x.fill_(number)
        found.append(graphs.replay("sum").tolist())
    counts = group.traffic.take()
    RankWatch(Layout(2).coords(0), group.traffic, device).begin()
    group.all_reduce(x)
    assert graphs.capture("timed", lambda: group.all_reduce(x * 2))
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for _, begin, end in group.traffic.spans or ()]
    dist.destroy_process_group()
    return found[0], found[1], counts, times


@pytest.mark.gpu
def test_a_graph_holds_what_nccl_does() -> None:
    """Of one rank alone, which is as many as any machine with a GPU has."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        *sums, counts, times = pool.submit(record_and_replay).result()
    assert sums == [[3.0] * 4, [15.0] * 4]
    assert counts == {"all_reduce": (2, 0), "all_gather": (2, 0)}  # there is nobody to send to
    assert len(times) == 2 and min(times) >= 0
