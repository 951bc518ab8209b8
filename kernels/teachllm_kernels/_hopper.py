"""Share between Hopper kernels the hardware check, tensor descriptors for the copy engine (TMA), and barriers."""

from __future__ import annotations

from functools import cache

import torch

from teachllm_kernels._triton import HAS_GLUON, PLACES, TensorDescriptor, gl, gluon, hopper
from teachllm_kernels.dry_run import compute_capability, gpu_type, per_device

__all__ = [
    "PIECE",
    "barriers",
    "capability",
    "copy_or_arrive",
    "fetch",
    "gate_up_map",
    "has_hopper",
    "head_map",
    "num_multiprocessors",
    "pieces",
    "place",
    "tile_map",
]

PIECE = 16  # keys per copy; they lie in one block


@per_device
def has_hopper(device: torch.device) -> bool:
    """Return whether these kernels run there: no other card has Hopper's tensor-core instructions."""
    return HAS_GLUON and compute_capability(device)[0] == 9


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a card, as `compute_capability` does; None: a CPU."""
    return None if device.type == "cpu" else compute_capability(device)


@per_device
def num_multiprocessors(device: torch.device) -> int:
    """Return the GPU's number of multiprocessors; for a device that stands for none, an H200's."""
    return gpu_type(device).num_multiprocessors or PLACES


def tile_map(matrix: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Return the descriptor with which the copy engine fetches or writes tiles of a matrix."""
    return TensorDescriptor.from_tensor(matrix, block, _layout(tuple(block), matrix.dtype))


def gate_up_map(weight: torch.Tensor, num_rows: int, block_k: int) -> TensorDescriptor:
    """Like `tile_map`, for gate above up, [2 * num_out, num_in]: a tile is gate 0-7, up 0-7, gate 8-15, up 8-15, ...

    The gate and the up of one output then meet in one thread, and nothing has to be exchanged before SiLU. If the
    weight is the left operand, the thread that holds one row of every sixteen of the product also holds the row eight
    further on; if it is the right operand, every thread holds the same two columns of every eight.

    Args:
        num_rows: rows of the tile, gate and up together.
        block_k: columns of the tile.
    """
    num_out, num_in = weight.shape[0] // 2, weight.shape[1]
    shape, strides = [num_out // 8, 2, 8, num_in], [8 * num_in, num_out * num_in, num_in, 1]
    block = [num_rows // 16, 2, 8, block_k]
    return TensorDescriptor(weight, shape, strides, block, _layout(tuple(block), weight.dtype))


def head_map(heads: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Like `tile_map`, for some heads of some tokens: [num_tokens, num_heads, head_size], tokens at any stride."""
    return TensorDescriptor(heads, list(heads.shape), list(heads.stride()), block, _layout(tuple(block), heads.dtype))


@gluon.jit
def pieces(cache_desc, table_ptr, key, end, TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Return the slots where the pieces of a tile begin, for `fetch`; all loads start before the first is needed."""
    PIECE: gl.constexpr = cache_desc.block_shape[0]
    slots = ()
    for piece in gl.static_range(TILE // PIECE):
        at = key + piece * PIECE
        block = gl.load(table_ptr + at // BLOCK_SIZE, mask=at < end, other=0)
        slots = slots + (block * BLOCK_SIZE + at % BLOCK_SIZE,)  # type: ignore[assignment]  # noqa: RUF005
    return slots


@gluon.jit
def fetch(cache_desc, to, arrived, slots, column, key, end):
    """Start copying a tile of keys or values piece by piece. Each piece is one arrival, even pieces after `end`."""
    PIECE: gl.constexpr = cache_desc.block_shape[0]
    for piece in gl.static_range(to.shape[0] // PIECE):
        place = to.slice(piece * PIECE, PIECE)
        copy_or_arrive(cache_desc, slots[piece], column, arrived, place, key + piece * PIECE, end)


@gluon.jit
def copy_or_arrive(tile_desc, row, column, arrived, to, index, end):
    """Start copying a tile of a matrix. It arrives with its bytes; a tile after the end arrives without any."""
    BYTES: gl.constexpr = tile_desc.block_shape[0] * tile_desc.block_shape[1] * to.dtype.primitive_bitwidth // 8
    hopper.mbarrier.expect(arrived, BYTES, index < end)
    hopper.mbarrier.arrive(arrived, pred=index >= end)
    hopper.tma.async_copy_global_to_shared(tile_desc, [row, column], arrived, to, index < end)


@gluon.jit
def barriers(NUM: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate NUM barriers, [NUM, 1], each of which completes after ARRIVALS arrivals.

    A kernel that continues after its last wait invalidates them, because their memory may then hold other data. A
    kernel must not make a barrier that no role waits for: the compiler sees that its memory is free and reuses it. With
    tiles of keys the kernel then read NaN.
    """
    made = gl.allocate_shared_memory(gl.int64, [NUM, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        hopper.mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def place(index, num_row_blocks, num_column_blocks, AT_ONCE: gl.constexpr):
    """Return which (row block, column block) of a result comes `index`-th; AT_ONCE row blocks run side by side."""
    per_band = AT_ONCE * num_column_blocks
    first = index // per_band * AT_ONCE
    height = gl.minimum(num_row_blocks - first, AT_ONCE)
    within = index % per_band
    return first + within % height, within // height


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a tile that the tensor cores read."""
    dtypes = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    dtypes |= {torch.float8_e4m3fn: gl.float8e4nv, torch.int8: gl.int8}
    return gl.NVMMASharedLayout.get_default_for(list(block), dtypes[dtype])
