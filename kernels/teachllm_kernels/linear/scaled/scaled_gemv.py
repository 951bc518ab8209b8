"""An 8-bit weight times one row, fused with what surrounds it in a layer: `gemv.py` for quantized weights.

Half the bytes of 16-bit weights are read in half the time, but there is as much to do per value as before. At 18 bytes
per clock, an H200's memory bandwidth per multiprocessor, 7 instructions can be issued per value. Counted in the machine
code of a product with 4,096 inputs and 8 rows of the weight per program, a value takes:

    e4m3      3.8. Half an instruction converts it to float16, one that to float32, one multiplies and adds, exact but
              for the sum; the rest are the sums across threads
    int8      1.3. One instruction multiplies four values by four and adds up (dp4a); on
              AMD's GPUs, which have no PTX, values are multiplied one by one
    the row   2.7 more if every program norms and quantizes it for itself: 21 per element. Or the row comes
              quantized, for another launch, whose wait is filled by the weights that programs load first

Everything else is as there: one shot, weights first, fused. Group and block scales are multiplied into the row.

Sources: those of `gemv.py`; PTX ISA, "dp4a" and "cvt".
"""

# Tuples grow by concatenation: Triton supports nothing else.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, attr-defined, misc"

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, is_amd, launch_options, tl, triton
from teachllm_kernels.linear.scaled.scaled_reference import cost, scale_kind, scaled_linear_reference
from teachllm_kernels.quantize_rows import (
    GROUP,
    QuantizedRows,
    clamped,
    quantize_rows_reference,
    quantize_with_scale,
    scale_of,
)
from teachllm_kernels.rms_norm import rms_norm_reference

__all__ = ["cost", "scaled_gemv_reference", "scaled_gemv_triton"]

_VALUES_PER_THREAD = 256  # quantized weights per thread at most
_LONGEST = 4096  # inputs that are loaded or reduced at once
_GROUP = tl.constexpr(GROUP)


def scaled_gemv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition: residual + act(quantized(rms_norm(x)) W^T + b).

    Args:
        x: [num_rows, in]; one row for the kernel below. What the norm leaves is rounded to x's dtype, then quantized.
        weight: [out, in], quantized; with `gated` [2 * out, in], gate above up.
        scales: of the weight, see `scale_kind`.
        bias: [rows of weight].
        norm: (weight [in], eps) of the norm that x passes first.
        residual: [num_rows, out], added last.
        gated: the result is silu(gate) * up.
        input_scale: [1] float32, of the row; None: the row's own, or its groups' for a weight with scales of blocks.

    Returns:
        [num_rows, out] of x's dtype.
    """
    normed = x if norm is None else rms_norm_reference(x, None, *norm)[0]
    by_block = scale_kind(weight, scales) == "block"
    row = quantize_rows_reference(normed, weight.dtype, None if by_block else input_scale, by_block)
    y = scaled_linear_reference(row, weight, scales, bias, gated)
    return (y if residual is None else residual + y).to(x.dtype)


@triton.jit
def _dot4(a, b):
    """Sums of four products each: words of four int8."""
    return tl.inline_asm_elementwise("dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _words(values):
    """[BLOCK] int8 -> [BLOCK / 4] int32, as they would lie in memory."""
    bytes_of_words = tl.reshape(values.to(tl.uint8, bitcast=True).to(tl.int32), [values.shape[0] // 4, 4])
    return tl.sum(bytes_of_words << (8 * tl.arange(0, 4))[None, :], axis=1)


@triton.jit
def _load_quantized(
    x_ptr, x_scales_ptr,
    NUM_IN: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BY_BLOCK: tl.constexpr, IN_WORDS: tl.constexpr,
):  # fmt: skip
    """Load a quantized row: its values block by block, the scales of each block's groups, and the row's scale."""
    PER: tl.constexpr = 4 if IN_WORDS else 1
    column = tl.arange(0, BLOCK // PER)
    values, of_groups, scale = (), (), 1.0
    for i in tl.static_range(BLOCKS):
        at = i * (BLOCK // PER) + column
        values = values + (tl.load(x_ptr + at, mask=at < NUM_IN // PER, other=0.0),)
        if BY_BLOCK:
            group = i * (BLOCK // _GROUP) + tl.arange(0, BLOCK // _GROUP)
            of_groups = of_groups + (tl.load(x_scales_ptr + group, mask=group * _GROUP < NUM_IN, other=0.0),)
    if not BY_BLOCK:
        scale = tl.load(x_scales_ptr)
    return values, of_groups, scale


@triton.jit
def _quantize(
    x_ptr, given_scale_ptr, norm, eps,
    NUM_IN: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, QUANTIZED_DTYPE: tl.constexpr,
    HAS_NORM: tl.constexpr, BY_BLOCK: tl.constexpr, IN_WORDS: tl.constexpr,
):  # fmt: skip
    """Norm a row, if `norm` has weights, and quantize it; return what `_load_quantized` returns."""
    column = tl.arange(0, BLOCK)
    inputs, normed, values, of_groups, scale = (), (), (), (), 1.0
    squares, largest = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(BLOCKS):
        y = tl.load(x_ptr + i * BLOCK + column, mask=i * BLOCK + column < NUM_IN, other=0.0).to(tl.float32)
        inputs = inputs + (y,)
        squares += y * y
    for i in tl.static_range(BLOCKS):
        y = inputs[i]
        if HAS_NORM:
            rms = tl.sqrt(tl.sum(squares) / NUM_IN + eps)
            y = (y / rms * norm[i].to(tl.float32)).to(x_ptr.dtype.element_ty).to(tl.float32)
        normed = normed + (y,)
        largest = tl.maximum(largest, tl.abs(y))
    if not BY_BLOCK:
        scale = tl.load(given_scale_ptr) if given_scale_ptr is not None else scale_of(tl.max(largest), QUANTIZED_DTYPE)
    for i in tl.static_range(BLOCKS):
        y = normed[i]
        if BY_BLOCK:
            by_group = tl.reshape(y, [BLOCK // _GROUP, _GROUP])
            of_group = scale_of(tl.max(tl.abs(by_group), axis=1), QUANTIZED_DTYPE)
            of_groups = of_groups + (of_group,)
            q = tl.reshape(quantize_with_scale(by_group, of_group[:, None], QUANTIZED_DTYPE), [BLOCK])
        else:
            if given_scale_ptr is not None:
                y = clamped(y, scale, QUANTIZED_DTYPE)
            q = quantize_with_scale(y, scale, QUANTIZED_DTYPE)
        values = values + (_words(q) if IN_WORDS else q,)
    return values, of_groups, scale


@triton.jit
def _load_scales(scales_ptr, row, is_row, block, GROUPS: tl.constexpr, ALL: tl.constexpr, BY_OUTPUT: tl.constexpr):
    """Of some rows of the weight: one for all, [ROWS], or [GROUPS] of their blocks, which are the same."""
    if GROUPS > 0:
        group = block * GROUPS + tl.arange(0, GROUPS)
        found = tl.load(scales_ptr + tl.min(row) // _GROUP * ALL + group, mask=group < ALL, other=0.0)
    elif BY_OUTPUT:
        found = tl.load(scales_ptr + row, mask=is_row, other=0.0)
    else:
        found = tl.load(scales_ptr)
    return found


@triton.jit
def _times(w, q, of_groups, of_blocks, BLOCK: tl.constexpr, BY_BLOCK: tl.constexpr):
    """[ROWS] sums of products of a block of the weight's rows with one of x; with the scales, if BY_BLOCK."""
    if BY_BLOCK:
        factors = tl.broadcast_to((of_groups * of_blocks)[:, None], [BLOCK // _GROUP, _GROUP])
        products = w.to(tl.float32) * (q.to(tl.float32) * tl.reshape(factors, [BLOCK]))[None, :]
    elif w.dtype == tl.int32:
        products = _dot4(w, q[None, :])
    elif w.dtype == tl.int8:
        products = w.to(tl.int32) * q.to(tl.int32)[None, :]
    else:
        products = w.to(tl.float32) * q.to(tl.float32)[None, :]
    return tl.sum(products, axis=1)


@triton.jit
def _scaled_gemv(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, given_scale_ptr, bias_ptr, norm_weight_ptr, residual_ptr, out_ptr,
    eps, num_out,
    NUM_IN: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, QUANTIZED_DTYPE: tl.constexpr,
    BY_OUTPUT: tl.constexpr, BY_BLOCK: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    IN_WORDS: tl.constexpr = weight_ptr.dtype.element_ty == tl.int32
    PER: tl.constexpr = 4 if IN_WORDS else 1  # values per loaded element
    GROUPS: tl.constexpr = BLOCK // _GROUP if BY_BLOCK else 0
    ALL: tl.constexpr = (NUM_IN + _GROUP - 1) // _GROUP
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_out
    piece, column = tl.arange(0, BLOCK // PER), tl.arange(0, BLOCK)
    w, w_up, of_w, of_up, norm = (), (), (), (), ()
    for i in tl.static_range(BLOCKS):
        inside = is_row[:, None]
        if BLOCK * BLOCKS != NUM_IN:
            inside = inside & (i * (BLOCK // PER) + piece < NUM_IN // PER)[None, :]
        weight_ptrs = weight_ptr + row.to(tl.int64)[:, None] * (NUM_IN // PER) + (i * (BLOCK // PER) + piece)[None, :]
        w = w + (tl.load(weight_ptrs, mask=inside, other=0.0, eviction_policy="evict_first"),)
        of_w = of_w + (_load_scales(scales_ptr, row, is_row, i, GROUPS, ALL, BY_OUTPUT),)
        if GATED:
            weight_ptrs += num_out.to(tl.int64) * (NUM_IN // PER)
            w_up = w_up + (tl.load(weight_ptrs, mask=inside, other=0.0, eviction_policy="evict_first"),)
            of_up = of_up + (_load_scales(scales_ptr, num_out + row, is_row, i, GROUPS, ALL, BY_OUTPUT),)
        if norm_weight_ptr is not None:
            norm_ptrs = norm_weight_ptr + i * BLOCK + column
            norm = norm + (tl.load(norm_ptrs, mask=i * BLOCK + column < NUM_IN, other=0.0),)
    if PDL:
        gdc_wait()

    if x_scales_ptr is not None:
        q, of_groups, scale = _load_quantized(x_ptr, x_scales_ptr, NUM_IN, BLOCK, BLOCKS, BY_BLOCK, IN_WORDS)
    else:
        HAS_NORM: tl.constexpr = norm_weight_ptr is not None
        q, of_groups, scale = _quantize(
            x_ptr, given_scale_ptr, norm, eps, NUM_IN, BLOCK, BLOCKS, QUANTIZED_DTYPE, HAS_NORM, BY_BLOCK, IN_WORDS
        )
    EXACT: tl.constexpr = tl.int8 == QUANTIZED_DTYPE and not BY_BLOCK
    sums = tl.zeros([ROWS], tl.int32 if EXACT else tl.float32)
    sums_up = tl.zeros([ROWS], tl.int32 if EXACT else tl.float32)
    for i in tl.static_range(BLOCKS):
        of_group = of_groups[i] if BY_BLOCK else 1.0
        sums += _times(w[i], q[i], of_group, of_w[i], BLOCK, BY_BLOCK)
        if GATED:
            sums_up += _times(w_up[i], q[i], of_group, of_up[i], BLOCK, BY_BLOCK)

    y = sums.to(tl.float32)
    if not BY_BLOCK:
        y = y * scale * of_w[0]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    if GATED:
        up = sums_up.to(tl.float32)
        if not BY_BLOCK:
            up = up * scale * of_up[0]
        if bias_ptr is not None:
            up += tl.load(bias_ptr + num_out + row, mask=is_row, other=0.0).to(tl.float32)
        y = y * tl.sigmoid(y) * up
    if residual_ptr is not None:
        y += tl.load(residual_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=is_row)


def scaled_gemv_triton(
    x: torch.Tensor | QuantizedRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    input_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `scaled_gemv_reference` for one row of contiguous tensors, in float32 except for integers and their sums.

    Args:
        x: [1, in]; or a quantized row, if there is no norm.
        weight: the inputs are a multiple of 16; with scales of blocks and `gated`, the outputs one of 128.
        dtype: of the result of a quantized x.
    """
    row, x_scales = x if isinstance(x, QuantizedRows) else (x, None)
    assert row.shape[0] == 1 and weight.shape[1] % 16 == 0 and (norm is None or x_scales is None)
    num_in, num_out = weight.shape[1], weight.shape[0] // (2 if gated else 1)
    kind = scale_kind(weight, scales)
    assert kind != "block" or not gated or num_out % GROUP == 0
    out = torch.empty((1, num_out), dtype=dtype or row.dtype, device=row.device)
    norm_weight, eps = norm or (None, 0.0)
    block, rows, num_warps = _shape(num_in, gated)
    quantized_dtype = tl.int8 if weight.dtype == torch.int8 else tl.float8e4nv
    if weight.dtype == torch.int8 and kind != "block" and not is_amd(row.device):
        weight = weight.view(torch.int32)
        row = row if x_scales is None else row.view(torch.int32)
    _scaled_gemv[(triton.cdiv(num_out, rows),)](
        x_ptr=row,
        x_scales_ptr=x_scales,
        weight_ptr=weight,
        scales_ptr=scales,
        given_scale_ptr=input_scale,
        bias_ptr=bias,
        norm_weight_ptr=norm_weight,
        residual_ptr=residual,
        out_ptr=out,
        eps=eps,
        num_out=num_out,
        NUM_IN=num_in,
        BLOCK=block,
        BLOCKS=triton.cdiv(num_in, block),
        ROWS=rows,
        QUANTIZED_DTYPE=quantized_dtype,
        BY_OUTPUT=kind == "output",
        BY_BLOCK=kind == "block",
        GATED=gated,
        num_warps=num_warps,
        **launch_options(row.device),
    )
    return out


def _shape(num_in: int, gated: bool) -> tuple[int, int, int]:
    """(inputs of a block, rows of the weight or of each of its halves, warps) of a program."""
    if num_in <= _LONGEST:
        blocks = [max(triton.next_power_of_2(num_in), GROUP), *(size for size in (512, 1024, 2048) if size < num_in)]
    else:
        blocks = [512, 1024, 2048, _LONGEST]
    # What is behind the end is computed with as well; a block's own cost is about that of 16 inputs.
    block = min(blocks, key=lambda size: triton.cdiv(num_in, size) * (size + 16))
    padded = triton.cdiv(num_in, block) * block
    rows = 8 if padded <= _LONGEST else 4
    num_warps = triton.next_power_of_2(max(rows * padded // (_VALUES_PER_THREAD * 32), 1))
    return block, rows // 2 if gated else rows, min(num_warps, 16)
