"""A tensor over memory that somebody else keeps.

A CUDA graph's addresses stay its own as long as it lives, whether or not a tensor holds them, and its pool hands out
again what no tensor holds to the graphs recorded after it. Between two replays nothing in the pool is of use any more,
so what a recording wants to find again it borrows: kept, every layer's q, k, v and output of every size would be
memory for itself. vLLM's weak references are the same.
"""

from __future__ import annotations

import torch


def weak_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers at the same place, without keeping them there."""
    storage = tensor.untyped_storage()
    other = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(other, tensor.storage_offset(), tensor.shape, tensor.stride())
