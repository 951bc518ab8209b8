"""Group and block scales in Hopper's products of 8-bit floats, for `hopper_linear.py` and `hopper_scaled_mm.py`.

In DeepSeek's format every 128 inputs of a row of x share a scale, and so does every 128 x 128 block of the weight. A
sum of 128 products must be scaled before it is added to the others:

    result += sum of a group's products * scale of the row's group * scale of the output's block

in float32, one multiply-add per result and group. Adding up in two levels, which is more exact for 8-bit floats anyway,
takes as many instructions. The rest should cost no time:

    row scales     travel with their tile: each thread of the copying warp loads one, and the tile has arrived when they
                   have. (The copy engine would require a number of rows that is a multiple of 4.)
    block scales   are few: those of 32 groups fill a line of the L1 cache. They are loaded while the tile is awaited
    products       one is added up while another is computed: by the same warp group where few rows leave registers for
                   both, by the other warp group where there are many rows

The definition is `scaled_linear_reference`.

Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2; PTX ISA, "cp.async.mbarrier.arrive".
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gl, gluon, hopper
from teachllm_kernels.linear.scaled.scaled_reference import scale_kind
from teachllm_kernels.quantize_rows import GROUP, QuantizedRows

__all__ = [
    "COPIERS",
    "fetch_scales",
    "fetch_scales_of_two",
    "has_blocks",
    "product",
    "room_for_scales",
    "sums_of_few_rows",
    "sums_of_many_rows",
]

_GROUP = gl.constexpr(GROUP)
COPIERS = gl.constexpr(32)  # threads of the copying warp; each arrives when its scales have arrived


def has_blocks(x: QuantizedRows, weight: torch.Tensor, scales: torch.Tensor, gated: bool) -> bool:
    """Return whether scales are per group and block. Refuse integers, and blocks that reach from gate to up."""
    if scale_kind(weight, scales) != "block":
        return False
    assert x.values.dtype == torch.float8_e4m3fn and not (gated and weight.shape[0] // 2 % GROUP)
    return True


@gluon.jit
def room_for_scales(NUM: gl.constexpr, ROWS: gl.constexpr):
    """Allocate [NUM, ROWS] scales in shared memory."""
    return gl.allocate_shared_memory(gl.float32, [NUM, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def fetch_scales(x_scales_ptr, to, first_row, num_rows, group, num_groups):
    """Start copying a group's scales of some rows (copying warp). Past the last row or group they are zero.

    Args:
        x_scales_ptr: [num_groups, num_rows] float32.
        to: [rows] of shared memory.
    """
    ROWS: gl.constexpr = to.shape[0]
    m = first_row + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    is_there = (m < num_rows) & (group < num_groups)
    hopper.async_copy.async_copy_global_to_shared(to, x_scales_ptr + group * num_rows + m, is_there)


@gluon.jit
def fetch_scales_of_two(
    x_scales_ptr, to, arrived, stage, first_row, num_rows, k, REST: gl.constexpr, GROUPS: gl.constexpr
):
    """Start copying the scales for both products of a tile, see `sums_of_few_rows`; every copying thread arrives."""
    for i in gl.static_range(2):
        row = first_row + (i * to.shape[1] if REST > 0 else 0)
        fetch_scales(x_scales_ptr, to.index(stage * 2 + i), row, num_rows, k // _GROUP + (0 if REST > 0 else i), GROUPS)
    hopper.async_copy.mbarrier_arrive(arrived.index(stage), increment_count=False)


@gluon.jit
def _block_scale(scales_ptr, first, num_out, group, num_groups, is_up, GATED: gl.constexpr):
    """Return the scale of the block of the outputs from `first` on; if gated, gate's or up's, shaped like is_up.

    Args:
        scales_ptr: [blocks of outputs, num_groups] float32; if gated, the scales of gate above those of up.
    """
    is_there = (first < num_out) & (group < num_groups)
    found = gl.load(scales_ptr + first // _GROUP * num_groups + group, is_there, 0.0)
    if GATED:
        of_up = gl.load(scales_ptr + (num_out + first) // _GROUP * num_groups + group, is_there, 0.0)
        found = gl.where(is_up == 1, of_up, found)
    return found


@gluon.jit
def product(a, b, part):
    """Start multiplying a by b^T, in the registers of `part`."""
    return hopper.warpgroup_mma(a, b.permute((1, 0)), part, use_acc=False, is_async=True)


@gluon.jit
def sums_of_few_rows(
    acc, more, buffers, scales_ptr, where,
    AT: gl.constexpr, STRIPES: gl.constexpr, TILES: gl.constexpr, REST: gl.constexpr, GROUPS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Return acc, and `more` for further rows, plus the products of a stripe of the weight; see `hopper_linear.py`.

    A tile is two products: of two groups, or of one group with the rows and with the further rows. While the first is
    added up, the second is computed. Three warp groups have too few registers for that if there are further rows, but
    then the tensor cores always have another warp group to serve.

    Args:
        where: the first output of the stripe, the number of outputs, and the first input.
    """
    output, num_out, first_k = where
    w, x, rest, of_rows, arrived, free = buffers
    STAGES: gl.constexpr = x.shape[0]
    SECOND: gl.constexpr = REST if REST > 0 else x.shape[1]
    OF_FIRST: gl.constexpr = acc.type.layout
    OF_SECOND: gl.constexpr = more.type.layout if REST > 0 else OF_FIRST
    BOTH: gl.constexpr = STRIPES < 3 or REST == 0
    is_up = (gl.arange(0, 64, gl.SliceLayout(1, OF_FIRST)) // 8 % 2)[:, None]  # rows of gate and up in turns, 8 of each
    for tile in range(TILES):
        stage = tile % STAGES
        group = first_k // _GROUP + tile * (1 if REST > 0 else 2)
        of_block = _block_scale(scales_ptr, output, num_out, group, GROUPS, is_up, GATED)
        of_second = of_block
        if REST == 0:
            of_second = _block_scale(scales_ptr, output, num_out, group + 1, GROUPS, is_up, GATED)
        elif GATED:
            of_second = gl.convert_layout(of_block, OF_SECOND)
        hopper.mbarrier.wait(arrived.index(stage), tile // STAGES & 1)
        weight, rows = w.index(stage * STRIPES + AT).reshape([64, x.shape[2]]), x.index(stage)
        second_weight = weight if REST > 0 else weight.slice(_GROUP, _GROUP, 1)
        second_rows = rest.index(stage) if REST > 0 else rows.slice(_GROUP, _GROUP, 1)
        part = gl.zeros_like(acc)
        second = gl.zeros_like(more if REST > 0 else acc)
        part = product(weight.slice(0, _GROUP, 1), rows.slice(0, _GROUP, 1), part)
        if BOTH:
            second = product(second_weight, second_rows, second)
        scale = of_rows.index(stage * 2).load(gl.SliceLayout(0, OF_FIRST))[None, :] * of_block
        acc += hopper.warpgroup_mma_wait(1 if BOTH else 0, [part]) * scale
        if not BOTH:
            second = product(second_weight, second_rows, second)
        scale = of_rows.index(stage * 2 + 1).slice(0, SECOND).load(gl.SliceLayout(0, OF_SECOND))[None, :] * of_second
        second = hopper.warpgroup_mma_wait(0, [second])
        if STAGES < TILES:
            hopper.mbarrier.arrive(free.index(stage))
        if REST > 0:
            more += second * scale
        else:
            acc += second * scale
    return acc, more


@gluon.jit
def sums_of_many_rows(
    buffers, count, scales_ptr, where, HALF: gl.constexpr, COLUMNS: gl.constexpr, GATED: gl.constexpr
):
    """Return the products of half of the rows with `num_tiles` stages, a group each; see `hopper_scaled_mm.py`.

    A wide tile is two products in turns, so that registers hold 256 sums per row and a part of 128. The compiler would
    rather keep both parts at once, in memory. It does not, because one part takes the other's place and the sums are
    waited for.

    Args:
        count: the number of stages before these.
        where: the block of columns of the result, the number of outputs, and the number of tiles.

    Returns:
        [64, COLUMNS], and the count after these stages.
    """
    column_block, num_out, num_tiles = where
    x, w, of_rows, arrived, free = buffers
    STAGES: gl.constexpr = x.shape[0]
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    OUTPUTS: gl.constexpr = 64 if GATED else 128
    IS_WIDE: gl.constexpr = COLUMNS == 256
    output = column_block * (COLUMNS // 128 * OUTPUTS)
    is_up = (gl.arange(0, 128, gl.SliceLayout(0, PRODUCT)) // 8 % 2)[None, :]
    left = gl.zeros([64, 128], gl.float32, PRODUCT)
    right, part = left, left
    for tile in range(num_tiles):
        stage = count % STAGES
        of_left = _block_scale(scales_ptr, output, num_out, tile, num_tiles, is_up, GATED)
        of_right = of_left
        if IS_WIDE:
            of_right = _block_scale(scales_ptr, output + OUTPUTS, num_out, tile, num_tiles, is_up, GATED)
        hopper.mbarrier.wait(arrived.index(stage), count // STAGES & 1)
        rows = x.index(stage).slice(HALF * 64, 64)
        weight = w.index(stage).reshape([COLUMNS, x.shape[2]])
        scale = of_rows.index(stage).slice(HALF * 64, 64).load(gl.SliceLayout(1, PRODUCT))[:, None]
        part = hopper.warpgroup_mma_wait(0, [product(rows, weight.slice(0, 128), part)])
        if IS_WIDE:
            left = hopper.warpgroup_mma_wait(0, [left + part * (scale * of_left)])
            part = hopper.warpgroup_mma_wait(0, [product(rows, weight.slice(128, 128), part)])
            right += part * (scale * of_right)
        else:
            left += part * (scale * of_left)
        hopper.mbarrier.arrive(free.index(stage))
        count += 1
    if IS_WIDE:
        left = gl.join(left, right).permute((0, 2, 1)).reshape([64, 256])
    return left, count
