"""Dtypes by the names that configurations give them, such as "bfloat16" or "float8_e4m3fn"."""

from __future__ import annotations

import torch


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name.

    Raises:
        ValueError: PyTorch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of PyTorch")
    return dtype


def dtype_bytes(name: str) -> int:
    """Return the bytes of one element of the dtype of this name. Errors as in `torch_dtype`."""
    return torch_dtype(name).itemsize
