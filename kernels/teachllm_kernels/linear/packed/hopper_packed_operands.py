"""A packed weight as the left operand of Hopper's tensor cores, and its scales in the layout that this needs.

Quantized values lie in shared memory as `packed_weight.py` has them, so a thread reads sixteen consecutive bytes and
dequantizes two values at a time, in the two halves of a word:

    4 bits     a mask puts the value where a float of 128 has its last digits, and 128 + zero is subtracted
    8 bits     the same with seven bits; the highest bit decides between subtracting 128 and 256
    e2m1       sign, exponent and digit move to those of a float that is 2^126 times too small. The scales make up for
               one half of that factor, the sum for the other: at no time is a value too large or too small
    scales     one of 11 binary digits is the sum of two bfloat16, high and low. value * low is exact for 4 bits, and
               value * high plus that is rounded once, as in the definition; with 8 bits it is rounded, too

Source: that of `packed_dequantize.py`; PTX ISA, "Matrix Fragments for wgmma.mma_async.m64nNk16".
"""

from __future__ import annotations

from functools import cache

from teachllm_kernels._triton import gl, gluon

__all__ = ["MISSING", "TILE_K", "groups_layout", "late_scales", "operand", "words_layout"]

TILE_K = gl.constexpr(128)  # inputs per tile
MISSING = gl.constexpr(2.0**63)  # factor for the sums of e2m1, and for their scales
_SUB_BF16 = gl.constexpr("sub.rn.bf16x2 $0, $1, $2;")
_SUB_F16 = gl.constexpr("sub.rn.f16x2 $0, $1, $2;")
_MUL_BF16 = gl.constexpr("mul.rn.bf16x2 $0, $1, $2;")
_FMA_BF16 = gl.constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")
_ROUND_TWICE = gl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")


@cache
def words_layout(blocks_k: int) -> gl.DistributedLinearLayout:
    """Return which thread loads which of [4 blocks, rows of 32 words, words]: a warp per block, 4 words per
    thread.
    """
    of_thread = [[0, 0, 1], [0, 0, 2], *([0, 4 << i, 0] for i in range(blocks_k.bit_length() - 1))]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]]
    return gl.DistributedLinearLayout(of_thread, lanes, [[1, 0, 0], [2, 0, 0]], [], [4, 4 * blocks_k, 32])


@cache
def groups_layout(num_groups: int) -> gl.DistributedLinearLayout:
    """Return which thread loads which of [4 blocks, (group, g, i)]: the scales of outputs g and g + 8, all
    groups.
    """
    of_thread = [[0, 1], *([0, 16 << i] for i in range(num_groups.bit_length() - 1))]
    lanes = [[0, 0], [0, 0], [0, 2], [0, 4], [0, 8]]
    return gl.DistributedLinearLayout(of_thread, lanes, [[1, 0], [2, 0]], [], [4, 16 * num_groups])


@gluon.jit
def _asm(ASM: gl.constexpr, a, b):
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _both_halves(x):
    """Round float32 to bfloat16 and return it in both halves of a word."""
    return gl.inline_asm_elementwise(_ROUND_TWICE, "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _floats(values, magic, BITS: gl.constexpr, DTYPE: gl.constexpr):
    """Turn pairs of values, at the lowest bits of both halves, into 16-bit floats, too large by a constant."""
    if BITS == 8 and gl.bfloat16 == DTYPE:
        return _asm(_SUB_BF16, (values & 0x007F007F) | magic, (values & 0x00800080) ^ (magic | 0x00800080))
    return (values & (0x00FF00FF if BITS == 8 else 0x000F000F)) | magic


@gluon.jit
def _e2m1(words, FROM: gl.constexpr):
    """Turn the e2m1 values from bit FROM on into pairs of bfloat16 that are 2^126 times too small."""
    signs = (words << (12 - FROM)) & -0x7FFF8000  # 0x80008000
    if FROM > 6:
        return signs | ((words >> (FROM - 6)) & 0x01C001C0)
    else:
        return signs | ((words << (6 - FROM)) & 0x01C001C0)


@gluon.jit
def _pairs(words, magic, BLOCKS_K: gl.constexpr, BITS: gl.constexpr, IS_E2M1: gl.constexpr, DTYPE: gl.constexpr):
    """Turn [4, 4 * BLOCKS_K, 32] words into [64 outputs, 64] pairs of floats: too large, or for e2m1 too small."""
    if BITS == 8:
        words = words.reshape([4, BLOCKS_K, 8, 4, 2, 2])  # block, k block, g, q, step, i
        found = gl.join(_floats(words, magic, 8, DTYPE), _floats(words >> 8, magic, 8, DTYPE))  # j
    else:
        words = words.reshape([4, BLOCKS_K, 8, 4, 4])
        if IS_E2M1:
            low = gl.join(_e2m1(words, 0), _e2m1(words, 4))
            high = gl.join(_e2m1(words, 8), _e2m1(words, 12))
        else:
            low = gl.join(_floats(words, magic, 4, DTYPE), _floats(words >> 4, magic, 4, DTYPE))
            high = gl.join(_floats(words >> 8, magic, 4, DTYPE), _floats(words >> 12, magic, 4, DTYPE))
        found = gl.join(low, high)
    return found.permute((0, 5, 2, 1, 4, 6, 3)).reshape([64, 64])


@gluon.jit
def _of_outputs(loaded, LAYOUT: gl.constexpr):
    """Reorder [4, 16 * groups], as stored, to [64 outputs, groups]."""
    GROUPS: gl.constexpr = loaded.shape[1] // 16
    by_output = loaded.reshape([4, GROUPS, 8, 2]).permute((0, 3, 2, 1)).reshape([64, GROUPS])
    return gl.convert_layout(by_output, LAYOUT, assert_trivial=True)


@gluon.jit
def operand(
    buffers, at, magic,
    BITS: gl.constexpr, IS_E2M1: gl.constexpr, DTYPE: gl.constexpr, WORDS: gl.constexpr, BY_GROUP: gl.constexpr,
    PRODUCT: gl.constexpr,
):  # fmt: skip
    """Return a tile's left operand, [64 outputs, TILE_K]: integers, or, if groups are short, scaled values."""
    w, scales, zeros, _, _, _ = buffers
    BLOCKS_K: gl.constexpr = w.shape[2] // 4
    GROUPS: gl.constexpr = scales.shape[2] // 16
    pairs = _pairs(w.index(at).load(WORDS), magic, BLOCKS_K, BITS, IS_E2M1, DTYPE)
    pairs = pairs.reshape([64, GROUPS, 64 // GROUPS])
    OF_GROUPS: gl.constexpr = gl.SliceLayout(2, pairs.type.layout)
    SUB: gl.constexpr = _SUB_F16 if gl.float16 == DTYPE else _SUB_BF16
    if zeros.dtype == gl.uint8:
        zero = _floats(zeros.index(at).slice(0, 4).load(BY_GROUP).to(gl.int32) * 0x10001, magic, BITS, DTYPE)
        pairs = _asm(SUB, pairs, _of_outputs(zero, OF_GROUPS)[:, :, None])
    elif not IS_E2M1 and (BITS == 4 or gl.float16 == DTYPE):
        pairs = _asm(SUB, pairs, magic + (0x00080008 if BITS == 4 else 0x00800080))
    if GROUPS > 1:
        scale = scales.index(at).load(BY_GROUP).to(gl.float32)
        if IS_E2M1:
            scale *= MISSING
        high = _both_halves(scale)
        factor = _of_outputs(high, OF_GROUPS)[:, :, None]
        if scales.dtype == gl.bfloat16:
            pairs = _asm(_MUL_BF16, pairs, factor)
        else:
            low = _both_halves(scale - (high << 16).to(gl.float32, bitcast=True))
            rest = _asm(_MUL_BF16, pairs, _of_outputs(low, OF_GROUPS)[:, :, None])
            pairs = gl.inline_asm_elementwise(
                _FMA_BF16, "=r,r,r,r", [pairs, factor, rest], dtype=gl.int32, is_pure=True, pack=1
            )
    dequantized = gl.join(_low_half(pairs, DTYPE), _low_half(pairs >> 16, DTYPE)).reshape([64, TILE_K])
    return gl.convert_layout(dequantized, gl.DotOperandLayout(0, PRODUCT, 2), assert_trivial=True)


@gluon.jit
def _low_half(words, DTYPE: gl.constexpr):
    return words.to(gl.int16).to(DTYPE, bitcast=True)


@gluon.jit
def late_scales(scales, BY_GROUP: gl.constexpr, PRODUCT: gl.constexpr):
    """Return the scales of a tile's outputs, [64, 1]."""
    loaded = scales.load(BY_GROUP).to(gl.float32)
    by_output = loaded.reshape([4, 8, 2]).permute((0, 2, 1)).reshape([64])
    return gl.convert_layout(by_output, gl.SliceLayout(1, PRODUCT), assert_trivial=True)[:, None]
