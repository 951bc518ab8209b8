"""Matrix products of 2 to 128 rows on Hopper: decode batches, still bound by reading the weight.

What a chain of such products waits for is not arithmetic but the start of each: launch, first bytes, then the sum. So

    copy engine    tiles travel to shared memory by themselves (TMA), several ahead of the tensor cores
    early weights  a program asks for its first weight tiles before the kernel in front of it has ended
                   (programmatic dependent launch): nobody writes weights. Only x must be waited for
    roles          the weight is the left operand, 64 of its rows at a time, and x^T the right one: 8 to 128 wide, as
                   there are rows, where a library pads them to 64 or 128
    epilogue       SiLU-and-multiply before the result is written: a tile holds 32 rows of gate and the 32 of up
    parts          a result with few columns would leave most multiprocessors idle, so several programs share its
                   columns. They leave their parts side by side: the norm that follows reads them all anyway

Written in Gluon, Triton's lower level, where buffers, barriers and copies have names. `few_rows_linear` is the
portable kernel for as many as 16 rows.

Sources: CUDA C++ Programming Guide, "Asynchronous Data Copies using the Tensor Memory Accelerator" and "Programmatic
Dependent Launch and Synchronization"; PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
"""

from __future__ import annotations

from functools import cache

import torch

from teachllm_kernels._triton import HAS_GLUON, TensorDescriptor, gdc_launch_dependents, gdc_wait, gl, gluon, hopper
from teachllm_kernels.linear import cost

__all__ = ["MAX_ROWS", "cost", "has_hopper_linear", "hopper_linear"]

MAX_ROWS = 128
_BLOCK_N = 64  # weight rows of a program: as many as the tensor cores take at once
_BLOCK_K = 128
_PROGRAMS = 128  # wanted, on a card of 132 multiprocessors
_SHARED = 192 * 1024  # bytes of tiles in flight
_SHARED_OF_SHORT = 128 * 1024  # where x is wide and a program's share is short: room for the next kernel's first tiles


@gluon.jit
def _fetch_weight(w_desc, tile, arrived, block, num_out, k, pred, GATED: gl.constexpr):
    """Starts copying a program's weight rows from column k on: 64 of them, or 32 of gate and the same 32 of up."""
    n: gl.constexpr = w_desc.block_shape[0]
    if GATED:
        hopper.tma.async_copy_global_to_shared(w_desc, [block * n, k], arrived, tile.slice(0, n), pred)
        hopper.tma.async_copy_global_to_shared(w_desc, [num_out + block * n, k], arrived, tile.slice(n, n), pred)
    else:
        hopper.tma.async_copy_global_to_shared(w_desc, [block * n, k], arrived, tile, pred)


@gluon.jit(do_not_specialize=["num_rows"])  # which differs from batch to batch
def _hopper_linear(
    w_desc, x_desc, bias, out, num_rows, num_out,
    TILES: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    block, split = gl.program_id(0), gl.program_id(1)
    dtype: gl.constexpr = w_desc.dtype
    ROWS: gl.constexpr = x_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    COLUMNS: gl.constexpr = w_desc.block_shape[0]  # of the result
    BLOCK_N: gl.constexpr = COLUMNS * 2 if GATED else COLUMNS
    BYTES: gl.constexpr = (BLOCK_N + ROWS) * BLOCK_K * dtype.primitive_bitwidth // 8
    w = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    x = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_K], x_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    first_k = split * TILES * BLOCK_K
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(arrived.index(i), count=1)
        hopper.mbarrier.expect(arrived.index(i), BYTES)
        _fetch_weight(w_desc, w.index(i), arrived.index(i), block, num_out, first_k + i * BLOCK_K, True, GATED)
    if PDL:
        gdc_wait()
    for i in gl.static_range(STAGES):
        k = first_k + i * BLOCK_K
        hopper.tma.async_copy_global_to_shared(x_desc, [0, k], arrived.index(i), x.index(i))

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    acc = gl.zeros([BLOCK_N, ROWS], gl.float32, layout)
    for tile in range(TILES):
        stage = tile % STAGES
        hopper.mbarrier.wait(arrived.index(stage), tile // STAGES & 1)
        acc = hopper.warpgroup_mma(w.index(stage), x.index(stage).permute((1, 0)), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, [acc])
        k = first_k + (tile + STAGES) * BLOCK_K
        has_more = tile + STAGES < TILES
        hopper.mbarrier.expect(arrived.index(stage), BYTES, has_more)
        _fetch_weight(w_desc, w.index(stage), arrived.index(stage), block, num_out, k, has_more, GATED)
        hopper.tma.async_copy_global_to_shared(x_desc, [0, k], arrived.index(stage), x.index(stage), has_more)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.invalidate(arrived.index(i))

    by_column: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [1, num_warps], [0, 1])
    n = block * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, by_column))
    m = gl.arange(0, ROWS, gl.SliceLayout(0, by_column))
    if GATED:
        pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, num_warps, 1], [2, 0, 1])
        gate, up = gl.split(gl.convert_layout(acc.reshape([2, COLUMNS, ROWS]).permute((1, 2, 0)), pairs))
        gate, up = gl.convert_layout(gate, by_column), gl.convert_layout(up, by_column)
        if HAS_BIAS:
            gate += gl.load(bias + n, n < num_out, 0.0).to(gl.float32)[:, None]
            up += gl.load(bias + num_out + n, n < num_out, 0.0).to(gl.float32)[:, None]
        y = gate / (1.0 + gl.exp(-gate)) * up
    else:
        y = gl.convert_layout(acc, by_column)
        if HAS_BIAS:
            is_n = n < num_out
            if SPLITS > 1:
                is_n = is_n & (split == 0)
            y += gl.load(bias + n, is_n, 0.0).to(gl.float32)[:, None]
    at = (split * num_rows + m)[None, :] * num_out + n[:, None]
    gl.store(out + at, y.to(out.dtype.element_ty), (m < num_rows)[None, :] & (n < num_out)[:, None])


def hopper_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False, parts: bool = False
) -> torch.Tensor:
    """x W^T + b in the tensor cores, accumulated in float32.

    Args:
        x: [num_rows, num_in], contiguous, 2-byte numbers; at most `MAX_ROWS` rows; `num_in` a multiple of 8.
        weight: [num_out, num_in], contiguous; if `gated`, [2 * num_out, num_in]: gate above up.
        bias: [num_out], or [2 * num_out].
        gated: the result is silu(gate) * up.
        parts: the result may be left as parts to be added, float32.

    Returns:
        [num_rows, num_out]; with `parts`, [num_parts, num_rows, num_out] float32.
    """
    (num_rows, num_in), num_out = x.shape, weight.shape[0] // (2 if gated else 1)
    columns = _BLOCK_N // (2 if gated else 1)
    rows = max(8, 1 << (num_rows - 1).bit_length())
    blocks, tiles = -(-num_out // columns), -(-num_in // _BLOCK_K)
    splits = max(min(_PROGRAMS // blocks, tiles), 1) if parts else 1
    tiles = -(-tiles // splits)
    splits = -(-num_in // (_BLOCK_K * tiles))
    shape = (splits, num_rows, num_out) if parts else (num_rows, num_out)
    out = torch.empty(shape, dtype=torch.float32 if parts else x.dtype, device=x.device)
    stage_bytes = (_BLOCK_N + rows) * _BLOCK_K * x.element_size()
    room = _SHARED_OF_SHORT if rows > 32 and tiles <= 8 else _SHARED
    _hopper_linear[(blocks, splits)](
        _tiles_of(weight, columns),
        _tiles_of(x, rows),
        *(bias, out, num_rows, num_out),
        TILES=tiles,
        SPLITS=splits,
        STAGES=min(tiles, room // stage_bytes, 8),
        GATED=gated,
        HAS_BIAS=bias is not None,
        PDL=True,
        launch_pdl=True,
        num_warps=4,
    )
    return out


def _tiles_of(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    """What the copy engine must know to fetch tiles of so many rows."""
    block = [rows, _BLOCK_K]
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[matrix.dtype]
    return TensorDescriptor.from_tensor(matrix, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


@cache
def has_hopper_linear(device: torch.device) -> bool:
    """Whether `hopper_linear` runs there: a Hopper card (its tensor cores' instructions are no other card's)."""
    return HAS_GLUON and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
