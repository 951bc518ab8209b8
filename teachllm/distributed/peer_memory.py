"""Memory that GPUs have for each other: each writes there what the others are to add up.

It serves small sums that a step waits for, such as the few rows of a decode: see
`teachllm_kernels/comm/one_shot_all_reduce.py`. A large sum is bound by bytes and left to NCCL.

Source: PyTorch, "Symmetric Memory", https://docs.pytorch.org/docs/stable/symmetric_memory.html
"""

from __future__ import annotations

import socket
import zlib
from typing import Any, NamedTuple

import torch

from teachllm_kernels.comm.one_shot_all_reduce import NUM_SLOTS, SymmetricBuffer

_MOST_ROWS = 512
# What may be sent beyond the bytes of a ring: at 450 GB/s a way, as long as NCCL takes to begin.
_MOST_EXTRA_BYTES = 4 << 20


def most_rows(num_ranks: int, row_bytes: int) -> int:
    """Return the number of rows up to which one-shot all-reduce is worth it."""
    extra = (num_ranks - 1) * (num_ranks - 2) * row_bytes  # (n - 1) rows less 2 (n - 1) / n of them, n times
    return _MOST_ROWS if extra == 0 else min(_MOST_ROWS, num_ranks * _MOST_EXTRA_BYTES // extra)


class Whereabouts(NamedTuple):
    """Locate a rank's GPU: its host, how many devices the rank sees there, and which of them is its own."""

    host: int
    num_devices: int
    device: int


def whereabouts(device: torch.device) -> Whereabouts:
    """Return this process's whereabouts."""
    return Whereabouts(zlib.crc32(socket.gethostname().encode()), torch.cuda.device_count(), device.index)


def reaches(own: Whereabouts, all_ranks: list[Whereabouts]) -> bool:
    """Return whether all are on one host, see the same devices, and the first one can write to all others' memory."""
    if len({each[:2] for each in all_ranks}) > 1 or len({each.device for each in all_ranks}) < len(all_ranks):
        return False
    others = [each.device for each in all_ranks if each.device != own.device]
    return all(torch.cuda.can_device_access_peer(own.device, other) for other in others)


def open_symmetric_buffer(
    process_group: Any, rank: int, num_ranks: int, size: int, dtype: torch.dtype, device: torch.device
) -> SymmetricBuffer:
    """Open the buffer for all-reduces of rows of `size` elements. No rank may send before all have called this.

    Args:
        process_group: torch.distributed's, of ranks that reach each other.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    shape = (NUM_SLOTS, num_ranks, most_rows(num_ranks, size * dtype.itemsize), size)
    buffer = symmetric_memory.empty(*shape, dtype=dtype, device=device)
    buffer.fill_(-0.0)
    handle = symmetric_memory.rendezvous(buffer, process_group)
    buffers = [buffer if each == rank else handle.get_buffer(each, shape, dtype) for each in range(num_ranks)]
    return SymmetricBuffer(rank, buffers, owner=handle)
