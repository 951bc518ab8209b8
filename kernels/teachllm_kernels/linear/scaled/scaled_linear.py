"""Matrix products of 8-bit operands on any card that multiplies them, with any number of rows and any scales.

`scaled_reference.py` defines them. This is the portable kernel, built like `skinny_gemm.py`: the weight is the left
operand, so that its rows fill the tensor cores, and x may have as few rows as it likes; programs share a narrow
result of few rows (split K). On Hopper `hopper_linear.py` serves up to 256 rows, `hopper_scaled_mm.py` more.

Cards before compute capability 8.9 have no e4m3. There only the weight is quantized (`weight_only_triton`): x stays as
it is, and each tile of the weight is dequantized to x's dtype on its way to the tensor cores.

Sources: those of `scaled_reference.py`; Osama et al., "Stream-K", PPoPP 2023.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, shared_memory, tl, triton
from teachllm_kernels.attention.kv_quantization import dequantize_unscaled
from teachllm_kernels.first_launch import kept
from teachllm_kernels.linear.scaled.scaled_reference import cost, scale_kind
from teachllm_kernels.quantize_rows import GROUP, QuantizedRows

__all__ = ["cost", "scaled_linear_triton", "weight_only_triton"]

_SPLIT_ROWS = 16  # up to this many rows of x, programs share the columns of a narrow result
_BLOCKS_WANTED = 64  # programs of such a product; more programs, with less in flight each, read no faster
_FIXED_ROWS = 64  # rows of x for which tiles are chosen if they may not depend on the number of rows
_SIDE_BY_SIDE = 8  # blocks of rows that run at once, so that they read the same part of the weight
_GROUP = tl.constexpr(GROUP)


@triton.jit
def _add_product(acc, w, x_t, scale_w, scale_x, BY_BLOCK: tl.constexpr, WEIGHT_ONLY: tl.constexpr):
    """Return acc + w x^T of one tile. scale_w scales a weight dequantized here; with BY_BLOCK so does scale_x."""
    if WEIGHT_ONLY:
        acc = tl.dot((dequantize_unscaled(w, tl.float32) * scale_w).to(x_t.dtype), x_t, acc, input_precision="ieee")
    elif BY_BLOCK:
        acc += tl.dot(w, x_t, out_dtype=tl.int32 if w.dtype.is_int() else tl.float32) * (scale_w * scale_x)[None, :]
    else:
        acc = tl.dot(w, x_t, acc, out_dtype=acc.dtype, max_num_imprecise_acc=32)  # Hopper accumulates fp8 in 14 bits
    return acc


@triton.jit
def _at_output(values_ptr, n, is_n, BY_OUTPUT: tl.constexpr):
    """Return the values of the outputs n, [BLOCK_N, 1], or the single value."""
    return tl.load(values_ptr + n, mask=is_n, other=0.0).to(tl.float32)[:, None] if BY_OUTPUT else tl.load(values_ptr)


@triton.jit(do_not_specialize=["num_rows"])  # it differs from batch to batch
def _scaled_linear(
    x_ptr, weight_ptr, x_scales_ptr, scales_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    num_rows, num_out,
    NUM_IN: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr, SIDE_BY_SIDE: tl.constexpr, BY_OUTPUT: tl.constexpr,
    BY_BLOCK: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    WEIGHT_ONLY: tl.constexpr = x_scales_ptr is None
    SUMS: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty.is_int() and not BY_BLOCK else tl.float32
    num_m, num_n = tl.cdiv(num_rows, ROWS), tl.cdiv(num_out, BLOCK_N)
    program, split = tl.program_id(0), tl.program_id(1)
    block_m, block = tl.swizzle2d(program // num_n, program % num_n, num_m, num_n, SIDE_BY_SIDE)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = block_m * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    is_n, is_m = n < num_out, m < num_rows
    w_row_ptrs = weight_ptr + n.to(tl.int64)[:, None] * NUM_IN
    x_row_ptrs = x_ptr + m.to(tl.int64)[None, :] * NUM_IN
    up = num_out.to(tl.int64) * NUM_IN
    acc = tl.zeros([BLOCK_N, ROWS], SUMS)
    acc_up = tl.zeros([BLOCK_N, ROWS], SUMS)

    first, end = split * SPAN, split * SPAN + SPAN
    scale_x, scale_w, scale_w_up = 1.0, 1.0, 1.0
    GROUPS: tl.constexpr = (NUM_IN + _GROUP - 1) // _GROUP
    block_scale_ptr = scales_ptr + block * BLOCK_N // _GROUP * GROUPS
    up_scale_ptr = scales_ptr + (num_out + block * BLOCK_N) // _GROUP * GROUPS
    if BY_BLOCK:  # a tile ahead of their use
        is_group = first < NUM_IN
        scale_w = tl.load(block_scale_ptr + first // _GROUP, mask=is_group, other=0.0)
        if GATED:
            scale_w_up = tl.load(up_scale_ptr + first // _GROUP, mask=is_group, other=0.0)
        if not WEIGHT_ONLY:
            scale_x = tl.load(x_scales_ptr + first // _GROUP * num_rows + m, mask=is_m & is_group, other=0.0)
    elif WEIGHT_ONLY:
        scale_w = _at_output(scales_ptr, n, is_n, BY_OUTPUT)
        if GATED:
            scale_w_up = _at_output(scales_ptr + (num_out if BY_OUTPUT else 0), n, is_n, BY_OUTPUT)
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        column = start + k
        is_w, is_x = is_n[:, None], is_m[None, :]
        if SPAN * SPLITS != NUM_IN:
            is_w, is_x = is_w & (column < NUM_IN)[None, :], is_x & (column < NUM_IN)[:, None]
        x_t = tl.load(x_row_ptrs + column[:, None], mask=is_x, other=0.0)
        w = tl.load(w_row_ptrs + column[None, :], mask=is_w, other=0.0)
        next_w, next_w_up, next_x = scale_w, scale_w_up, scale_x
        if BY_BLOCK:
            group = (start + BLOCK_K) // _GROUP
            is_group = start + BLOCK_K < NUM_IN
            next_w = tl.load(block_scale_ptr + group, mask=is_group, other=0.0)
            if GATED:
                next_w_up = tl.load(up_scale_ptr + group, mask=is_group, other=0.0)
            if not WEIGHT_ONLY:
                next_x = tl.load(x_scales_ptr + group * num_rows + m, mask=is_m & is_group, other=0.0)
        acc = _add_product(acc, w, x_t, scale_w, scale_x, BY_BLOCK, WEIGHT_ONLY)
        if GATED:
            w_up = tl.load(w_row_ptrs + up + column[None, :], mask=is_w, other=0.0)
            acc_up = _add_product(acc_up, w_up, x_t, scale_w_up, scale_x, BY_BLOCK, WEIGHT_ONLY)
        scale_w, scale_w_up, scale_x = next_w, next_w_up, next_x

    at = m.to(tl.int64)[None, :] * num_out + n[:, None]  # in a result [num_rows, num_out]
    inside = is_n[:, None] & is_m[None, :]
    is_last = True
    if SPLITS > 1:
        size = num_rows * num_out
        tl.store(partial_ptr + split * size + at, acc, mask=inside)
        if GATED:
            tl.store(partial_ptr + (SPLITS + split) * size + at, acc_up, mask=inside)
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        is_last = tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.store(arrived_ptr + block, 0)
            acc = tl.zeros([BLOCK_N, ROWS], SUMS)
            acc_up = tl.zeros([BLOCK_N, ROWS], SUMS)
            for part in tl.static_range(SPLITS):  # past the L1 cache, which may hold older values
                acc += tl.load(partial_ptr + part * size + at, mask=inside, other=0.0, cache_modifier=".cg")
                if GATED:
                    other_half_ptrs = partial_ptr + (SPLITS + part) * size + at
                    acc_up += tl.load(other_half_ptrs, mask=inside, other=0.0, cache_modifier=".cg")
    if is_last:
        y, y_up = acc.to(tl.float32), acc_up.to(tl.float32)
        if not BY_BLOCK and not WEIGHT_ONLY:
            of_rows = tl.load(x_scales_ptr + m, mask=is_m, other=0.0)[None, :]
            y = y * of_rows * _at_output(scales_ptr, n, is_n, BY_OUTPUT)
            if GATED:
                y_up = y_up * of_rows * _at_output(scales_ptr + (num_out if BY_OUTPUT else 0), n, is_n, BY_OUTPUT)
        if HAS_BIAS:
            y += _at_output(bias_ptr, n, is_n, True)
        if GATED:
            if HAS_BIAS:
                y_up += _at_output(bias_ptr + num_out, n, is_n, True)
            y = y * tl.sigmoid(y) * y_up
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def scaled_linear_triton(
    x: QuantizedRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    is_fixed: bool = False,
) -> torch.Tensor:
    """Compute `scaled_linear_reference`, accumulating e4m3 in float32.

    Launches on one device must follow each other: they share the arrival counters. Blocks of a gated weight must not
    reach from gate to up: its outputs are a multiple of 128.

    Args:
        is_fixed: a row of the result does not depend, by one bit, on the number of other rows.
    """
    return _launch(x.values, x.scales, weight, scales, bias, gated, dtype, is_fixed)


def weight_only_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    is_fixed: bool = False,
) -> torch.Tensor:
    """Compute `weight_only_reference` for e4m3 on any card; accumulate in float32. See `scaled_linear_triton`."""
    assert weight.dtype == torch.float8_e4m3fn
    return _launch(x, None, weight.view(torch.uint8), scales, bias, gated, x.dtype, is_fixed)


def _launch(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    dtype: torch.dtype,
    is_fixed: bool,
) -> torch.Tensor:
    (num_rows, num_in), num_out = x.shape, weight.shape[0] // (2 if gated else 1)
    kind = scale_kind(weight, scales)
    assert kind != "block" or not gated or num_out % GROUP == 0
    as_if = _FIXED_ROWS if is_fixed else num_rows
    tile = _tile(as_if, gated, kind == "block", x.element_size(), shared_memory(x.device))
    blocks, splits = _grid(as_if, num_in, num_out, tile["BLOCK_N"])
    partial = arrived = None
    if splits > 1:
        is_exact = x.dtype == torch.int8 and kind != "block"
        sums = torch.int32 if is_exact else torch.float32
        partial = torch.empty((2 * splits, num_rows, num_out), dtype=sums, device=x.device)
        arrived = _arrivals(x.device)
    out = torch.empty((num_rows, num_out), dtype=dtype, device=x.device)
    _scaled_linear[(blocks * triton.cdiv(num_rows, tile["ROWS"]), splits)](
        x_ptr=x,
        weight_ptr=weight,
        x_scales_ptr=x_scales,
        scales_ptr=scales,
        bias_ptr=bias,
        out_ptr=out,
        partial_ptr=partial,
        arrived_ptr=arrived,
        num_rows=num_rows,
        num_out=num_out,
        NUM_IN=num_in,
        SPAN=triton.cdiv(num_in, splits * tile["BLOCK_K"]) * tile["BLOCK_K"],
        SPLITS=splits,
        SIDE_BY_SIDE=_SIDE_BY_SIDE,
        BY_OUTPUT=kind == "output",
        BY_BLOCK=kind == "block",
        GATED=gated,
        HAS_BIAS=bias is not None,
        **tile,
        **launch_options(x.device),
    )
    return out


def _tile(num_rows: int, gated: bool, by_block: bool, x_bytes: int, most_bytes: int) -> dict[str, int]:
    """Return tile sizes and launch options.

    Args:
        by_block: a tile may not be wider than what shares a scale, and holds its sums twice.
        x_bytes: bytes per element of x. The weight has one.
        most_bytes: shared memory per program.
    """
    rows = next((rows for rows in (16, 32, 64) if num_rows <= rows), 64 if by_block else 128)
    block_n = 64 if num_rows <= 64 else 128
    block_k = 128 if by_block or x_bytes > 1 or num_rows > 64 else 256
    stage = ((2 if gated else 1) * block_n + rows * x_bytes) * block_k
    stages = min(96 << 10, most_bytes) // stage + 1  # all but one are in shared memory
    options = {"ROWS": rows, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": min(max(stages, 2), 6)}
    return options | {"num_warps": 4 if block_n == 64 else 8}


def _grid(num_rows: int, num_in: int, num_out: int, block_n: int) -> tuple[int, int]:
    """Return (blocks of columns, programs per block). Only blocks that have an arrival counter are shared."""
    blocks = -(-num_out // block_n)
    if num_rows > _SPLIT_ROWS or blocks > _BLOCKS_WANTED:
        return blocks, 1
    splits = -(-_BLOCKS_WANTED // blocks)
    return blocks, splits * 2 if num_in > 8192 else splits


@kept
def _arrivals(device: torch.device) -> torch.Tensor:
    """Return the counters of programs that have finished their part, per block of columns; 0 between launches."""
    return torch.zeros(_BLOCKS_WANTED, dtype=torch.int32, device=device)
