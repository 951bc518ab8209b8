"""Matrix products of 2 to 256 rows on Hopper: decode batches. Up to about 160 rows, reading the weight bounds them.

What a chain of such products waits for is not arithmetic but the start of each: launch, first bytes, then the sum. So

    copy engine    tiles travel to shared memory by themselves (TMA), several ahead of the tensor cores
    early weights  a program asks for its first weight tiles before the kernel in front of it has ended
                   (programmatic dependent launch): nobody writes weights. Only x must be waited for
    roles          one warp does nothing but start copies. Each of 1 to 3 groups of four warps multiplies 64 rows of the
                   weight, the left operand, by x^T, the right one. They meet at barriers, a tile at a time, so no group
                   waits for another, and three of them share what is copied of x
    epilogue       SiLU-and-multiply before the result is written: gate and up of an output meet in one thread, see
                   `gate_up_map`
    parts          (split K) a result with few columns would leave most multiprocessors idle, so several programs each
                   multiply a slice of the inputs for the same columns. They leave their partial sums side by side:
                   the norm that follows reads them all anyway

The definition is `linear_reference`. Written in Gluon, Triton's lower level, where buffers, barriers and copies have
names. `few_rows_linear` is the portable kernel for as many as 16 rows.

Sources: CUDA C++ Programming Guide, "Asynchronous Data Copies using the Tensor Memory Accelerator" and "Programmatic
Dependent Launch and Synchronization"; PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"; CUTLASS,
"Efficient GEMM in CUDA", "Warp Specialization".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from teachllm_kernels._hopper import barriers, copy_or_arrive, gate_up_map, has_hopper, tile_map
from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, gl, gluon, hopper
from teachllm_kernels.linear import cost

__all__ = ["MAX_ROWS", "cost", "has_hopper", "hopper_linear"]

MAX_ROWS = 256
_STRIPE = 64  # weight rows of a group of warps: as many as the tensor cores take at once
_PLACES = 132  # multiprocessors of an H200, or of the larger H100
_SHARED = 226 * 1024  # bytes of shared memory for a program
_SHARED_OF_TWO = 112 * 1024  # if there are more programs than places: two on a multiprocessor
_MAX_STAGES = 12
_SHORT = 1024  # inputs; a product so short is mostly start and end of its programs
_PARTS_WANTED = 128  # programs of a product in parts: nearly as many as there are places
_ONE_BLOCK = 192  # rows of x that one program can take; more are two blocks of 128
# Up to so many rows of x: rows of a program, further ones. Fewer of a narrow weight: where half of the places would be
# idle, and instead of more parts, all of which the next norm must read.
_FEW = ((8, 8, 0), (16, 16, 0), (32, 32, 0))
_MANY = ((160, 128, 32), (_ONE_BLOCK, 128, 64), (MAX_ROWS, 128, 0))
_SIZES = (*_FEW, (64, 64, 0), (96, 64, 32), (128, 128, 0), *_MANY)
_SIZES_OF_NARROW = (*_FEW, (64, 64, 0), (128, 64, 0), *_MANY)
_SIZES_OF_NARROW_PARTS = (*_FEW, (64, 32, 0), (_ONE_BLOCK, 64, 0), (MAX_ROWS, 128, 0))


@gluon.jit
def _fetch_weight(w_desc, w, arrived, stage, block, k, STRIPES: gl.constexpr, GATED: gl.constexpr):
    """Starts copying a program's weight rows, from column k on, to a stage."""
    BYTES: gl.constexpr = STRIPES * 64 * w.shape[len(w.shape) - 1] * w.dtype.primitive_bitwidth // 8
    hopper.mbarrier.expect(arrived.index(stage), BYTES)
    for i in gl.static_range(STRIPES):
        stripe = block * STRIPES + i
        to = w.index(stage * STRIPES + i)
        if GATED:
            hopper.tma.async_copy_global_to_shared(w_desc, [stripe * 4, 0, 0, k], arrived.index(stage), to)
        else:
            hopper.tma.async_copy_global_to_shared(w_desc, [stripe * 64, k], arrived.index(stage), to)


@gluon.jit
def _fetch_x(x_desc, x, arrived, stage, first_row, num_rows, k):
    """Starts copying x's columns from k on. In boxes, and only those with rows: to fill in others takes longer."""
    BOX: gl.constexpr = x_desc.block_shape[0]
    for box in gl.static_range(x.shape[1] // BOX):
        row = first_row + box * BOX
        to = x.index(stage).slice(box * BOX, BOX)
        copy_or_arrive(x_desc, row, k, arrived.index(stage), to, row, num_rows)


@gluon.jit
def _copy(
    w_desc, x_desc, buffers, task,
    TILES: gl.constexpr, STAGES: gl.constexpr, STRIPES: gl.constexpr, REST: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The copying warp: fills stages, each as soon as all groups are done with what it held.

    It alone waits for the kernel in front. The groups, which write the result, need no wait of their own: what they
    compute with was fetched behind this one.
    """
    w, x, rest, arrived, free = buffers
    first_row, num_rows, _, block, _, first_k = task
    ROWS: gl.constexpr = x.shape[1]
    BLOCK_K: gl.constexpr = x.shape[2]
    for i in gl.static_range(STAGES):
        _fetch_weight(w_desc, w, arrived, i, block, first_k + i * BLOCK_K, STRIPES, GATED)
    gdc_wait()
    for i in gl.static_range(STAGES):
        _fetch_x(x_desc, x, arrived, i, first_row, num_rows, first_k + i * BLOCK_K)
        if REST > 0:
            _fetch_x(x_desc, rest, arrived, i, first_row + ROWS, num_rows, first_k + i * BLOCK_K)
    for tile in range(STAGES, TILES):
        stage = tile % STAGES
        k = first_k + tile * BLOCK_K
        hopper.mbarrier.wait(free.index(stage), (tile // STAGES - 1) & 1)
        _fetch_weight(w_desc, w, arrived, stage, block, k, STRIPES, GATED)
        _fetch_x(x_desc, x, arrived, stage, first_row, num_rows, k)
        if REST > 0:
            _fetch_x(x_desc, rest, arrived, stage, first_row + ROWS, num_rows, k)


@gluon.jit
def _multiply(
    buffers, task, result,
    STRIPE: gl.constexpr, STRIPES: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, REST: gl.constexpr,
    GATED: gl.constexpr, DIRECT: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """A group of four warps: the product of one stripe of the weight, and what is made of it."""
    w, x, rest, arrived, free = buffers
    ROWS: gl.constexpr = x.shape[1]
    MORE: gl.constexpr = REST if REST > 0 else 8
    acc = gl.zeros([64, ROWS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    more = gl.zeros([64, MORE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE, 16]))
    for tile in range(TILES):
        stage = tile % STAGES
        hopper.mbarrier.wait(arrived.index(stage), tile // STAGES & 1)
        weight = w.index(stage * STRIPES + STRIPE).reshape([64, x.shape[2]])
        acc = hopper.warpgroup_mma(weight, x.index(stage).permute((1, 0)), acc, is_async=True)
        if REST > 0:
            more = hopper.warpgroup_mma(weight, rest.index(stage).permute((1, 0)), more, is_async=True)
            acc, more = hopper.warpgroup_mma_wait(2, [acc, more])  # of the tile before: these go on
        else:
            acc = hopper.warpgroup_mma_wait(1, [acc])
        if STAGES < TILES:
            hopper.mbarrier.arrive(free.index((tile + STAGES - 1) % STAGES), pred=tile > 0)
    if REST > 0:
        acc, more = hopper.warpgroup_mma_wait(0, [acc, more])
    else:
        acc = hopper.warpgroup_mma_wait(0, [acc])
    _finish(acc, task, result, 0, STRIPE, STRIPES, GATED, DIRECT, HAS_BIAS)
    if REST > 0:
        _finish(more, task, result, ROWS, STRIPE, STRIPES, GATED, DIRECT, HAS_BIAS)


@gluon.jit
def _finish(
    acc, task, result, BEFORE: gl.constexpr, STRIPE: gl.constexpr, STRIPES: gl.constexpr,
    GATED: gl.constexpr, DIRECT: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """From the product of a stripe with some rows of x to the result. BEFORE: rows that are another product's."""
    first_row, num_rows, num_out, block, split, _ = task
    bias, staged, out_desc, out = result
    stripe = block * STRIPES + STRIPE
    ROWS: gl.constexpr = acc.shape[1]
    if HAS_BIAS:
        row = gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
        is_up = 0
        if GATED:  # rows of gate and up in turns, eight of each
            is_up = row // 8 % 2
            row = row // 16 * 8 + row % 8
        column = stripe * (32 if GATED else 64) + row
        has_bias = (column < num_out) & (split == 0)
        acc += gl.load(bias + is_up * num_out + column, has_bias, 0.0).to(gl.float32)[:, None]
    y = acc
    if GATED:
        gate, up = gl.split(acc.reshape([4, 2, 8, ROWS]).permute((0, 2, 3, 1)))
        y = (gate / (1.0 + gl.exp(-gate)) * up).reshape([32, ROWS])
    COLUMNS: gl.constexpr = y.shape[0]
    if DIRECT:
        n = stripe * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, y.type.layout))
        m = first_row + BEFORE + gl.arange(0, ROWS, gl.SliceLayout(0, y.type.layout))
        at = (split * num_rows + m)[None, :] * num_out + n[:, None]
        is_mine = (m < num_rows)[None, :] & (n < num_out)[:, None]
        gl.store(out + at, y.to(out.dtype.element_ty), is_mine, eviction_policy="evict_last")  # see `rms_norm.py`
    else:
        BOX: gl.constexpr = out_desc.block_shape[0]
        mine = staged.index(STRIPE).slice(0, ROWS)
        mine.permute((1, 0)).store(y.to(out_desc.dtype))
        hopper.fence_async_shared()
        for box in gl.static_range(ROWS // BOX):
            row = first_row + BEFORE + box * BOX
            if row < num_rows:
                from_box = mine.slice(box * BOX, BOX)
                hopper.tma.async_copy_shared_to_global(out_desc, [row, stripe * COLUMNS], from_box)
        hopper.tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])  # which differs from batch to batch
def _hopper_linear(
    w_desc, x_desc, bias, out_desc, out, num_rows, num_out,
    ROWS: gl.constexpr, REST: gl.constexpr, STRIPES: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, DIRECT: gl.constexpr, HAS_BIAS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    first_row, block, split = gl.program_id(0) * (ROWS + REST), gl.program_id(1), gl.program_id(2)
    dtype: gl.constexpr = x_desc.dtype
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    BOX: gl.constexpr = x_desc.block_shape[0]
    w = gl.allocate_shared_memory(dtype, [STAGES * STRIPES] + w_desc.block_shape, w_desc.layout)  # noqa: RUF005
    x = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_K], x_desc.layout)
    rest = x
    if REST > 0:  # a buffer's rows are a power of two
        rest = gl.allocate_shared_memory(dtype, [STAGES, REST, BLOCK_K], x_desc.layout)
    arrived, free = barriers(STAGES, 1 + (ROWS + REST) // BOX), barriers(STAGES, STRIPES)
    staged = w  # not used
    if not DIRECT:
        staged = gl.allocate_shared_memory(dtype, [STRIPES, ROWS, out_desc.block_shape[1]], out_desc.layout)
    buffers = (w, x, rest, arrived, free)
    task = (first_row, num_rows, num_out, block, split, split * TILES * BLOCK_K)
    result = (bias, staged, out_desc, out)
    if STRIPES == 1:
        gl.warp_specialize([
            (_multiply, (buffers, task, result, 0, STRIPES, TILES, STAGES, REST, GATED, DIRECT, HAS_BIAS)),
            (_copy, (w_desc, x_desc, buffers, task, TILES, STAGES, STRIPES, REST, GATED)),
        ], [1], [72])  # fmt: skip
    elif STRIPES == 2:
        gl.warp_specialize([
            (_multiply, (buffers, task, result, 0, STRIPES, TILES, STAGES, REST, GATED, DIRECT, HAS_BIAS)),
            (_multiply, (buffers, task, result, 1, STRIPES, TILES, STAGES, REST, GATED, DIRECT, HAS_BIAS)),
            (_copy, (w_desc, x_desc, buffers, task, TILES, STAGES, STRIPES, REST, GATED)),
        ], [4, 1], [168, 72])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (buffers, task, result, 0, STRIPES, TILES, STAGES, REST, GATED, DIRECT, HAS_BIAS)),
            (_multiply, (buffers, task, result, 1, STRIPES, TILES, STAGES, REST, GATED, DIRECT, HAS_BIAS)),
            (_multiply, (buffers, task, result, 2, STRIPES, TILES, STAGES, REST, GATED, DIRECT, HAS_BIAS)),
            (_copy, (w_desc, x_desc, buffers, task, TILES, STAGES, STRIPES, REST, GATED)),
        ], [4, 4, 1], [144, 144, 72])  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How a product is divided.

    Attributes:
        rows: of x, of a program: a power of two.
        rest: further ones.
        box: rows that are copied at once.
        stripes: of 64 weight rows, of a program.
        splits: slices of the inputs (split K), a program each, whose partial sums make the result.
        block_k: columns of a tile.
        tiles: of a program.
        stages: tiles that are under way or in use.
        direct: threads write the result themselves; otherwise the copy engine does, from shared memory.
    """

    rows: int
    rest: int
    box: int
    stripes: int
    splits: int
    block_k: int
    tiles: int
    stages: int
    direct: bool


def _columns(gated: bool) -> int:
    """Of the result, that a stripe of the weight makes."""
    return _STRIPE // 2 if gated else _STRIPE


def _rows_of_a_program(num_rows: int, all_stripes: int, parts: bool) -> tuple[int, int]:
    """Rows of x that a program takes: (a power of two, further ones, which are a second product)."""
    sizes: tuple[tuple[int, int, int], ...] = _SIZES
    if parts and 4 * all_stripes <= _PLACES:
        sizes = _SIZES_OF_NARROW_PARTS
    elif not parts and 2 * all_stripes <= _PLACES:
        sizes = _SIZES_OF_NARROW
    return next((rows, rest) for most, rows, rest in sizes if num_rows <= most)


def _tiling(num_rows: int, num_in: int, num_weight_rows: int, gated: bool, parts: bool) -> _Tiling:
    """A program takes all rows of x that it can, fewer where places would be idle, and the stripes that end first.

    Of parts it takes one stripe, or two of a wide weight for two blocks of rows, in as many slices as fill the places.
    Stages take what shared memory is left, or of half of it where two programs fit. Measured, see benchmarks/NOTES.md.
    """
    all_stripes = -(-num_weight_rows // _STRIPE)
    rows, rest = _rows_of_a_program(num_rows, all_stripes, parts)
    row_blocks = -(-num_rows // (rows + rest))
    block_k = 128 if rows <= 64 else 64

    def waves(stripes: int) -> int:
        return -(-(-(-all_stripes // stripes) * row_blocks) // _PLACES)

    if parts:
        stripes = 2 if num_rows > _ONE_BLOCK and 4 * all_stripes > _PLACES else 1
    else:  # of those that take as long, few long programs; or if they are short, many: their starts and ends overlap
        overlap = -1 if num_in <= _SHORT else 1
        stripes = min((1, 2, 3), key=lambda count: (waves(count) * count, waves(count) * overlap))
    blocks = -(-all_stripes // stripes) * row_blocks
    tiles = -(-num_in // block_k)
    splits = max(min(_PARTS_WANTED // blocks, tiles), 1) if parts else 1
    tiles = -(-tiles // splits)
    splits = -(-num_in // (block_k * tiles))
    direct = parts or (gated and rest > 0)  # parts are too large to be staged, the other leaves no room
    staged = 0 if direct else stripes * rows * _columns(gated) * 2
    stage = (_STRIPE * stripes + rows + rest) * block_k * 2
    room = _SHARED
    if blocks * splits > _PLACES and _SHARED_OF_TWO - staged >= 3 * stage:
        room = _SHARED_OF_TWO
    stages = min(tiles, (room - staged) // stage, _MAX_STAGES)
    box = min(max(8, rows // 4), 32)
    return _Tiling(rows, rest, box, stripes, splits, block_k, tiles, stages, direct)


def hopper_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False, parts: bool = False
) -> torch.Tensor:
    """x W^T + b in the tensor cores, accumulated in float32.

    Args:
        x: [num_rows, num_in], contiguous, 2-byte numbers; at most `MAX_ROWS` rows; `num_in` a multiple of 8.
        weight: [num_out, num_in], contiguous; if `gated`, [2 * num_out, num_in]: gate above up. `num_out` is a multiple
            of 8.
        bias: [num_out], or [2 * num_out].
        gated: the result is silu(gate) * up.
        parts: the result may be left as parts to be added, float32; not of a gated one, which needs its sums whole.

    Returns:
        [num_rows, num_out]; with `parts`, [num_parts, num_rows, num_out] float32.
    """
    (num_rows, num_in), num_out = x.shape, weight.shape[0] // (2 if gated else 1)
    assert num_rows <= MAX_ROWS and not (gated and parts)
    tiling = _tiling(num_rows, num_in, weight.shape[0], gated, parts)
    shape = (tiling.splits, num_rows, num_out) if parts else (num_rows, num_out)
    out = torch.empty(shape, dtype=torch.float32 if parts else x.dtype, device=x.device)
    blocks = -(-weight.shape[0] // (_STRIPE * tiling.stripes))
    _hopper_linear[(-(-num_rows // (tiling.rows + tiling.rest)), blocks, tiling.splits)](
        (gate_up_map(weight, _STRIPE, tiling.block_k) if gated else tile_map(weight, [_STRIPE, tiling.block_k])),
        tile_map(x, [tiling.box, tiling.block_k]),
        bias,
        None if tiling.direct else tile_map(out, [tiling.box, _columns(gated)]),
        *(out, num_rows, num_out),
        ROWS=tiling.rows,
        REST=tiling.rest,
        STRIPES=tiling.stripes,
        TILES=tiling.tiles,
        STAGES=tiling.stages,
        GATED=gated,
        DIRECT=tiling.direct,
        HAS_BIAS=bias is not None,
        launch_pdl=True,
        num_warps=4,
        **_registers(tiling),
    )
    return out


def _registers(tiling: _Tiling) -> dict[str, int]:
    """At most so many a thread that programs of the next kernel find room beside the last ones of this one."""
    if tiling.stripes > 1:
        return {}
    return {"maxnreg": 96 if tiling.rows <= 32 else 128 if tiling.rows + tiling.rest <= 128 else 168}
