"""What the kernels for Hopper share: which cards they run on, and how the copy engine (TMA) is told of a tile."""

from __future__ import annotations

from functools import cache

import torch

from teachllm_kernels._triton import HAS_GLUON, TensorDescriptor, gl

__all__ = ["gate_up_tiles", "has_hopper", "num_multiprocessors", "tiles"]


@cache
def has_hopper(device: torch.device) -> bool:
    """Whether these kernels run there: a Hopper card (its tensor cores' instructions are no other card's)."""
    return HAS_GLUON and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def num_multiprocessors(device: torch.device) -> int:
    """A GPU's; of another device, for which kernels are only compiled, an H200's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def tiles(matrix: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """What the copy engine must know to fetch or write tiles of a matrix."""
    return TensorDescriptor.from_tensor(matrix, block, _layout(block, matrix.dtype))


def gate_up_tiles(weight: torch.Tensor, num_rows: int, block_k: int) -> TensorDescriptor:
    """As `tiles`, of gate above up, [2 * num_out, num_in]: 8 rows of gate and the 8 of up in turns, `num_rows` in all.

    The tensor cores deal out rows, or columns, by the eight: a thread then gets of both.
    """
    num_out, num_in = weight.shape[0] // 2, weight.shape[1]
    shape, strides = [num_out // 8, 2, 8, num_in], [8 * num_in, num_out * num_in, num_in, 1]
    block = [num_rows // 16, 2, 8, block_k]
    return TensorDescriptor(weight, shape, strides, block, _layout(block, weight.dtype))


def _layout(block: list[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Of a tile in shared memory, as the tensor cores read it."""
    dtypes = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    return gl.NVMMASharedLayout.get_default_for(block, dtypes[dtype])
