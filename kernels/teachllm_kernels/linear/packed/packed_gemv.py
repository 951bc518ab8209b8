"""A packed weight times one row, fused with what surrounds it in a layer: norm, bias, SiLU, residual.

As in `gemv.py` the time is bytes over bandwidth, but with a quarter of the bytes: an H200 reads 36 quantized values per
clock and multiprocessor, which has 128 lanes. That leaves three and a half instructions per value for dequantizing,
multiplying and adding: too few for multiply-adds. So tensor cores multiply here, too, and take a fragment of 256 values
at once. They expect 8 columns on the right, where there is one row of x. They get eight pieces of it:

    pieces  column n is the nth piece of a chunk of x. A warp multiplies each of its blocks, which belong to one
            piece, by all eight. Only the product with the block's own column counts; the others cost nothing
    chunks  each of a program's warps has 8 blocks of a chunk, one of each piece. The next chunk is on its way to
            registers while one is multiplied; the first two are fetched before the previous kernel has ended
    zeros   the sum of (value - zero) * x is that of value * x minus zero times the sum of x, which is where a product
            starts from. With bfloat16 nothing is ever subtracted from a value: `value + 128` is what a mask makes of it
    scales  per group: the float32 product of integers first, then times the scale
    norm    y = W (x * weight) / rms(x): the result is divided, once all warps have seen their part of x. If there are
            more programs than run at a time, x is normed beforehand: each program would load the norm's weights again

On an H200 a layer of Qwen3-8B, 4 bits in groups of 128, takes 34.5 us this way, of which reading the bytes takes 22;
with zeros 39.3. Persistent programs that go from output to output and prefetch gain nothing within a layer.

The definition is `packed_linear_reference`.

Source: the roofline argument of Williams et al., "Roofline", 2009.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import PLACES, gdc_launch_dependents, gdc_wait, is_amd, launch_options, tl, triton
from teachllm_kernels.linear.packed.packed_dequantize import (
    conversion,
    dequantize_unscaled,
    halves,
    load_pairs,
    nibbles,
    pairs_of_zeros,
    scale_step,
)
from teachllm_kernels.linear.packed.packed_weight import PackedWeight, cost, packed_linear_reference
from teachllm_kernels.rms_norm import rms_norm_triton

__all__ = ["cost", "packed_gemv_triton", "packed_linear_reference"]


@triton.jit
def _fetch(
    weight, row, chunk,
    NUM_IN: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Load what a program needs of a chunk: (words, scales, zeros, the norm's weights), by piece and warp.

    Only the threads whose products count read scales; the others have zeros.
    """
    qweight_ptr, scales_ptr, zeros_ptr, norm_weight_ptr = weight
    BLOCK_K: tl.constexpr = 256 // BITS
    NUM_BLOCKS: tl.constexpr = (NUM_IN + 63) // 64 * (64 // BLOCK_K)
    NUM_GROUPS: tl.constexpr = (NUM_IN + GROUP - 1) // GROUP
    BLOCKS: tl.constexpr = 8 * WARPS
    block = tl.arange(0, BLOCKS)[:, None]  # piece * WARPS + warp
    word_ptrs = qweight_ptr + (row.to(tl.int64) * NUM_BLOCKS + chunk * BLOCKS) * 128
    word_ptrs = word_ptrs + block * 128 + tl.arange(0, 128)[None, :]
    if NUM_BLOCKS % BLOCKS == 0:
        words = tl.load(word_ptrs, eviction_policy="evict_first")
    else:
        words = tl.load(word_ptrs, mask=chunk * BLOCKS + block < NUM_BLOCKS, other=0, eviction_policy="evict_first")

    place = tl.arange(0, BLOCK_K // STEP * BLOCKS * 32)  # the threads of those blocks, once per scale of a block
    thread, warp = place % 32, place // 32 % WARPS  # a thread is 4 * g + q
    piece, step = place // (32 * WARPS) % 8, place // (32 * BLOCKS)
    counts = piece // 2 == thread % 4
    if NUM_IN % (BLOCKS * BLOCK_K) == 0 and (WARPS * BLOCK_K) % GROUP == 0:  # the terms known at compile time come last
        group = chunk * (BLOCKS * BLOCK_K // GROUP) + (warp * BLOCK_K + step * STEP) // GROUP
        pair = ((row * NUM_GROUPS + group) * 8 + thread // 4) + piece * (WARPS * BLOCK_K // GROUP * 8)
    else:
        k = (chunk * BLOCKS + piece * WARPS + warp) * BLOCK_K + step * STEP
        counts = counts & (k < NUM_IN)
        pair = (row * NUM_GROUPS + k // GROUP) * 8 + thread // 4
    scale = load_pairs(scales_ptr, pair, counts)
    zero = 0
    if zeros_ptr is not None:
        zero = tl.load(zeros_ptr + pair, mask=counts, other=0).to(tl.uint16, bitcast=True)
    weight_of_norm = 0
    if norm_weight_ptr is not None:
        weight_of_norm = _fetch_x(norm_weight_ptr, chunk, NUM_IN, BITS, WARPS)
    return words, scale, zero, weight_of_norm


@triton.jit
def _fetch_x(x_ptr, chunk, NUM_IN: tl.constexpr, BITS: tl.constexpr, WARPS: tl.constexpr):
    """Load a chunk of x, or of a tensor like it, for `halves`: [32 / BITS * WARPS * 32] pairs.

    The order is part of a block, warp, thread: thread 4 * n + q gets the values of the nth piece that it multiplies.
    `& 3` is `% 4`, but Triton then does not see that four threads are neighbours, and does not make one of them read
    for all.
    """
    SIZE: tl.constexpr = 128 // BITS  # pairs of a block
    place = tl.arange(0, SIZE * 8 * WARPS)
    thread, warp, part = place % 32, place // 32 % WARPS, place // (32 * WARPS)
    at = (chunk * (8 * WARPS) + warp + thread // 4 * WARPS) * SIZE + (thread & 3) + part * 4
    if NUM_IN % 2:
        k = tl.arange(0, 2)[None, :] + at[:, None] * 2
        return tl.load(x_ptr + k, mask=k < NUM_IN, other=0.0)
    else:  # an else, since code after a returning `if` is compiled, too
        return load_pairs(x_ptr, at, at < NUM_IN // 2)


@triton.jit
def _multiply(
    fetched, x_words, x_ptr, weight, magic,
    NUM_IN: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr, IS_E2M1: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Return a chunk's part of the result, [WARPS, 8, 4, 2], to be summed over warps and quads; and x's squares."""
    words, scale, zero, weight_of_norm = fetched
    _, scales_ptr, zeros_ptr, norm_weight_ptr = weight
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    SCALES: tl.constexpr = 256 // BITS // STEP
    STEPS: tl.constexpr = STEP // 16
    IS_ODD: tl.constexpr = NUM_IN % 2
    h = x_words if IS_ODD else halves(x_words, DTYPE)
    squares = 0.0
    if norm_weight_ptr is not None:
        squares = tl.reshape(h.to(tl.float32) * h.to(tl.float32), [32 // BITS, WARPS, 32, 2])
        squares = tl.sum(tl.sum(squares, axis=3), axis=0)
        h = (h * (weight_of_norm if IS_ODD else halves(weight_of_norm, norm_weight_ptr.dtype.element_ty))).to(DTYPE)
    # The order of inputs in the product is free, as long as x has the same. This one is where Triton puts the joined
    # values: a thread's four inputs of a step are consecutive.
    h = tl.reshape(h, [SCALES, STEPS, 2, WARPS, 8, 4, 2])  # scale, step, j, warp, piece, q, h
    h = tl.reshape(tl.permute(h, [0, 3, 1, 5, 2, 6, 4]), [SCALES * WARPS, STEP, 8])
    words = tl.reshape(words, [8 * WARPS, 128])
    IS_RAW: tl.constexpr = tl.bfloat16 == DTYPE and not IS_E2M1
    LEAST: tl.constexpr = (128 * (17 if BITS == 8 else 1)) if IS_RAW else -(2 ** (BITS - 1))  # the value of quantized 0
    start = tl.zeros([SCALES * WARPS, 128, 8], tl.float32)
    if zeros_ptr is not None or IS_RAW:
        ones = tl.full(
            [SCALES * WARPS, 16, STEP], -1.0 if zeros_ptr is not None else -(LEAST + 2.0 ** (BITS - 1)), DTYPE
        )
        sums = tl.dot(ones, h, input_precision="ieee")[:, None, :, :]  # the sums of x, in all rows
        if zeros_ptr is not None:
            zero = tl.join(zero & 0xFF, zero >> 8).to(tl.float32) + LEAST
            sums = tl.reshape(sums, [SCALES, WARPS, 1, 2, 8, 4, 2])
            sums = _by_piece(zero, SCALES, WARPS)[:, :, :, :, :, :, None] * sums
        else:
            sums = tl.broadcast_to(sums, [SCALES * WARPS, 8, 16, 8])
        start = tl.reshape(sums, [SCALES * WARPS, 128, 8])
    if IS_RAW and BITS == 8:
        a = _in_order(nibbles(words, magic, DTYPE, 4), SCALES, STEPS, WARPS)
        start = tl.dot(a, (h * 16.0).to(DTYPE), start, input_precision="ieee")
        a = nibbles(words, magic, DTYPE, 0)
    else:
        a = dequantize_unscaled(words, 0, magic, DTYPE, BITS, IS_E2M1, False, IS_RAW)
    product = tl.dot(_in_order(a, SCALES, STEPS, WARPS), h, start, input_precision="ieee")
    product = tl.reshape(product, [SCALES, WARPS, 8, 2, 8, 4, 2])  # columns: the last two
    scale = _by_piece(halves(scale, scales_ptr.dtype.element_ty), SCALES, WARPS).to(tl.float32)
    piece = tl.reshape(tl.arange(0, 8), [1, 1, 8, 1, 1, 1, 1])
    is_own = piece % 2 == tl.reshape(tl.arange(0, 2), [1, 1, 1, 1, 1, 1, 2])  # in the quad that has a scale
    product = tl.where(is_own, product * scale[:, :, :, :, :, :, None], 0.0)
    product = tl.sum(tl.sum(tl.sum(product, axis=6), axis=2), axis=0)
    return tl.permute(product, [0, 2, 3, 1]), squares


@triton.jit
def _in_order(found, SCALES: tl.constexpr, STEPS: tl.constexpr, WARPS: tl.constexpr):
    """Reorder the result of `dequantize_unscaled` to [SCALES * WARPS, 8 pieces of 16 outputs, inputs]."""
    found = tl.reshape(found, [8, WARPS, 8, 4, SCALES, STEPS, 2, 4])  # piece, warp, g, q, scale, step, i, (j, h)
    return tl.reshape(tl.permute(found, [4, 1, 0, 6, 2, 5, 3, 7]), [SCALES * WARPS, 128, STEPS * 16])


@triton.jit
def _by_piece(of_groups, SCALES: tl.constexpr, WARPS: tl.constexpr):
    """Reorder what `_fetch` read to [SCALES, WARPS, 8, 2, 8, 4]: like a product except for its last dimension."""
    return tl.permute(tl.reshape(of_groups, [SCALES, 8, WARPS, 8, 4, 2]), [0, 2, 1, 5, 3, 4])


@triton.jit
def _packed_gemv(
    x_ptr, qweight_ptr, scales_ptr, zeros_ptr, bias_ptr, norm_weight_ptr, residual_ptr, out_ptr,
    eps, magic, num_out,
    NUM_IN: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr, IS_E2M1: tl.constexpr,
    WARPS: tl.constexpr, IN_TURNS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    CHUNKS: tl.constexpr = (NUM_IN * BITS + WARPS * 2048 - 1) // (WARPS * 2048)
    block, weight = tl.program_id(0), (qweight_ptr, scales_ptr, zeros_ptr, norm_weight_ptr)
    magic = tl.max(tl.zeros([32], tl.int32) + magic, axis=0)  # otherwise the argument would be read again at every use
    fetched = _fetch(weight, block, 0, NUM_IN, GROUP, STEP, BITS, WARPS)
    fetched_next = fetched
    if CHUNKS > 1:
        fetched_next = _fetch(weight, block, 1, NUM_IN, GROUP, STEP, BITS, WARPS)
    g, half = tl.arange(0, 8)[:, None], tl.arange(0, 2)[None, :]
    if IN_TURNS:
        size = num_out if GATED else num_out // 2
        row = block * 8 + g + half * size
        is_row = (block * 8 + g < size) & (half >= 0)
    else:
        row = block * 16 + half * 8 + g
        is_row = row < num_out
    if bias_ptr is not None:
        shift = tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x_words = _fetch_x(x_ptr, 0, NUM_IN, BITS, WARPS)
    next_x_words = x_words
    if CHUNKS > 1:
        next_x_words = _fetch_x(x_ptr, 1, NUM_IN, BITS, WARPS)
    if residual_ptr is not None:
        before = tl.load(residual_ptr + row, mask=is_row & (half < (1 if GATED else 2)), other=0.0).to(tl.float32)
    total = tl.zeros([WARPS, 8, 4, 2], tl.float32)
    squares = tl.zeros([WARPS, 32], tl.float32)
    for chunk in tl.range(2, CHUNKS, num_stages=1):
        found, of_x = _multiply(fetched, x_words, x_ptr, weight, magic, NUM_IN, STEP, BITS, IS_E2M1, WARPS)
        total, squares = total + found, squares + of_x
        fetched, x_words = fetched_next, next_x_words
        fetched_next = _fetch(weight, block, chunk, NUM_IN, GROUP, STEP, BITS, WARPS)
        next_x_words = _fetch_x(x_ptr, chunk, NUM_IN, BITS, WARPS)
    for _last in tl.static_range(min(CHUNKS, 2)):
        found, of_x = _multiply(fetched, x_words, x_ptr, weight, magic, NUM_IN, STEP, BITS, IS_E2M1, WARPS)
        total, squares = total + found, squares + of_x
        fetched, x_words = fetched_next, next_x_words

    y = tl.sum(tl.sum(total, axis=2), axis=0)  # [8, 2]
    if norm_weight_ptr is not None:
        y *= tl.rsqrt(tl.sum(squares) / NUM_IN + eps)
    if bias_ptr is not None:
        y += shift
    if GATED:
        gate, up = tl.split(y)
        y = (gate * tl.sigmoid(gate) * up)[:, None]
        is_row = is_row & (half == 0)
    if residual_ptr is not None:
        y += before
    tl.store(out_ptr + row, tl.broadcast_to(y, [8, 2]).to(out_ptr.dtype.element_ty), mask=is_row)


def packed_gemv_triton(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Compute `packed_linear_reference` for one row and contiguous tensors.

    Args:
        x: [1, num_in].
        weight: if `gated`, a gated weight.
        bias: [outputs of weight], gate above up.
        norm: (weight [num_in], eps) of the norm that x passes first.
        residual: [1, num_out], added last.
        gated: the result is silu(gate) * up.

    Returns:
        [1, num_out]: as many as the weight's outputs; if `gated`, half of them.
    """
    assert x.shape == (1, weight.num_in) and (weight.is_gated or not gated)
    if norm is not None and (_has_turns(weight) or x.dtype == torch.float16):  # float16 may not hold x * weight
        x, norm = rms_norm_triton(x, None, *norm)[0], None
    num_out = weight.num_out // (2 if gated else 1)
    out = x.new_empty((1, num_out))
    norm_weight, eps = norm or (None, 0.0)
    warps, magic = _warps(weight, x.dtype, is_amd(x.device)), conversion(x.dtype, weight)
    _packed_gemv[(weight.qweight.shape[0],)](
        x_ptr=x,
        qweight_ptr=weight.qweight,
        scales_ptr=weight.scales,
        zeros_ptr=pairs_of_zeros(weight),
        bias_ptr=bias,
        norm_weight_ptr=norm_weight,
        residual_ptr=residual,
        out_ptr=out,
        eps=eps,
        magic=magic,
        num_out=num_out,
        NUM_IN=weight.num_in,
        GROUP=weight.group_size if weight.scales.shape[1] > 1 else 1 << 30,
        STEP=scale_step(weight),
        BITS=weight.bits,
        IS_E2M1=weight.is_e2m1,
        WARPS=warps,
        IN_TURNS=weight.is_gated,
        GATED=gated,
        num_warps=warps,
        **launch_options(x.device, maxnreg=_registers(weight, x.dtype, warps)),
    )
    return out


def _warps(weight: PackedWeight, dtype: torch.dtype, on_amd: bool) -> int:
    """Return the warps per program: eight if there are at most two such programs per multiprocessor, otherwise four.

    Or as few as have work. With float32, which tensor cores do not multiply, one: it needs the registers. On AMD's GPUs
    one, too: values pass through shared memory on their way to the matrix cores, up to 35 KB per warp.
    """
    if dtype == torch.float32 or on_amd:
        return 1
    num_blocks, blocks_k = weight.qweight.shape[:2]
    holds_two = weight.bits == 4 and scale_step(weight) > 16  # chunks, in 128 registers
    most = 8 if num_blocks <= 2 * PLACES and (holds_two or weight.num_in <= 4096) else 4
    return min(max(triton.next_power_of_2(blocks_k) // 8, 1), most)


def _registers(weight: PackedWeight, dtype: torch.dtype, warps: int) -> int | None:
    """Return a limit on registers per thread: two programs of eight warps must fit, or three or four of four.

    Some of these are the next kernel's first programs. With a scale per 16 inputs there is no limit: a thread holds too
    many values.
    """
    if dtype == torch.float32:
        return None
    if warps == 8:  # two programs
        return 128
    if scale_step(weight) == 16:
        return None
    is_small = weight.bits == 4 and weight.qweight.shape[1] <= 64 and weight.zeros is None and scale_step(weight) == 64
    return 128 if is_small and _has_turns(weight) else 168  # four programs, or three


def _has_turns(weight: PackedWeight) -> bool:
    """Return whether there are more programs than run at a time."""
    return weight.qweight.shape[0] > 3 * PLACES
