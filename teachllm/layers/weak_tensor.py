"""A weak tensor reads and writes another tensor's memory without keeping that memory allocated.

A CUDA graph uses the same addresses for as long as it exists, whether or not a tensor still holds the memory there. Its
memory pool hands memory that no tensor holds to the graphs that are captured after it. This is safe: between two
replays nothing in the pool is needed. So a captured graph keeps weak tensors of its inputs and outputs. With ordinary
tensors, q, k, v and the output of every layer would take separate memory for every captured batch size. vLLM's
`weak_ref_tensor` does the same.
"""

from __future__ import annotations

import torch


def weak_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory, shape and strides, which does not keep the memory allocated."""
    if tensor.is_meta:  # it has no address to refer to, and no memory to keep
        return tensor
    storage = tensor.untyped_storage()
    other = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(other, tensor.storage_offset(), tensor.shape, tensor.stride())
