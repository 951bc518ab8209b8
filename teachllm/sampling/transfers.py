"""Small tensors between the host and a GPU, without waiting: copies of pinned memory are only launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray


def to_device(values: Sequence[Any] | NDArray[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these numbers, or of rows of them, on the device."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory; a GPU's is there when all that was launched so far is done."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
