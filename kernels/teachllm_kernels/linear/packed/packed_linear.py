"""Matrix products of a packed weight with 2 to 256 rows: the weight is dequantized on its way to the tensor cores.

The weight is the left operand, whose fragments come from registers: its quantized values arrive there and are
dequantized there. x^T, the right operand, comes from shared memory. A program multiplies 128 outputs, or 64.

    reads    quantized values are a quarter of bfloat16's bytes, so x, which every program reads for itself, is most of
             the L2 cache's traffic: hence so many outputs and rows per program
    scales   late: a tile has one group; its product of integers, times the scale, is added to the sum. Shorter groups
             are scaled early: values are multiplied by their scales and rounded
    split K  as in `skinny_gemm.py`: programs share the outputs of a narrow weight, and the last to arrive adds up;
             or the parts are left to the norm that follows, which reads them all anyway

The definition is `packed_linear_reference`.

Source: Frantar et al., "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from teachllm_kernels._triton import PLACES, gdc_launch_dependents, gdc_wait, launch_options, shared_memory, tl, triton
from teachllm_kernels.first_launch import kept
from teachllm_kernels.linear.packed.packed_dequantize import (
    conversion,
    dequantize_unscaled,
    halves,
    load_pairs,
    of_steps,
    pairs_of_zeros,
    scale_step,
    scaled,
)
from teachllm_kernels.linear.packed.packed_weight import PackedWeight, cost, packed_linear_reference

__all__ = ["MAX_ROWS", "cost", "packed_linear_reference", "packed_linear_triton"]

MAX_ROWS = 256
_LEAST_TILES = 8  # per program that shares its outputs; shorter programs are mostly start and end


@triton.jit
def _fetch_groups(
    scales_ptr, zeros_ptr, first, num_blocks, start,
    NUM_IN: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, BLOCKS: tl.constexpr, TILE_K: tl.constexpr,
    LATE: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Load a tile's (scales, zeros). Late scales are ordered by output, others by (step, block) like fragments."""
    NUM_GROUPS: tl.constexpr = (NUM_IN + GROUP - 1) // GROUP
    part = tl.arange(0, (1 if LATE else TILE_K // STEP) * BLOCKS)
    k = tl.minimum(start + part // BLOCKS * STEP, NUM_IN - 1)
    thread = tl.arange(0, 32)  # 4 * g + q
    block = tl.minimum(first + part % BLOCKS, num_blocks - 1)
    pair = (block * NUM_GROUPS + k // GROUP)[:, None] * 8 + thread[None, :] // 4
    zero = part
    if HAS_ZEROS:
        zero = tl.load(zeros_ptr + pair)
    if LATE:
        n = tl.arange(0, BLOCKS * 8)
        block = tl.minimum(first + n // 8, num_blocks - 1)
        at = (block * NUM_GROUPS + tl.minimum(start, NUM_IN - 1) // GROUP) * 8 + n % 8
        scale = load_pairs(scales_ptr, at, n >= 0)
    else:
        scale = load_pairs(scales_ptr, pair, pair >= 0)
    return scale, zero


@triton.jit(do_not_specialize=["num_rows"])  # it differs from batch to batch
def _packed_linear(
    x_ptr, qweight_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    magic, num_rows, num_out, num_blocks,
    NUM_IN: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, TILE_K: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, LATE: tl.constexpr,
    BITS: tl.constexpr, IS_E2M1: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, IN_TURNS: tl.constexpr,
    GATED: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    KB: tl.constexpr = TILE_K * BITS // 256
    STEPS: tl.constexpr = 16 // BITS
    NUM_K: tl.constexpr = (NUM_IN + 63) // 64 * BITS // 4
    EVEN_K: tl.constexpr = TILES * TILE_K * SPLITS == NUM_IN
    row_block, column_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    magic = tl.max(tl.zeros([32], tl.int32) + magic, axis=0)  # otherwise the argument would be read again at every use
    first = column_block * BLOCKS
    m = row_block * ROWS + tl.arange(0, ROWS)
    is_m = m < num_rows
    k = tl.arange(0, TILE_K)
    x_t_ptrs = x_ptr + m[None, :] * NUM_IN + k[:, None]
    part = tl.arange(0, KB * BLOCKS)
    block, k_block = tl.minimum(first + part % BLOCKS, num_blocks - 1), part // BLOCKS
    words_ptrs = qweight_ptr + block.to(tl.int64)[:, None] * (NUM_K * 128) + tl.arange(0, 128)[None, :]
    begin = split * (TILES * TILE_K)
    scale, zero = _fetch_groups(
        scales_ptr, zeros_ptr, first, num_blocks, begin, NUM_IN, GROUP, STEP, BLOCKS, TILE_K, LATE, HAS_ZEROS
    )
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCKS * 16, ROWS], tl.float32)
    for start in tl.range(begin, begin + TILES * TILE_K, TILE_K, num_stages=STAGES):
        if EVEN_K:
            x_t = tl.load(x_t_ptrs + start, mask=is_m[None, :], other=0.0)
            words = tl.load(words_ptrs + (start * BITS // 2 + k_block[:, None] * 128), eviction_policy="evict_first")
        else:
            x_t = tl.load(x_t_ptrs + start, mask=is_m[None, :] & (start + k < NUM_IN)[:, None], other=0.0)
            at_k = tl.minimum(start * BITS // 256 + k_block, NUM_K - 1)
            words = tl.load(words_ptrs + at_k[:, None] * 128, eviction_policy="evict_first")
        next_scale, next_zero = _fetch_groups(
            scales_ptr, zeros_ptr, first, num_blocks, start + TILE_K,
            NUM_IN, GROUP, STEP, BLOCKS, TILE_K, LATE, HAS_ZEROS,
        )  # fmt: skip
        if HAS_ZEROS:
            zero = tl.reshape(of_steps(zero, KB, BLOCKS, STEPS, 1), [KB * BLOCKS, 8, 4, STEPS])
        w = dequantize_unscaled(words, zero, magic, x_ptr.dtype.element_ty, BITS, IS_E2M1, HAS_ZEROS)
        scale = halves(scale, scales_ptr.dtype.element_ty)
        if not LATE:
            w = scaled(w, of_steps(scale, KB, BLOCKS, STEPS, 2))
        w = tl.reshape(w, [KB, BLOCKS, 8, 4, STEPS, 2, 2, 2])  # k block, block, g, q, step, i, j, h
        w = tl.reshape(tl.permute(w, [1, 5, 2, 0, 4, 6, 3, 7]), [BLOCKS * 16, TILE_K])
        if LATE:
            scale = tl.reshape(tl.permute(tl.reshape(scale, [BLOCKS, 8, 2]), [0, 2, 1]), [BLOCKS * 16])
            acc += tl.dot(w, x_t, input_precision="ieee") * scale.to(tl.float32)[:, None]
        else:
            acc = tl.dot(w, x_t, acc, input_precision="ieee")
        scale, zero = next_scale, next_zero

    n = tl.arange(0, BLOCKS * 16)
    is_last = True
    if SPLITS > 1 and not PARTS:
        num_columns = tl.num_programs(1) * (BLOCKS * 16)
        at = (row_block * num_columns + first * 16 + n)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        size = tl.num_programs(0) * num_columns * ROWS
        tl.store(partial_ptr + split * size + at, acc)
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        counter_ptr = arrived_ptr + column_block * tl.num_programs(0) + row_block
        is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.store(counter_ptr, 0)
            acc = tl.zeros([BLOCKS * 16, ROWS], tl.float32)
            for other in tl.static_range(SPLITS):  # past the L1 cache, which may hold older values
                acc += tl.load(partial_ptr + other * size + at, cache_modifier=".cg")
    if is_last:
        if IN_TURNS:
            half = num_out if GATED else num_out // 2
            column = first * 8 + n // 16 * 8 + n % 8
            is_n = column < half
            column += n // 8 % 2 * half
        else:
            column = first * 16 + n
            is_n = column < num_out
        if HAS_BIAS:
            acc += tl.load(bias_ptr + column, mask=is_n & (not PARTS or split == 0), other=0.0).to(tl.float32)[:, None]
        if GATED:
            both = tl.permute(tl.reshape(acc, [BLOCKS, 2, 8, ROWS]), [0, 2, 3, 1])
            gate, up = tl.split(both)
            y = tl.reshape(gate * tl.sigmoid(gate) * up, [BLOCKS * 8, ROWS])
            column = first * 8 + tl.arange(0, BLOCKS * 8)
            is_n = column < num_out
        else:
            y = acc
        place = m[None, :] * num_out + column[:, None]
        if PARTS:
            place += split * (num_rows * num_out)
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=is_n[:, None] & is_m[None, :])


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Describe how a product is divided.

    Attributes:
        rows: rows of x per program.
        blocks: blocks of 16 outputs per program, which has as many warps.
        tile_k: inputs per tile.
        late: scales are applied to products.
        stages: tiles that are being copied or in use.
        splits: programs that share their outputs.
        tiles: tiles per program.
    """

    rows: int
    blocks: int
    tile_k: int
    late: bool
    stages: int
    splits: int
    tiles: int


def _tiling(num_rows: int, weight: PackedWeight, dtype: torch.dtype, most_bytes: int) -> _Tiling:
    """Return as many programs as places, if they are not too short; idle places may get shorter programs."""
    group = weight.group_size if weight.scales.shape[1] > 1 else 128
    if dtype == torch.float32:  # tensor cores do not multiply it: small tiles
        rows, blocks, tile_k, stages = 16, 4, 64, 2
    else:
        is_small = most_bytes < 200 << 10  # not a Hopper card: fragments go through shared memory
        rows = min(max(triton.next_power_of_2(num_rows), 16), 64 if is_small else 128)
        blocks = 8 if weight.qweight.shape[0] > 4 else 4
        tile_k = 64 if group % 128 and group % 64 == 0 else 128
        fragments = blocks * 32 * tile_k if is_small else 0
        qweight, x = blocks * 2 * tile_k * weight.bits, 2 * rows * tile_k
        room = (most_bytes if is_small else most_bytes // 2) - fragments
        stages = min(max((room + qweight) // (qweight + x), 2), 5)
    row_blocks, column_blocks = -(-num_rows // rows), -(-weight.qweight.shape[0] // blocks)
    tiles, programs = -(-weight.num_in // tile_k), row_blocks * column_blocks
    most = PLACES * (2 if rows <= 64 else 1) // programs
    splits = max(min(most, max(tiles // _LEAST_TILES, min(tiles // 2, PLACES // programs))), 1)
    tiles_each = -(-tiles // splits)
    return _Tiling(rows, blocks, tile_k, group % tile_k == 0, stages, -(-tiles // tiles_each), tiles_each)


def packed_linear_triton(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    parts: bool = False,
) -> torch.Tensor:
    """Compute `packed_linear_reference` without a norm, for up to `MAX_ROWS` rows of contiguous tensors.

    Launches on one device must follow each other: they share the counters of arrivals.

    Args:
        x: [num_rows, num_in].
        weight: with `gated` one that is gated.
        bias: [outputs of weight], gate above up.
        gated: the result is silu(gate) * up.
        parts: the result may be left as parts to be added, float32; not of a gated one, which needs its sums whole.

    Returns:
        [num_rows, num_out]: as many as weight's outputs, with `gated` half of them. With `parts`, [num_parts, num_rows,
        num_out] float32.
    """
    num_rows, num_blocks = x.shape[0], weight.qweight.shape[0]
    assert num_rows <= MAX_ROWS and x.shape[1] == weight.num_in
    assert (weight.is_gated or not gated) and not (gated and parts)
    num_out = weight.num_out // (2 if gated else 1)
    tiling = _tiling(num_rows, weight, x.dtype, shared_memory(x.device))
    grid = (-(-num_rows // tiling.rows), -(-num_blocks // tiling.blocks), tiling.splits)
    out = x.new_empty((num_rows, num_out))
    if parts:
        out = torch.empty((tiling.splits, num_rows, num_out), dtype=torch.float32, device=x.device)
    partial = arrived = None
    if tiling.splits > 1 and not parts:
        size = grid[0] * grid[1] * grid[2] * tiling.blocks * 16 * tiling.rows
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        arrived = _arrivals(x.device)
    zeros, magic = pairs_of_zeros(weight), conversion(x.dtype, weight)
    _packed_linear[grid](
        x_ptr=x,
        qweight_ptr=weight.qweight,
        scales_ptr=weight.scales,
        zeros_ptr=zeros,
        bias_ptr=bias,
        out_ptr=out,
        partial_ptr=partial,
        arrived_ptr=arrived,
        magic=magic,
        num_rows=num_rows,
        num_out=num_out,
        num_blocks=num_blocks,
        NUM_IN=weight.num_in,
        TILES=tiling.tiles,
        ROWS=tiling.rows,
        BLOCKS=tiling.blocks,
        TILE_K=tiling.tile_k,
        STAGES=tiling.stages,
        SPLITS=tiling.splits,
        GROUP=weight.group_size if weight.scales.shape[1] > 1 else 1 << 30,
        STEP=scale_step(weight),
        LATE=tiling.late,
        BITS=weight.bits,
        IS_E2M1=weight.is_e2m1,
        HAS_ZEROS=zeros is not None,
        HAS_BIAS=bias is not None,
        IN_TURNS=weight.is_gated,
        GATED=gated,
        PARTS=parts,
        num_warps=tiling.blocks,
        # With so few registers there is room for two programs.
        **launch_options(x.device, maxnreg=128 if tiling.rows <= 64 and x.dtype != torch.float32 else None),
    )
    return out


@kept
def _arrivals(device: torch.device) -> torch.Tensor:
    """Programs that have finished their part, by outputs and rows; 0 between launches."""
    return torch.zeros(2 * PLACES, dtype=torch.int32, device=device)
