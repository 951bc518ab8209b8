"""How ranks find each other, and the groups that they then have.

One process offers a store, a small table on a port that the system chooses, and ranks look each other up there. The
store listens on the loopback unless another address is asked for: who can reach it can disturb the ranks.

Source: PyTorch, "Distributed communication package", https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch

from teachllm.distributed.group import Alone, CollectiveError, Group, ProcessGroup, Traffic
from teachllm.distributed.layout import Place
from teachllm.distributed.ranks import Ranks

LOOPBACK = "127.0.0.1"
_TIMEOUT_S = 600.0  # a rank may compile, or read a checkpoint, while the others wait


class MeetingPoint:
    """The store, for as long as this object lives.

    Attributes:
        address: "host:port", for `connect`.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"


@contextlib.contextmanager
def connected(place: Place, address: str, device: torch.device, timeout_s: float = _TIMEOUT_S) -> Iterator[Ranks]:
    """Joins the ranks of an engine, and leaves them at the end.

    Args:
        address: of a `MeetingPoint`.
        device: that this rank computes on.
        timeout_s: how long any exchange may take.

    Raises:
        CollectiveError: the others did not come.
    """
    import torch.distributed as dist

    layout = place.layout
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(host, int(port), is_master=False, timeout=limit)
        backend = "nccl" if device.type == "cuda" else "gloo"
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=layout.num_ranks, timeout=limit, device_id=device_id
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise CollectiveError(f"rank {place.rank} did not meet the others at {address}: {reason}") from error
    try:
        traffic = Traffic()

        def group(ranks: list[int]) -> Group:
            return ProcessGroup(ranks, timeout_s, traffic) if len(ranks) > 1 else Alone(traffic)

        yield Ranks(place, group(layout.stage(place.stage)), group(list(range(layout.num_ranks))))
    finally:
        dist.destroy_process_group()
