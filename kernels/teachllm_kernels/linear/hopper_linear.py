"""Matrix products of 2 to 256 rows on Hopper: decode batches. Up to about 160 rows, reading the weight bounds them.

A chain of such products does not wait for arithmetic but for the start of each: launch, first bytes, then the sum. So

    copy engine    tiles travel to shared memory by themselves (TMA), several tiles ahead of the tensor cores
    early weights  a program loads its first weight tiles before the previous kernel has ended (programmatic dependent
                   launch): no kernel writes weights. Only x must be waited for
    roles          one warp only starts copies. Each of 1 to 3 groups of four warps multiplies 64 rows of the weight,
                   the left operand, by x^T, the right one. They meet at barriers, one tile at a time, so no group waits
                   for another, and three groups share the copies of x
    epilogue       SiLU-and-multiply happens before the result is written: gate and up of an output meet in one thread,
                   see `gate_up_map`
    parts          (split K) a result with few columns would leave most multiprocessors idle, so several programs each
                   multiply a slice of the inputs for the same columns. They leave their partial sums side by side: the
                   norm that follows reads them all anyway
    8 bits         quantized operands are multiplied as they are, in tiles of as many bytes; the epilogue applies the
                   scales of rows and columns. Group and block scales are applied per tile, see `hopper_blocks.py`

The definition is `linear_reference`, for quantized operands `scaled_linear_reference`. The kernel is written in Gluon,
Triton's lower level, where buffers, barriers and copies have names. The portable kernels are `skinny_gemm`, up to
16 rows, and `scaled_linear`.

Sources: CUDA C++ Programming Guide, "Asynchronous Data Copies using the Tensor Memory Accelerator" and "Programmatic
Dependent Launch and Synchronization"; PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"; CUTLASS,
"Efficient GEMM in CUDA", "Warp Specialization".
"""

from __future__ import annotations

import torch

from teachllm_kernels._hopper import barriers, copy_or_arrive, gate_up_map, has_hopper, tile_map
from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, gl, gluon, hopper
from teachllm_kernels.linear.dense_gemm import cost
from teachllm_kernels.linear.hopper_sums import sums, sums_by_tile
from teachllm_kernels.linear.hopper_tiling import MAX_ROWS, STRIPE, registers, result_columns, tiling_of
from teachllm_kernels.linear.scaled.hopper_blocks import (
    COPIERS,
    fetch_scales_of_two,
    has_blocks,
    room_for_scales,
    sums_of_few_rows,
)
from teachllm_kernels.quantize_rows import QuantizedRows

__all__ = ["MAX_ROWS", "cost", "has_hopper", "hopper_linear", "hopper_scaled_linear"]


@gluon.jit
def _fetch_weight(w_desc, w, arrived, stage, block, k, STRIPES: gl.constexpr, GATED: gl.constexpr):
    """Start copying a program's weight rows, from column k on, to a stage."""
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
def fetch_x(x_desc, x, arrived, stage, first_row, num_rows, k):
    """Start copying x's columns from k on, in boxes, and only boxes with rows: filling in the others takes
    longer.
    """
    BOX: gl.constexpr = x_desc.block_shape[0]
    for box in gl.static_range(x.shape[1] // BOX):
        row = first_row + box * BOX
        to = x.index(stage).slice(box * BOX, BOX)
        copy_or_arrive(x_desc, row, k, arrived.index(stage), to, row, num_rows)


@gluon.jit
def _copy(
    w_desc, x_desc, x_scales_ptr,
    buffers, task,
    TILES: gl.constexpr, STAGES: gl.constexpr, STRIPES: gl.constexpr, REST: gl.constexpr, GROUPS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """The copying warp: it fills stages, each as soon as all groups are done with its old content.

    Only this warp waits for the previous kernel. The groups, which write the result, need no wait of their own: what
    they compute with was fetched after this one.
    """
    w, x, rest, of_rows, arrived, free = buffers
    first_row, num_rows, _, block, _, first_k = task
    ROWS: gl.constexpr = x.shape[1]
    BLOCK_K: gl.constexpr = x.shape[2]
    for i in gl.static_range(STAGES):
        _fetch_weight(w_desc, w, arrived, i, block, first_k + i * BLOCK_K, STRIPES, GATED)
    gdc_wait()
    for i in gl.static_range(STAGES):
        fetch_x(x_desc, x, arrived, i, first_row, num_rows, first_k + i * BLOCK_K)
        if REST > 0:
            fetch_x(x_desc, rest, arrived, i, first_row + ROWS, num_rows, first_k + i * BLOCK_K)
        if GROUPS > 0:
            k = first_k + i * BLOCK_K
            fetch_scales_of_two(x_scales_ptr, of_rows, arrived, i, first_row, num_rows, k, REST, GROUPS)
    for tile in range(STAGES, TILES):
        stage = tile % STAGES
        k = first_k + tile * BLOCK_K
        hopper.mbarrier.wait(free.index(stage), (tile // STAGES - 1) & 1)
        _fetch_weight(w_desc, w, arrived, stage, block, k, STRIPES, GATED)
        fetch_x(x_desc, x, arrived, stage, first_row, num_rows, k)
        if REST > 0:
            fetch_x(x_desc, rest, arrived, stage, first_row + ROWS, num_rows, k)
        if GROUPS > 0:
            fetch_scales_of_two(x_scales_ptr, of_rows, arrived, stage, first_row, num_rows, k, REST, GROUPS)


@gluon.jit
def _multiply(
    buffers, task, result,
    STRIPE: gl.constexpr, STRIPES: gl.constexpr, TILES: gl.constexpr, REST: gl.constexpr, GROUPS: gl.constexpr,
    GATED: gl.constexpr, DIRECT: gl.constexpr, HAS_BIAS: gl.constexpr, BY_OUTPUT: gl.constexpr,
):  # fmt: skip
    """A group of four warps: it computes the product of one stripe of the weight, and the epilogue."""
    _, x, _, _, arrived, _ = buffers
    ROWS: gl.constexpr = x.shape[1]
    MORE: gl.constexpr = REST if REST > 0 else 8
    ROOMY: gl.constexpr = ROWS <= 64 and REST == 0  # the registers have room for more than the sums
    SCALED: gl.constexpr = x.dtype.primitive_bitwidth == 8 and GROUPS == 0
    SUMS: gl.constexpr = gl.int32 if x.dtype.is_int() else gl.float32
    DEPTH: gl.constexpr = 256 // x.dtype.primitive_bitwidth
    OF_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, DEPTH])
    OF_MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE, DEPTH])
    acc = gl.zeros([64, ROWS], SUMS, OF_ACC)
    more = gl.zeros([64, MORE], SUMS, OF_MORE)
    of_outputs, of_rows = 1.0, 1.0
    if SCALED:
        of_outputs = _output_scales(task, result, STRIPE, STRIPES, GATED, BY_OUTPUT, OF_ACC)
        if ROOMY:
            hopper.mbarrier.wait(arrived.index(0), 0)  # then the previous kernel has ended
            of_rows = _row_scales(task, result, 0, ROWS, OF_ACC)
    if GROUPS > 0:
        _, _, num_out, block, _, first_k = task
        _, _, scales_ptr, _, _, _ = result
        where = ((block * STRIPES + STRIPE) * (32 if GATED else 64), num_out, first_k)
        acc, more = sums_of_few_rows(acc, more, buffers, scales_ptr, where, STRIPE, STRIPES, TILES, REST, GROUPS, GATED)
    elif ROOMY and x.dtype.is_fp8():
        acc = sums_by_tile(acc, buffers, STRIPE, STRIPES, TILES)
    else:
        acc, more = sums(acc, more, buffers, STRIPE, STRIPES, TILES, REST)
    if SCALED:
        if not ROOMY:
            of_rows = _row_scales(task, result, 0, ROWS, OF_ACC)
        acc = acc.to(gl.float32) * of_rows * of_outputs
    finish(acc, task, result, 0, STRIPE, STRIPES, GATED, DIRECT, HAS_BIAS)
    if REST > 0:
        if SCALED:
            of_rows = _row_scales(task, result, ROWS, MORE, OF_MORE)
            of_outputs = _output_scales(task, result, STRIPE, STRIPES, GATED, BY_OUTPUT, OF_MORE)
            more = more.to(gl.float32) * of_rows * of_outputs
        finish(more, task, result, ROWS, STRIPE, STRIPES, GATED, DIRECT, HAS_BIAS)


@gluon.jit
def _outputs(stripe, num_out, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the outputs of a stripe, [64], as biases and scales are numbered, and whether they exist."""
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    is_up = 0
    if GATED:  # rows of gate and up in turns, eight of each
        is_up = row // 8 % 2
        row = row // 16 * 8 + row % 8
    column = stripe * (32 if GATED else 64) + row
    return is_up * num_out + column, column < num_out


@gluon.jit
def _output_scales(
    task, result,
    STRIPE: gl.constexpr, STRIPES: gl.constexpr, GATED: gl.constexpr, BY_OUTPUT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the scales of the weight's rows, [64, 1], or the single scale."""
    _, _, num_out, block, _, _ = task
    _, _, scales_ptr, _, _, _ = result
    found = gl.load(scales_ptr)
    if BY_OUTPUT:
        output, is_output = _outputs(block * STRIPES + STRIPE, num_out, GATED, LAYOUT)
        found = gl.load(scales_ptr + output, is_output, 0.0)[:, None]
    return found


@gluon.jit
def _row_scales(task, result, BEFORE: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the scales of x's rows, [1, ROWS], past the L1 cache: this warp has not waited for their writer.

    All programs want the same few at once, and the L2 cache answers one request after the other: every warp loads all
    of them once, and its threads exchange them. One load per thread takes longer than a tenth of the product.
    """
    first_row, num_rows, _, _, _, _ = task
    _, x_scales_ptr, _, _, _, _ = result
    OF_WARP: gl.constexpr = gl.BlockedLayout([max(ROWS // 32, 1)], [32], [4], [0])
    m = first_row + BEFORE + gl.arange(0, ROWS, OF_WARP)
    found = gl.load(x_scales_ptr + m, m < num_rows, 0.0, cache_modifier=".cg")
    return gl.convert_layout(found, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def finish(
    acc, task, result,
    BEFORE: gl.constexpr, STRIPE: gl.constexpr, STRIPES: gl.constexpr, GATED: gl.constexpr, DIRECT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Turn the product of a stripe with some rows of x into the result. BEFORE: rows of another product."""
    first_row, num_rows, num_out, block, split, _ = task
    bias_ptr, _, _, staged, out_desc, out_ptr = result
    stripe = block * STRIPES + STRIPE
    ROWS: gl.constexpr = acc.shape[1]
    if HAS_BIAS:
        LAYOUT: gl.constexpr = acc.type.layout
        output, is_output = _outputs(stripe, num_out, GATED, LAYOUT)
        acc += gl.load(bias_ptr + output, is_output & (split == 0), 0.0).to(gl.float32)[:, None]
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
        gl.store(
            out_ptr + at, y.to(out_ptr.dtype.element_ty), is_mine, eviction_policy="evict_last"
        )  # see `rms_norm.py`
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


@gluon.jit(do_not_specialize=["num_rows"])  # it differs from batch to batch
def _hopper_linear(
    w_desc, x_desc, bias_ptr, x_scales_ptr, scales_ptr, out_desc, out_ptr,
    num_rows, num_out,
    ROWS: gl.constexpr, REST: gl.constexpr, STRIPES: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, GATED: gl.constexpr, DIRECT: gl.constexpr, HAS_BIAS: gl.constexpr, BY_OUTPUT: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    first_row, block, split = gl.program_id(0) * (ROWS + REST), gl.program_id(1), gl.program_id(2)
    DTYPE: gl.constexpr = x_desc.dtype
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    BOX: gl.constexpr = x_desc.block_shape[0]
    w = gl.allocate_shared_memory(DTYPE, [STAGES * STRIPES] + w_desc.block_shape, w_desc.layout)  # noqa: RUF005
    x = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, BLOCK_K], x_desc.layout)
    rest = x  # not used, like other buffers below
    if REST > 0:  # a buffer's rows are a power of two
        rest = gl.allocate_shared_memory(DTYPE, [STAGES, REST, BLOCK_K], x_desc.layout)
    of_rows = x
    if GROUPS > 0:
        of_rows = room_for_scales(STAGES * 2, ROWS)
    staged = w
    if not DIRECT:
        staged = gl.allocate_shared_memory(out_desc.dtype, [STRIPES, ROWS, out_desc.block_shape[1]], out_desc.layout)
    # Allocated last, so that their memory is theirs alone. No barrier without a waiting role, see `barriers`.
    arrived = barriers(STAGES, 1 + (ROWS + REST) // BOX + (COPIERS if GROUPS > 0 else 0))
    free = arrived
    if STAGES < TILES:
        free = barriers(STAGES, STRIPES)
    buffers = (w, x, rest, of_rows, arrived, free)
    task = (first_row, num_rows, num_out, block, split, split * TILES * BLOCK_K)
    result = (bias_ptr, x_scales_ptr, scales_ptr, staged, out_desc, out_ptr)
    if STRIPES == 1:
        gl.warp_specialize([
            (_multiply, (buffers, task, result, 0, STRIPES, TILES, REST, GROUPS, GATED, DIRECT, HAS_BIAS, BY_OUTPUT)),
            (_copy, (w_desc, x_desc, x_scales_ptr, buffers, task, TILES, STAGES, STRIPES, REST, GROUPS, GATED)),
        ], [1], [72])  # fmt: skip
    elif STRIPES == 2:
        gl.warp_specialize([
            (_multiply, (buffers, task, result, 0, STRIPES, TILES, REST, GROUPS, GATED, DIRECT, HAS_BIAS, BY_OUTPUT)),
            (_multiply, (buffers, task, result, 1, STRIPES, TILES, REST, GROUPS, GATED, DIRECT, HAS_BIAS, BY_OUTPUT)),
            (_copy, (w_desc, x_desc, x_scales_ptr, buffers, task, TILES, STAGES, STRIPES, REST, GROUPS, GATED)),
        ], [4, 1], [168, 72])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (buffers, task, result, 0, STRIPES, TILES, REST, GROUPS, GATED, DIRECT, HAS_BIAS, BY_OUTPUT)),
            (_multiply, (buffers, task, result, 1, STRIPES, TILES, REST, GROUPS, GATED, DIRECT, HAS_BIAS, BY_OUTPUT)),
            (_multiply, (buffers, task, result, 2, STRIPES, TILES, REST, GROUPS, GATED, DIRECT, HAS_BIAS, BY_OUTPUT)),
            (_copy, (w_desc, x_desc, x_scales_ptr, buffers, task, TILES, STAGES, STRIPES, REST, GROUPS, GATED)),
        ], [4, 4, 1], [144, 144, 72])  # fmt: skip


def hopper_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False, parts: bool = False
) -> torch.Tensor:
    """Return x W^T + b, computed by the tensor cores and accumulated in float32.

    Args:
        x: [num_rows, num_in], contiguous, 2-byte floats; at most `MAX_ROWS` rows; `num_in` a multiple of 8.
        weight: [num_out, num_in], contiguous; if `gated`, [2 * num_out, num_in]: gate above up. `num_out` is a multiple
            of 8.
        bias: [num_out], or [2 * num_out].
        gated: the result is silu(gate) * up.
        parts: the result may be left as float32 parts to be added; not if gated, which needs whole sums.

    Returns:
        [num_rows, num_out]; with `parts`, [num_parts, num_rows, num_out] float32.
    """
    return _launch(x, weight, bias, gated, parts, x.dtype)


def hopper_scaled_linear(
    x: QuantizedRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    parts: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Compute `scaled_linear_reference` like `hopper_linear`, for quantized operands. Integers accumulate in int32.

    Args:
        x: at most `MAX_ROWS` rows, with one scale per row or per group of inputs; `num_in` a multiple of 16.
        weight: quantized, of x's dtype.
        scales: [num_out, 1] (gated: [2 * num_out, 1]) or [1, 1] float32; for 8-bit floats also block scales. Blocks do
            not reach from gate to up: `num_out` is a multiple of 128.
        dtype: dtype of a result that is not in parts, 2 bytes.
    """
    num_groups = scales.shape[1] if has_blocks(x, weight, scales, gated) else 0
    return _launch(x.values, weight, bias, gated, parts, dtype, x.scales, scales, num_groups)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    parts: bool,
    dtype: torch.dtype,
    x_scales: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    num_groups: int = 0,
) -> torch.Tensor:
    (num_rows, num_in), num_out = x.shape, weight.shape[0] // (2 if gated else 1)
    assert num_rows <= MAX_ROWS and not (gated and parts)
    tiling = tiling_of(num_rows, num_in, weight.shape[0], gated, parts, x.element_size(), num_groups > 0)
    shape = (tiling.splits, num_rows, num_out) if parts else (num_rows, num_out)
    out = torch.empty(shape, dtype=torch.float32 if parts else dtype, device=x.device)
    blocks = -(-weight.shape[0] // (STRIPE * tiling.stripes))
    _hopper_linear[(-(-num_rows // (tiling.rows + tiling.rest)), blocks, tiling.splits)](
        w_desc=gate_up_map(weight, STRIPE, tiling.block_k) if gated else tile_map(weight, [STRIPE, tiling.block_k]),
        x_desc=tile_map(x, [tiling.box, tiling.block_k]),
        bias_ptr=bias,
        x_scales_ptr=x_scales,
        scales_ptr=scales,
        out_desc=None if tiling.direct else tile_map(out, [tiling.box, result_columns(gated)]),
        out_ptr=out,
        num_rows=num_rows,
        num_out=num_out,
        ROWS=tiling.rows,
        REST=tiling.rest,
        STRIPES=tiling.stripes,
        TILES=tiling.tiles,
        STAGES=tiling.stages,
        GROUPS=num_groups,
        GATED=gated,
        DIRECT=tiling.direct,
        HAS_BIAS=bias is not None,
        BY_OUTPUT=scales is not None and scales.numel() > 1 and not num_groups,
        launch_pdl=True,
        num_warps=4,
        **registers(tiling),
    )
    return out
