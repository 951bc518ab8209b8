"""The groups that the ranks of an engine have, once they have met.

Ranks look each other up in a store, a small table that one process keeps on a port, see `rendezvous.py`.

Source: PyTorch, "Distributed communication package", https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch

from teachllm.distributed.group import Alone, CollectiveError, Group, ProcessGroup, Traffic
from teachllm.distributed.layout import RankCoords
from teachllm.distributed.ranks import Ranks
from teachllm.distributed.rendezvous import Rendezvous

_TIMEOUT_S = 600.0  # a rank may compile, or read a checkpoint, while the others wait


@contextlib.contextmanager
def connected(
    coords: RankCoords,
    rendezvous: Rendezvous,
    device: torch.device,
    timeout_s: float = _TIMEOUT_S,
) -> Iterator[Ranks]:
    """Join the ranks of an engine, or all ranks that share experts, and leave them at the end.

    Args:
        device: the device that this rank computes on.
        timeout_s: how long any exchange may take.

    Raises:
        CollectiveError: the others did not come.
    """
    import torch.distributed as dist

    layout = coords.layout
    limit = timedelta(seconds=timeout_s)
    try:
        host, port, listener = rendezvous
        keeps_store = listener is not None
        store = dist.TCPStore(host, port, None, keeps_store, limit, wait_for_workers=False, master_listen_fd=listener)
        backend = "nccl" if device.type == "cuda" else "gloo"
        device_id = device if device.type == "cuda" else None
        # What stages send would wait for other operations of their group: it has none once the ranks are there.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        dist.init_process_group(
            backend,
            store=store,
            rank=coords.number,
            world_size=layout.num_connected,
            timeout=limit,
            device_id=device_id,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise CollectiveError(
            f"rank {coords.number} did not meet the others at {rendezvous.host}:{rendezvous.port}: {reason}"
        ) from error
    try:
        traffic = Traffic()

        def group(ranks: list[int]) -> Group:
            return ProcessGroup(ranks, timeout_s, traffic) if len(ranks) > 1 else Alone(traffic)

        engine = coords.engine_ranks
        stage = group([engine[rank] for rank in layout.stage(coords.stage)])
        world = stage if layout.pipeline == 1 else group(engine)
        experts = group(coords.expert_ranks) if layout.replicas > 1 else stage
        yield Ranks(coords, stage, world, experts)
    finally:
        dist.destroy_process_group()
