"""Gate and up projections of many rows on Hopper: a large product that ends with SiLU-and-multiply.

Such a product is bound by the tensor cores and soon by the power that they draw; cuBLAS does it as well as any kernel.
But cuBLAS leaves [rows, 2 * size] elements in memory for a kernel that reads them again to write half as many. On an
H200 that takes 6% as long as the product with Qwen3-8B's shapes, and 20% with Qwen3-0.6B's. Here the result is gated
before it is written.

    tiles         128 rows of x by 256 of the weight: two groups of four warps hold 64 x 256 sums each, as many as
                  registers allow, since a larger tile needs fewer bytes per product
    roles         one warp only starts copies (TMA); it is at the next tile while this one's result is written
    persistent    one program per multiprocessor takes one tile after the other. There is no dependent launch: a program
                  fills a multiprocessor and could not start beside the previous kernel
    order         the tiles in flight are 16 blocks of rows by about 8 of columns: 2,048 rows of x and as many of the
                  weight, nearly the fewest that so many tiles can need, so that the L2 cache serves them
    epilogue      gate and up of an output meet in one thread, see `gate_up_map`

`hopper_linear.py` is for up to 256 rows. The definition is `linear_reference`, then `silu_and_mul_reference`.

Sources: those of `hopper_linear.py`; Triton's tutorials "Matrix Multiplication" (the order) and "Persistent Matmul".
"""

from __future__ import annotations

import torch

from teachllm_kernels._hopper import barriers, gate_up_map, num_multiprocessors, place, tile_map
from teachllm_kernels._triton import gl, gluon, hopper
from teachllm_kernels.linear.dense_gemm import cost

__all__ = ["cost", "hopper_gated_linear"]

_ROWS, _COLUMNS, _BLOCK_K = 128, 128, 64
_STAGES = 4  # 48 KiB each; 32 more hold the result
_AT_ONCE = 16  # blocks of rows that run at once


@gluon.jit
def _copy(x_desc, w_desc, buffers, grid, num_tiles, STAGES: gl.constexpr, AT_ONCE: gl.constexpr):
    """The copying warp: it fills stages, each as soon as both groups are done with its old content."""
    x, w, arrived, free = buffers
    num_row_blocks, num_column_blocks = grid
    ROWS: gl.constexpr = x.shape[1]
    BLOCK_K: gl.constexpr = x.shape[2]
    EIGHTS: gl.constexpr = w.shape[1]
    BYTES: gl.constexpr = (ROWS + 16 * EIGHTS) * BLOCK_K * x.dtype.primitive_bitwidth // 8
    count = 0
    for index in range(gl.program_id(0), num_row_blocks * num_column_blocks, gl.num_programs(0)):
        row_block, column_block = place(index, num_row_blocks, num_column_blocks, AT_ONCE)
        for tile in range(num_tiles):
            stage = count % STAGES
            hopper.mbarrier.wait(free.index(stage), (count // STAGES - 1) & 1, count >= STAGES)
            hopper.mbarrier.expect(arrived.index(stage), BYTES)
            k = tile * BLOCK_K
            at = [row_block * ROWS, k]
            hopper.tma.async_copy_global_to_shared(x_desc, at, arrived.index(stage), x.index(stage))
            at = [column_block * EIGHTS, 0, 0, k]
            hopper.tma.async_copy_global_to_shared(w_desc, at, arrived.index(stage), w.index(stage))
            count += 1


@gluon.jit
def _multiply(
    out_desc, buffers, staged, grid, num_tiles, HALF: gl.constexpr, STAGES: gl.constexpr, AT_ONCE: gl.constexpr
):
    """A group of four warps: it computes half of the rows of each tile."""
    x, w, arrived, free = buffers
    num_row_blocks, num_column_blocks = grid
    ROWS: gl.constexpr = x.shape[1]
    BLOCK_K: gl.constexpr = x.shape[2]
    EIGHTS: gl.constexpr = w.shape[1]
    COLUMNS: gl.constexpr = 8 * EIGHTS
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    mine = staged.index(HALF)
    count = 0
    for index in range(gl.program_id(0), num_row_blocks * num_column_blocks, gl.num_programs(0)):
        row_block, column_block = place(index, num_row_blocks, num_column_blocks, AT_ONCE)
        acc = gl.zeros([64, 2 * COLUMNS], gl.float32, PRODUCT)
        for tile in range(num_tiles):
            stage = count % STAGES
            hopper.mbarrier.wait(arrived.index(stage), count // STAGES & 1)
            rows = x.index(stage).slice(HALF * 64, 64)
            weight = w.index(stage).reshape([2 * COLUMNS, BLOCK_K])
            acc = hopper.warpgroup_mma(rows, weight.permute((1, 0)), acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(1, [acc])  # the previous tile's
            hopper.mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=tile > 0)
            count += 1
        acc = hopper.warpgroup_mma_wait(0, [acc])
        hopper.mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
        gate, up = gl.split(acc.reshape([64, EIGHTS, 2, 8]).permute((0, 1, 3, 2)))
        y = (gate / (1.0 + gl.exp(-gate)) * up).reshape([64, COLUMNS])
        hopper.tma.store_wait(0)  # the previous block has been read
        mine.store(y.to(mine.dtype))
        hopper.fence_async_shared()
        at = [row_block * ROWS + HALF * 64, column_block * COLUMNS]
        hopper.tma.async_copy_shared_to_global(out_desc, at, mine)
    hopper.tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_row_blocks", "num_column_blocks", "num_tiles"])
def _hopper_gated_linear(
    x_desc, w_desc, out_desc,
    num_row_blocks, num_column_blocks, num_tiles,
    STAGES: gl.constexpr, AT_ONCE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = x_desc.dtype
    x = gl.allocate_shared_memory(DTYPE, [STAGES] + x_desc.block_shape, x_desc.layout)  # noqa: RUF005
    w = gl.allocate_shared_memory(DTYPE, [STAGES] + w_desc.block_shape, w_desc.layout)  # noqa: RUF005
    staged = gl.allocate_shared_memory(DTYPE, [2] + out_desc.block_shape, out_desc.layout)  # noqa: RUF005
    arrived, free = barriers(STAGES, 1), barriers(STAGES, 2)
    buffers, grid = (x, w, arrived, free), (num_row_blocks, num_column_blocks)
    gl.warp_specialize([
        (_multiply, (out_desc, buffers, staged, grid, num_tiles, 0, STAGES, AT_ONCE)),
        (_multiply, (out_desc, buffers, staged, grid, num_tiles, 1, STAGES, AT_ONCE)),
        (_copy, (x_desc, w_desc, buffers, grid, num_tiles, STAGES, AT_ONCE)),
    ], [4, 1], [232, 40])  # fmt: skip


def hopper_gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return silu(x Wg^T) * (x Wu^T), accumulated in float32 and gated before it is rounded.

    Args:
        x: [num_rows, num_in], contiguous, 2-byte floats; `num_in` a multiple of 8.
        weight: [2 * num_out, num_in], contiguous: gate above up. `num_out` is a multiple of 8.

    Returns:
        [num_rows, num_out].
    """
    (num_rows, num_in), num_out = x.shape, weight.shape[0] // 2
    out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device)
    num_row_blocks, num_column_blocks = -(-num_rows // _ROWS), -(-num_out // _COLUMNS)
    num_programs = min(num_row_blocks * num_column_blocks, num_multiprocessors(x.device))
    _hopper_gated_linear[(num_programs,)](
        x_desc=tile_map(x, [_ROWS, _BLOCK_K]),
        w_desc=gate_up_map(weight, 2 * _COLUMNS, _BLOCK_K),
        out_desc=tile_map(out, [_ROWS // 2, _COLUMNS]),
        num_row_blocks=num_row_blocks,
        num_column_blocks=num_column_blocks,
        num_tiles=-(-num_in // _BLOCK_K),
        STAGES=_STAGES,
        AT_ONCE=_AT_ONCE,
        num_warps=4,
    )
    return out
