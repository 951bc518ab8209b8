"""Products of a packed weight with 2 to 256 rows on Hopper: the multiplying warps dequantize it in registers.

The structure is that of `hopper_linear.py`: one warp starts copies, groups of four warps multiply 64 outputs, the left
operand, by x^T. But the weight arrives quantized, a quarter of the bytes or half. A group reads a tile, dequantizes it
(see `hopper_packed_operands.py`) and multiplies from registers; meanwhile the tensor cores serve another group.

    scales   travel with their tile, several tiles ahead: threads that load scales themselves wait for memory. If a tile
             has one scale per output, it multiplies the product; shorter groups' scales multiply the weights
    narrow   if there are fewer stripes of outputs than multiprocessors, a program's groups take turns with the tiles
             of one stripe and add up at the end

The definition is `packed_linear_reference`. The portable kernel is `packed_linear.py`.

Sources: those of `hopper_linear.py` and `packed_weight.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from teachllm_kernels._hopper import barriers, tile_map
from teachllm_kernels._triton import (
    PLACES,
    TensorDescriptor,
    barrier,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    hopper,
    triton,
)
from teachllm_kernels.linear.hopper_linear import fetch_x, finish
from teachllm_kernels.linear.hopper_tiling import STRIPE, result_columns
from teachllm_kernels.linear.packed.hopper_packed_operands import (
    MISSING,
    TILE_K,
    groups_layout,
    late_scales,
    operand,
    words_layout,
)
from teachllm_kernels.linear.packed.packed_dequantize import conversion
from teachllm_kernels.linear.packed.packed_weight import PackedWeight, cost, packed_linear_reference

__all__ = ["MAX_ROWS", "cost", "hopper_packed_linear", "packed_linear_reference", "takes_groups"]

MAX_ROWS = 256
_MOST = 128  # rows per program
_DEPTH = 128  # inputs per tile: `TILE_K`
_SHARED = 220 * 1024  # bytes of shared memory per program for the stages
_MAX_STAGES = 12


@gluon.jit
def _copy(
    w_desc, scale_desc, zero_desc, x_desc,
    buffers, task,
    GROUP: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, STRIPES: gl.constexpr,
):  # fmt: skip
    """The copying warp: it fills stages, each as soon as it is free."""
    _, _, _, x, arrived, free = buffers
    first_row, num_rows, _, block, _, first_k = task
    for i in gl.static_range(STAGES):
        _fetch_weight(w_desc, scale_desc, zero_desc, buffers, i, block, first_k + i * TILE_K, GROUP, STRIPES)
    gdc_wait()
    for i in gl.static_range(STAGES):
        fetch_x(x_desc, x, arrived, i, first_row, num_rows, first_k + i * TILE_K)
    for tile in range(STAGES, TILES):
        stage = tile % STAGES
        k = first_k + tile * TILE_K
        hopper.mbarrier.wait(free.index(stage), (tile // STAGES - 1) & 1)
        _fetch_weight(w_desc, scale_desc, zero_desc, buffers, stage, block, k, GROUP, STRIPES)
        fetch_x(x_desc, x, arrived, stage, first_row, num_rows, k)


@gluon.jit
def _fetch_weight(w_desc, scale_desc, zero_desc, buffers, stage, block, k, GROUP: gl.constexpr, STRIPES: gl.constexpr):
    """Start copying the quantized weights, scales and zeros of a program's outputs, from input k on, to a stage."""
    w, scales, zeros, _, all_arrived, _ = buffers
    ROWS: gl.constexpr = w_desc.block_shape[1]  # of 32 words
    GROUPS: gl.constexpr = scale_desc.block_shape[1] // 16
    OF_ZEROS: gl.constexpr = 0 if zero_desc is None else zero_desc.block_shape[0] * GROUPS * 16
    BYTES: gl.constexpr = ROWS * 512 + GROUPS * 128 + OF_ZEROS
    arrived = all_arrived.index(stage)
    hopper.mbarrier.expect(arrived, BYTES * STRIPES)
    for i in gl.static_range(STRIPES):
        at, first = stage * STRIPES + i, (block * STRIPES + i) * 4
        hopper.tma.async_copy_global_to_shared(w_desc, [first, k // TILE_K * ROWS, 0], arrived, w.index(at))
        hopper.tma.async_copy_global_to_shared(scale_desc, [first, k // GROUP * 16], arrived, scales.index(at))
        if zero_desc is not None:
            hopper.tma.async_copy_global_to_shared(zero_desc, [first, k // GROUP * 16], arrived, zeros.index(at))


@gluon.jit
def _multiply(
    given,
    WHICH: gl.constexpr, STRIPES: gl.constexpr, TURNS: gl.constexpr, TILES: gl.constexpr, BITS: gl.constexpr,
    IS_E2M1: gl.constexpr, WORDS: gl.constexpr, BY_GROUP: gl.constexpr, GATED: gl.constexpr, DIRECT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """A group of four warps: it computes the product of a stripe, or of every tile of it that is its turn."""
    buffers, sums, added, task, result, magic = given
    _, scales, _, x, arrived, free = buffers
    STAGES: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    DTYPE: gl.constexpr = x.dtype
    TURN: gl.constexpr = WHICH if TURNS > 1 else 0
    STRIPE_OF_MINE: gl.constexpr = 0 if TURNS > 1 else WHICH
    OF_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LATE: gl.constexpr = scales.shape[2] == 16
    acc = gl.zeros([64, ROWS], gl.float32, OF_ACC)
    for step in range(TILES // TURNS):
        tile = step * TURNS + TURN
        stage = tile % STAGES
        hopper.mbarrier.wait(arrived.index(stage), tile // STAGES & 1)
        at = stage * STRIPES + STRIPE_OF_MINE
        left = operand(buffers, at, magic, BITS, IS_E2M1, DTYPE, WORDS, BY_GROUP, OF_ACC)
        x_t = x.index(stage).permute((1, 0))
        if LATE:
            scale = late_scales(scales.index(at), BY_GROUP, OF_ACC)
            part = gl.zeros_like(acc)
            part = hopper.warpgroup_mma(left, x_t, part, use_acc=False, is_async=True)
            acc += hopper.warpgroup_mma_wait(0, [part]) * scale
        else:
            acc = hopper.warpgroup_mma(left, x_t, acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(0, [acc])
        if STAGES < TILES:
            hopper.mbarrier.arrive(free.index(stage))
    if IS_E2M1:
        acc *= MISSING
    if WHICH > 0 and TURNS > 1:
        sums.index(WHICH - 1).store(acc)
        barrier()
        hopper.mbarrier.arrive(added)
    else:
        if TURNS > 1:
            hopper.mbarrier.wait(added, 0)
            for other in gl.static_range(TURNS - 1):
                acc += sums.index(other).load(OF_ACC)
        finish(acc, task, result, 0, STRIPE_OF_MINE, STRIPES, GATED, DIRECT, HAS_BIAS)


@gluon.jit(do_not_specialize=["num_rows"])  # it differs from batch to batch
def _hopper_packed_linear(
    w_desc, scale_desc, zero_desc, x_desc, bias_ptr, out_desc, out_ptr,
    magic, num_rows, num_out,
    ROWS: gl.constexpr, STRIPES: gl.constexpr, TURNS: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, BITS: gl.constexpr, IS_E2M1: gl.constexpr, WORDS: gl.constexpr, BY_GROUP: gl.constexpr,
    GATED: gl.constexpr, DIRECT: gl.constexpr, HAS_BIAS: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    first_row, block, split = gl.program_id(0) * ROWS, gl.program_id(1), gl.program_id(2)
    BOX: gl.constexpr = x_desc.block_shape[0]
    STORED: gl.constexpr = STAGES * STRIPES
    w = gl.allocate_shared_memory(gl.int32, [STORED] + w_desc.block_shape, w_desc.layout)  # noqa: RUF005
    scales = gl.allocate_shared_memory(scale_desc.dtype, [STORED] + scale_desc.block_shape, scale_desc.layout)  # noqa: RUF005
    zeros = scales  # if there are none
    if zero_desc is not None:
        zeros = gl.allocate_shared_memory(gl.uint8, [STORED] + zero_desc.block_shape, zero_desc.layout)  # noqa: RUF005
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, TILE_K], x_desc.layout)
    staged, sums = w, w  # not used, like other buffers below
    if not DIRECT:
        staged = gl.allocate_shared_memory(out_desc.dtype, [STRIPES, ROWS, out_desc.block_shape[1]], out_desc.layout)
    if TURNS > 1:
        SUMS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        sums = gl.allocate_shared_memory(gl.float32, [TURNS - 1, 64, ROWS], SUMS)
    # Allocated last, so that their memory is theirs alone. No barrier without a waiting role, see `barriers`.
    arrived = barriers(STAGES, 1 + ROWS // BOX)
    free, added = arrived, arrived
    if STAGES < TILES:
        free = barriers(STAGES, STRIPES)
    if TURNS > 1:
        added = barriers(1, TURNS - 1).index(0)
    buffers = (w, scales, zeros, x, arrived, free)
    task = (first_row, num_rows, num_out, block, split, split * TILES * TILE_K)
    result = (bias_ptr, out_ptr, out_ptr, staged, out_desc, out_ptr)
    given = (buffers, sums, added, task, result, magic)
    if STRIPES * TURNS == 1:
        gl.warp_specialize([
            (_multiply, (
                given, 0, STRIPES, TURNS, TILES, BITS, IS_E2M1, WORDS, BY_GROUP, GATED, DIRECT, HAS_BIAS
            )),
            (_copy, (w_desc, scale_desc, zero_desc, x_desc, buffers, task, GROUP, TILES, STAGES, STRIPES)),
        ], [1], [72])  # fmt: skip
    elif STRIPES * TURNS == 2:
        gl.warp_specialize([
            (_multiply, (
                given, 0, STRIPES, TURNS, TILES, BITS, IS_E2M1, WORDS, BY_GROUP, GATED, DIRECT, HAS_BIAS
            )),
            (_multiply, (
                given, 1, STRIPES, TURNS, TILES, BITS, IS_E2M1, WORDS, BY_GROUP, GATED, DIRECT, HAS_BIAS
            )),
            (_copy, (w_desc, scale_desc, zero_desc, x_desc, buffers, task, GROUP, TILES, STAGES, STRIPES)),
        ], [4, 1], [REGISTERS, 72])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (
                given, 0, STRIPES, TURNS, TILES, BITS, IS_E2M1, WORDS, BY_GROUP, GATED, DIRECT, HAS_BIAS
            )),
            (_multiply, (
                given, 1, STRIPES, TURNS, TILES, BITS, IS_E2M1, WORDS, BY_GROUP, GATED, DIRECT, HAS_BIAS
            )),
            (_multiply, (
                given, 2, STRIPES, TURNS, TILES, BITS, IS_E2M1, WORDS, BY_GROUP, GATED, DIRECT, HAS_BIAS
            )),
            (_copy, (w_desc, scale_desc, zero_desc, x_desc, buffers, task, GROUP, TILES, STAGES, STRIPES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 72])  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Describe how a product is divided.

    Attributes:
        rows: rows of x per program.
        stripes: stripes of 64 outputs per program.
        turns: warp groups that share a stripe.
        splits: slices of the inputs, one program each, whose partial sums make the result.
        tiles: tiles per program.
        stages: tiles that are being copied or in use.
    """

    rows: int
    stripes: int
    turns: int
    splits: int
    tiles: int
    stages: int


def _tiling(num_rows: int, weight: PackedWeight, parts: bool) -> _Tiling:
    """Return the tiling: three warp groups per multiprocessor, with one stripe each, or sharing one if stripes are few.

    With many rows two groups share a stripe: a third group's sums take longer to add than it saves.
    """
    rows = min(max(triton.next_power_of_2(num_rows), 8), _MOST)
    row_blocks = triton.cdiv(num_rows, rows)
    most = 3 if rows <= 64 else 2  # warp groups that have enough registers
    all_stripes, all_tiles = -(-weight.qweight.shape[0] // 4), -(-weight.num_in // _DEPTH)

    def waves(stripes: int) -> int:
        return triton.cdiv(triton.cdiv(all_stripes, stripes) * row_blocks, PLACES)

    stripes = min(range(1, most + 1), key=lambda count: (waves(count) * count, waves(count)))
    turns = min(3 if rows <= 32 else 2, all_tiles) if stripes == 1 else 1
    programs = triton.cdiv(all_stripes, stripes) * row_blocks
    splits = max(min(PLACES // programs, all_tiles // turns), 1) if parts else 1
    tiles = -(-all_tiles // (splits * turns)) * turns
    splits = -(-all_tiles // tiles)
    return _Tiling(rows, stripes, turns, splits, tiles, _stages(rows, stripes, turns, weight, tiles))


def _stages(rows: int, stripes: int, turns: int, weight: PackedWeight, tiles: int) -> int:
    """Return the number of stages that fit.

    If groups take turns, each stage is one group's: a group that skips a phase of a barrier misses the next one.
    """
    num_groups = max(_DEPTH // weight.group_size, 1) if weight.scales.shape[1] > 1 else 1
    stage = stripes * (64 * _DEPTH * weight.bits // 8 + num_groups * 256) + rows * _DEPTH * 2
    rest = (turns - 1) * 64 * rows * 4 + stripes * rows * STRIPE * 2
    return min(tiles, ((_SHARED - rest) // stage) // turns * turns, _MAX_STAGES // turns * turns)


def takes_groups(dtype: torch.dtype, group_size: int, scale_bytes: int, is_e2m1: bool) -> bool:
    """Return whether this kernel supports such groups.

    Args:
        dtype: of x.
        group_size: inputs that share a scale; 0: all inputs of an output do.
        scale_bytes: of a scale.
    """
    size = group_size or _DEPTH
    late = size % _DEPTH == 0  # scales are applied to products
    fits = not is_e2m1 if late else dtype == torch.bfloat16 and _DEPTH % size == 0
    return fits and dtype.itemsize == scale_bytes == 2


def hopper_packed_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    parts: bool = False,
) -> torch.Tensor:
    """Compute `packed_linear_triton` for at most `MAX_ROWS` rows.

    Args:
        weight: inputs are a multiple of 8, outputs of 16, and `takes_groups` accepts its groups.
    """
    assert x.shape[0] <= MAX_ROWS and x.shape[1] == weight.num_in and not (gated and parts)
    assert weight.num_in % 8 == 0 and weight.num_out % 16 == 0 and weight.is_gated == gated
    group_size = weight.group_size if weight.scales.shape[1] > 1 else 0
    assert takes_groups(x.dtype, group_size, weight.scales.element_size(), weight.is_e2m1)
    num_rows, num_out = x.shape[0], weight.num_out // (2 if gated else 1)
    tiling = _tiling(num_rows, weight, parts)
    shape = (tiling.splits, num_rows, num_out) if parts else (num_rows, num_out)
    out = torch.empty(shape, dtype=torch.float32 if parts else x.dtype, device=x.device)
    num_blocks, all_groups = weight.qweight.shape[0], weight.scales.shape[1]
    group = weight.group_size if all_groups > 1 else 1 << 30
    of_tile = max(_DEPTH // group, 1)
    rows, box = _DEPTH * weight.bits // 64, min(max(8, tiling.rows // 4), 32)
    qweight = weight.qweight.view(num_blocks, -1, 32)
    zeros = None if weight.zeros is None else weight.zeros.view(num_blocks, -1)
    _hopper_packed_linear[(-(-num_rows // tiling.rows), -(-num_blocks // (4 * tiling.stripes)), tiling.splits)](
        w_desc=_map(qweight, [4, rows, 32]),
        scale_desc=_map(weight.scales.view(num_blocks, -1), [4, 16 * of_tile]),
        zero_desc=None if zeros is None else _map(zeros, [8 if of_tile == 1 else 4, 16 * of_tile]),
        x_desc=tile_map(x, [box, _DEPTH]),
        bias_ptr=bias,
        out_desc=None if parts else tile_map(out, [box, result_columns(gated)]),
        out_ptr=out,
        magic=conversion(x.dtype, weight),
        num_rows=num_rows,
        num_out=num_out,
        ROWS=tiling.rows,
        STRIPES=tiling.stripes,
        TURNS=tiling.turns,
        TILES=tiling.tiles,
        STAGES=tiling.stages,
        GROUP=group,
        BITS=weight.bits,
        IS_E2M1=weight.is_e2m1,
        WORDS=words_layout(rows // 4),
        BY_GROUP=groups_layout(of_tile),
        GATED=gated,
        DIRECT=parts,
        HAS_BIAS=bias is not None,
        REGISTERS=168 if tiling.stripes * tiling.turns == 2 else 144,
        launch_pdl=True,
        num_warps=4,
    )
    return out


def _map(matrix: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Like `tile_map`, for quantized weights, scales and zeros."""
    dtypes = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int32: gl.int32, torch.uint8: gl.uint8}
    return TensorDescriptor.from_tensor(
        matrix, block, gl.NVMMASharedLayout.get_default_for(block, dtypes[matrix.dtype])
    )
