"""Place each replica of an engine: its GPUs, or its share of the processor; and the file of its trace.

    data_parallel_size=2, tensor_parallel_size=2        replica 0  cuda:0 cuda:1        replica 1  cuda:2 cuda:3

Main memory is shared, too: see `worker.memory_plan.plan_memory`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from teachllm.config import EngineConfig
from teachllm.worker.device import select_device


def replica_config(config: EngineConfig, replica: int) -> EngineConfig:
    """Return what one of `data_parallel_size` replicas runs.

    Raises:
        ValueError: the replicas need more GPUs than there are.
    """
    if config.data_parallel_size == 1:
        return config
    path = None if config.trace_path is None else Path(config.trace_path)
    return replace(
        config,
        device=replica_devices(config)[replica][0],
        trace_path=None if path is None else str(path.with_name(f"{path.stem}-{replica}{path.suffix}")),
    )


def replica_devices(config: EngineConfig) -> list[list[str]]:
    """Return the devices of each replica, one per rank; ["cpu"] where it shares the processor.

    Raises:
        ValueError: there is no such device, or there are not enough.
    """
    device, num_replicas, num_ranks = select_device(config.device), config.data_parallel_size, config.num_ranks
    if device.type == "cpu":
        return [["cpu"]] * num_replicas
    first, there_are = device.index or 0, torch.cuda.device_count()
    if first + num_replicas * num_ranks > there_are:
        each = "one GPU" if num_ranks == 1 else f"{num_ranks} GPUs"
        behind = f" from cuda:{first} on" if first else ""
        raise ValueError(
            f"data_parallel_size={num_replicas} needs {each} for each replica, and there are {there_are - first}"
            f"{behind}: set data_parallel_size={max((there_are - first) // num_ranks, 1)}"
        )
    starts = range(first, first + num_replicas * num_ranks, num_ranks)
    return [[f"cuda:{start + rank}" for rank in range(num_ranks)] for start in starts]


def share_of_threads(config: EngineConfig) -> int:
    """Return how many of this process's PyTorch threads a replica on a CPU takes."""
    return max(torch.get_num_threads() // config.data_parallel_size, 1)


def take_share_of_threads(config: EngineConfig) -> None:
    """Take this replica's share of threads, and leave the rest to the other replicas."""
    if config.data_parallel_size > 1:
        torch.set_num_threads(share_of_threads(config))
