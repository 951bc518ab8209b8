"""Products of many rows of 8-bit operands on Hopper, for every product of a layer: scales, bias and SiLU are fused.

A library's 8-bit product is as fast as the power of the tensor cores allows. But it leaves gate and up in memory for a
kernel that reads them again, and integer sums as int32, twice as many bytes as the result has. Here everything after
the product is done before the result is written.

    tiles         128 rows of x by 256 of the weight, with 128 inputs: as many bytes as in `hopper_gated_linear.py`,
                  from which the roles, the order and the persistent programs are taken
    scales        the scales of a tile's rows and columns are loaded when it begins, and have arrived when it ends
    in turns      the second group begins some stages after the first. While one is at its epilogue, which lasts as long
                  as 2 or 3 of 32 steps, the other has the tensor cores to itself
    two levels    tensor cores accumulate products of 8-bit floats in about 14 bits. On demand, partial sums are added
                  up in float32, as in DeepSeek-V3; registers then hold two sums per result, so a tile is 128 by 128 and
                  needs a third more bytes
    groups        with group and block scales (see `hopper_blocks.py`) a partial sum is that of a group, and it is
                  scaled when it is added. A wide tile is two products one after the other, whose sums share registers

The definition is `scaled_linear_reference`.

Sources: those of `hopper_linear.py`; DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2.
"""

from __future__ import annotations

import torch

from teachllm_kernels._hopper import barriers, gate_up_map, num_multiprocessors, place, tile_map
from teachllm_kernels._triton import gl, gluon, hopper
from teachllm_kernels.linear.scaled.hopper_blocks import (
    COPIERS,
    fetch_scales,
    has_blocks,
    room_for_scales,
    sums_of_many_rows,
)
from teachllm_kernels.linear.scaled.scaled_reference import cost
from teachllm_kernels.quantize_rows import QuantizedRows

__all__ = ["cost", "hopper_scaled_mm"]

_ROWS, _BLOCK_K = 128, 128
_WIDE, _NARROW = 256, 128  # columns per tile: rows of the weight
_SHARED = 226 * 1024  # bytes of shared memory per program
_AT_ONCE = 16  # blocks of rows that run at once


@gluon.jit
def _copy(
    x_desc, w_desc, x_scales_ptr,
    buffers, grid, sizes,
    BY_BLOCK: gl.constexpr, GATED: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """The copying warp: it fills stages, each as soon as both groups are done with its old content."""
    x, w, of_rows, arrived, free = buffers
    num_rows, _, num_tiles = sizes
    num_row_blocks, num_column_blocks = grid
    STAGES: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    BLOCK_K: gl.constexpr = x.shape[2]
    COLUMNS: gl.constexpr = 16 * w.shape[1] if GATED else w.shape[1]
    count = 0
    for index in range(gl.program_id(0), num_row_blocks * num_column_blocks, gl.num_programs(0)):
        row_block, column_block = place(index, num_row_blocks, num_column_blocks, AT_ONCE)
        for tile in range(num_tiles):
            stage = count % STAGES
            hopper.mbarrier.wait(free.index(stage), (count // STAGES - 1) & 1, count >= STAGES)
            hopper.mbarrier.expect(arrived.index(stage), (ROWS + COLUMNS) * BLOCK_K)
            k = tile * BLOCK_K
            hopper.tma.async_copy_global_to_shared(x_desc, [row_block * ROWS, k], arrived.index(stage), x.index(stage))
            if GATED:
                at = [column_block * (COLUMNS // 16), 0, 0, k]
                hopper.tma.async_copy_global_to_shared(w_desc, at, arrived.index(stage), w.index(stage))
            else:
                at = [column_block * COLUMNS, k]
                hopper.tma.async_copy_global_to_shared(w_desc, at, arrived.index(stage), w.index(stage))
            if BY_BLOCK:
                fetch_scales(x_scales_ptr, of_rows.index(stage), row_block * ROWS, num_rows, tile, num_tiles)
                hopper.async_copy.mbarrier_arrive(arrived.index(stage), increment_count=False)
            count += 1


@gluon.jit
def _sums(acc, buffers, count, num_tiles, HALF: gl.constexpr, COLUMNS: gl.constexpr):
    """Return acc plus the products of the next `num_tiles` stages."""
    x, w, _, arrived, free = buffers
    STAGES: gl.constexpr = x.shape[0]
    BLOCK_K: gl.constexpr = x.shape[2]
    for tile in range(num_tiles):
        stage = count % STAGES
        hopper.mbarrier.wait(arrived.index(stage), count // STAGES & 1)
        rows = x.index(stage).slice(HALF * 64, 64)
        weight = w.index(stage).reshape([COLUMNS, BLOCK_K])
        acc = hopper.warpgroup_mma(rows, weight.permute((1, 0)), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(1, [acc])  # the previous tile's
        hopper.mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=tile > 0)
        count += 1
    acc = hopper.warpgroup_mma_wait(0, [acc])
    hopper.mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
    return acc, count


@gluon.jit
def _multiply(
    task,
    HALF: gl.constexpr, COLUMNS: gl.constexpr, AT_ONCE: gl.constexpr, LEVEL: gl.constexpr, BY_BLOCK: gl.constexpr,
    GATED: gl.constexpr, BY_OUTPUT: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """A group of four warps: it computes half of the rows of each tile."""
    out_desc, buffers, staged, grid, sizes, values = task
    x, _, _, arrived, _ = buffers
    num_row_blocks, num_column_blocks = grid
    num_rows, num_out, num_tiles = sizes
    x_scales_ptr, scales_ptr, bias_ptr = values
    SUMS: gl.constexpr = gl.int32 if x.dtype.is_int() else gl.float32
    AT_A_TIME: gl.constexpr = 128 if x.dtype.is_int() else COLUMNS  # integer instructions do not take 256
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, AT_A_TIME, 32])
    row = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, PRODUCT))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, PRODUCT))
    is_up = 0
    if GATED:  # columns of gate and up in turns, eight of each
        is_up = column // 8 % 2
        column = column // 16 * 8 + column % 8
    mine = staged.index(HALF)
    count = 0
    if HALF == 1:
        hopper.mbarrier.wait(arrived.index(gl.minimum(num_tiles, x.shape[0]) - 1), 0)
    for index in range(gl.program_id(0), num_row_blocks * num_column_blocks, gl.num_programs(0)):
        row_block, column_block = place(index, num_row_blocks, num_column_blocks, AT_ONCE)
        m = row_block * x.shape[1] + row
        n = column_block * (COLUMNS // 2 if GATED else COLUMNS) + column
        of_rows, of_columns = 1.0, 1.0
        if not BY_BLOCK:
            of_rows = gl.load(x_scales_ptr + m, m < num_rows, 0.0)[:, None]
            of_columns = gl.load(scales_ptr)
        if BY_OUTPUT:
            of_columns = gl.load(scales_ptr + is_up * num_out + n, n < num_out, 0.0)[None, :]
        acc = gl.zeros([64, COLUMNS], SUMS, PRODUCT)
        if BY_BLOCK:
            where = (column_block, num_out, num_tiles)
            acc, count = sums_of_many_rows(buffers, count, scales_ptr, where, HALF, COLUMNS, GATED)
            acc = gl.convert_layout(acc, PRODUCT, assert_trivial=True)
        elif LEVEL > 0:
            for first in range(0, num_tiles, LEVEL):
                part = gl.zeros([64, COLUMNS], SUMS, PRODUCT)
                part, count = _sums(part, buffers, count, gl.minimum(num_tiles - first, LEVEL), HALF, COLUMNS)
                acc += part
        else:
            acc, count = _sums(acc, buffers, count, num_tiles, HALF, COLUMNS)
        y = acc.to(gl.float32) * of_rows * of_columns
        if HAS_BIAS:
            y += gl.load(bias_ptr + is_up * num_out + n, n < num_out, 0.0).to(gl.float32)[None, :]
        at = row_block * x.shape[1] + HALF * 64
        if GATED:
            gate, up = gl.split(y.reshape([64, COLUMNS // 16, 2, 8]).permute((0, 1, 3, 2)))
            y = (gate / (1.0 + gl.exp(-gate)) * up).reshape([64, COLUMNS // 2])
            _write(y, mine, out_desc, at, column_block * (COLUMNS // 2))
        else:
            left, right = gl.split(y.reshape([64, 2, COLUMNS // 2]).permute((0, 2, 1)))
            _write(left, mine, out_desc, at, column_block * COLUMNS)
            _write(right, mine, out_desc, at, column_block * COLUMNS + COLUMNS // 2)
    hopper.tma.store_wait(0)


@gluon.jit
def _write(y, staged, out_desc, row, column):
    hopper.tma.store_wait(0)  # what was staged before has been copied out
    staged.store(y.to(staged.dtype))
    hopper.fence_async_shared()
    hopper.tma.async_copy_shared_to_global(out_desc, [row, column], staged)


@gluon.jit(do_not_specialize=["num_rows", "num_row_blocks", "num_column_blocks", "num_tiles"])
def _hopper_scaled_mm(
    x_desc, w_desc, out_desc, x_scales_ptr, scales_ptr, bias_ptr,
    num_rows, num_out, num_row_blocks, num_column_blocks, num_tiles,
    STAGES: gl.constexpr, AT_ONCE: gl.constexpr, LEVEL: gl.constexpr, BY_BLOCK: gl.constexpr, GATED: gl.constexpr,
    BY_OUTPUT: gl.constexpr, HAS_BIAS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = x_desc.dtype
    ROWS: gl.constexpr = x_desc.block_shape[0]
    COLUMNS: gl.constexpr = 2 * out_desc.block_shape[1]
    x = gl.allocate_shared_memory(DTYPE, [STAGES] + x_desc.block_shape, x_desc.layout)  # noqa: RUF005
    w = gl.allocate_shared_memory(DTYPE, [STAGES] + w_desc.block_shape, w_desc.layout)  # noqa: RUF005
    staged = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_shape, out_desc.layout)  # noqa: RUF005
    of_rows = x  # not used
    if BY_BLOCK:
        of_rows = room_for_scales(STAGES, ROWS)
    arrived, free = barriers(STAGES, 1 + (COPIERS if BY_BLOCK else 0)), barriers(STAGES, 2)
    buffers, grid = (x, w, of_rows, arrived, free), (num_row_blocks, num_column_blocks)
    sizes, values = (num_rows, num_out, num_tiles), (x_scales_ptr, scales_ptr, bias_ptr)
    task = (out_desc, buffers, staged, grid, sizes, values)
    gl.warp_specialize([
        (_multiply, (task, 0, COLUMNS, AT_ONCE, LEVEL, BY_BLOCK, GATED, BY_OUTPUT, HAS_BIAS)),
        (_multiply, (task, 1, COLUMNS, AT_ONCE, LEVEL, BY_BLOCK, GATED, BY_OUTPUT, HAS_BIAS)),
        (_copy, (x_desc, w_desc, x_scales_ptr, buffers, grid, sizes, BY_BLOCK, GATED, AT_ONCE)),
    ], [4, 1], [232, 40])  # fmt: skip


def hopper_scaled_mm(
    x: QuantizedRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    level: int = 0,
) -> torch.Tensor:
    """Compute `scaled_linear_reference`.

    Args:
        x: [num_rows, num_in], with one scale per row or per group of inputs; `num_in` a multiple of 16.
        weight: [num_out, num_in], quantized, of x's dtype; if `gated`, [2 * num_out, num_in]: gate above up. `num_out`
            is a multiple of 8.
        scales: [num_out, 1] (gated: [2 * num_out, 1]) or [1, 1] float32; for 8-bit floats also block scales. Blocks do
            not reach from gate to up: `num_out` is a multiple of 128.
        dtype: dtype of the result, 2 bytes.
        level: the number of inputs, a multiple of 128, whose products the tensor cores accumulate; longer sums are
            float32. 0: all of them. With blocks it is always a group.
    """
    (num_rows, num_in), num_out = x.values.shape, weight.shape[0] // (2 if gated else 1)
    out = torch.empty((num_rows, num_out), dtype=dtype, device=x.values.device)
    places, num_row_blocks = num_multiprocessors(out.device), -(-num_rows // _ROWS)
    by_block = has_blocks(x, weight, scales, gated)
    columns = _NARROW if level and not by_block else _columns(num_row_blocks, weight.shape[0], places)
    stage = (_ROWS + columns) * _BLOCK_K + (_ROWS * 4 if by_block else 0)
    num_column_blocks = -(-weight.shape[0] // columns)
    num_programs = min(num_row_blocks * num_column_blocks, places)
    _hopper_scaled_mm[(num_programs,)](
        x_desc=tile_map(x.values, [_ROWS, _BLOCK_K]),
        w_desc=gate_up_map(weight, columns, _BLOCK_K) if gated else tile_map(weight, [columns, _BLOCK_K]),
        out_desc=tile_map(out, [_ROWS // 2, columns // 2]),
        x_scales_ptr=x.scales,
        scales_ptr=scales,
        bias_ptr=bias,
        num_rows=num_rows,
        num_out=num_out,
        num_row_blocks=num_row_blocks,
        num_column_blocks=num_column_blocks,
        num_tiles=-(-num_in // _BLOCK_K),
        STAGES=(_SHARED - _ROWS * columns // 2 * 2) // stage,
        AT_ONCE=_AT_ONCE,
        LEVEL=level // _BLOCK_K,
        BY_BLOCK=by_block,
        GATED=gated,
        BY_OUTPUT=scales.numel() > 1 and not by_block,
        HAS_BIAS=bias is not None,
        num_warps=4,
    )
    return out


def _columns(num_row_blocks: int, num_weight_rows: int, places: int) -> int:
    """Return the columns of a tile: narrow if wide tiles leave places idle in the last round for too long."""

    def rounds(columns: int) -> int:
        return -(-num_row_blocks * -(-num_weight_rows // columns) // places)

    return _NARROW if rounds(_NARROW) * _NARROW * 1.15 < rounds(_WIDE) * _WIDE else _WIDE
