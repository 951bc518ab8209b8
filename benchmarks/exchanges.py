"""Measure how long ranks take to add up, by rows: NCCL, PyTorch's one-shot sum, ours, and ours within a norm.

    PYTHONPATH=.:kernels:cli:webui:lessons python3 benchmarks/exchanges.py [--ranks 2,4] [--size 4096]
        [--rows 1,8,64,256,512,2048,8192] [--output FILE]

A CUDA graph holds as many exchanges as a step of Qwen3-8B has, one after the other, as a step has them; time is that of
the graph over their number, the median of 30 replays, of the slowest rank. "norm" is what a norm takes besides that
sums parts up itself. The share of a step that goes into exchanges is one of these times the number, over the step.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from h200 import provenance, script_parser  # noqa: E402

from teachllm.distributed.connect import connected  # noqa: E402
from teachllm.distributed.group import ProcessGroup, agreed_least  # noqa: E402
from teachllm.distributed.layout import Layout  # noqa: E402
from teachllm.distributed.rendezvous import Rendezvous  # noqa: E402
from teachllm.engine.observability.ceilings import device_name  # noqa: E402
from teachllm.worker.gpu.cuda_graphs import Graphs  # noqa: E402
from teachllm_kernels.comm.one_shot_all_reduce import one_shot_all_reduce  # noqa: E402
from teachllm_kernels.rms_norm import rms_norm_triton  # noqa: E402

NUM_EXCHANGES = 73  # two per layer of 36, and the embedding's
_REPLAYS = 30
_SECONDS = 60.0  # for an exchange: who waits longer waits for a rank that has failed
Result = dict[int, dict[str, float]]  # microseconds by rows and way


def of_rank(number: int, num_ranks: int, port: int, size: int, rows: Sequence[int]) -> Result:
    """Return what one rank measures."""
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    found: Result = {}
    place, there = Layout(num_ranks).coords(number), Rendezvous("127.0.0.1", port)
    with torch.inference_mode(), connected(place, there, device, _SECONDS) as all_:
        group = all_.tensor
        assert isinstance(group, ProcessGroup)
        ways = PyTorch(group, size, max(rows), device)
        group.open_symmetric_buffer(size, torch.bfloat16, device)
        symmetric_buffer, group._symmetric_buffer = group._symmetric_buffer, None
        weight = torch.ones(size, dtype=torch.bfloat16, device=device)
        for num_rows in rows:
            x = torch.zeros(num_rows, size, dtype=torch.bfloat16, device=device)
            times = {"nccl": measured(lambda x=x: group.all_reduce(x), group, device)}
            times["pytorch"] = measured(lambda x=x: ways.one_shot(x), group, device)
            if symmetric_buffer is not None and symmetric_buffer.takes(x):
                times["ours"] = measured(lambda x=x: one_shot_all_reduce(x, symmetric_buffer), group, device)
                group._symmetric_buffer = symmetric_buffer
                both = measured(
                    lambda x=x: rms_norm_triton(group.deferred_all_reduce(x), x, weight, 1e-6), group, device
                )
                group._symmetric_buffer = None
                times["norm"] = both - measured(lambda x=x: rms_norm_triton(x, x, weight, 1e-6), group, device)
            found[num_rows] = times
    return found


class PyTorch:
    """Its one-shot sum, of rows that are copied to where all can read them first, as they would have to be."""

    def __init__(self, group: ProcessGroup, size: int, num_rows: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self._name = group._group.group_name
        self._room = symmetric_memory.empty(num_rows, size, dtype=torch.bfloat16, device=device)
        symmetric_memory.rendezvous(self._room, group._group)

    def one_shot(self, x: torch.Tensor) -> torch.Tensor:
        room = self._room[: len(x)]
        room.copy_(x)
        total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(room, "sum", self._name)
        return total


def measured(exchange: Callable[[], Any], group: ProcessGroup, device: torch.device) -> float:
    """Microseconds of one, in a graph; of the slowest rank."""
    graphs = Graphs(device)

    def chain() -> None:
        for _ in range(NUM_EXCHANGES):
            exchange()

    if not agreed_least(group, graphs.capture("chain", chain), device):  # or who can waits for who cannot
        return float("nan")
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        group.all_gather(torch.zeros(1, device=device))  # all begin together
        begin.record()
        graphs.replay("chain")
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    mine = torch.tensor([1000 * statistics.median(times) / NUM_EXCHANGES], device=device)
    return float(group.all_gather(mine).max())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--ranks", default="2", help="how many, with commas between them")
    parser.add_argument("--size", type=int, default=4096, help="elements per row")
    parser.add_argument("--rows", default="1,8,64,256,512,2048,8192")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = provenance("exchanges.py", arguments, device_name("cuda"), options.commit)
    found["microseconds"] = {}
    for num_ranks in map(int, options.ranks.split(",")):
        results = on_ranks(num_ranks, options.size, [int(count) for count in options.rows.split(",")])
        found["microseconds"][num_ranks] = results
        for num_rows, times in results.items():
            shown = ", ".join(f"{way} {time:.2f}" for way, time in times.items())
            print(f"{num_ranks} ranks, {num_rows} rows of {options.size}: {shown} us", flush=True)
    if options.output:
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def on_ranks(num_ranks: int, size: int, rows: Sequence[int]) -> Result:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ProcessPoolExecutor(num_ranks, multiprocessing.get_context("spawn")) as pool:
        ranks = [pool.submit(of_rank, number, num_ranks, store.port, size, rows) for number in range(num_ranks)]
        first, *_ = [rank.result() for rank in ranks]
        return first


if __name__ == "__main__":
    sys.exit(main())
