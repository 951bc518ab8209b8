"""Dequantize the words of a `PackedWeight` in registers: what its kernels share.

Converting integers to floating point is slow next to masks. But bits can be put where a float has its last digits: with
a quantized value q of 4 bits there, a bfloat16 of 128.0 becomes 128 + q, and subtracting 128 + zero leaves q - zero,
exactly. A word's two halves are two such floats, so a shift, a mask with an or, and a subtraction make two at once:

    bfloat16, 4 bits    0x4300 | q      128 + q
    bfloat16, 8 bits    the lower seven bits likewise; the highest decides whether 128 or 256 is subtracted: q - 128
    float16             0x6400 | q      1024 + q, with 8 bits, too
    float32             0x4b000000 | q  2^23 + q
    e2m1                sign, exponent and digit are moved to a float's, times the difference of the exponents' biases

Source: Kim et al., "Who Says Elephants Can't Run", 2022, for floats made with masks.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import tl, triton
from teachllm_kernels.linear.packed.packed_weight import PackedWeight

__all__ = [
    "conversion",
    "dequantize_unscaled",
    "halves",
    "load_pairs",
    "nibbles",
    "of_steps",
    "pairs_of_zeros",
    "scale_step",
    "scaled",
]


def conversion(dtype: torch.dtype, weight: PackedWeight) -> int:
    """Return the bits of the float that quantized values are added to, for `dequantize_unscaled` or `nibbles`.

    They are an argument of a kernel, not a constant: the GPU's instruction for `word & mask | bits` takes one constant,
    and with two constants the compiler makes two instructions.
    """
    if weight.is_e2m1:
        return 0
    if dtype == torch.float16:
        return 0x64006400
    return 0x43004300 if dtype == torch.bfloat16 else 0x4B000000


def pairs_of_zeros(weight: PackedWeight) -> torch.Tensor | None:
    """Return zeros as [num_blocks, num_groups, 8] int16 pairs: with bytes, Triton would lay out fragments for
    bytes.
    """
    return None if weight.zeros is None else weight.zeros.view(torch.int16).squeeze(-1)


def scale_step(weight: PackedWeight) -> int:
    """Return the number of inputs that certainly share a scale: all of a block, or 32, or 16."""
    if weight.scales.shape[1] == 1:
        return weight.block_k
    return next(step for step in (64, 32, 16) if step <= weight.block_k and weight.group_size % step == 0)


@triton.jit
def dequantize_unscaled(
    words, zeros, magic,
    DTYPE: tl.constexpr, BITS: tl.constexpr, IS_E2M1: tl.constexpr, HAS_ZEROS: tl.constexpr,
    IS_RAW: tl.constexpr = False,
):  # fmt: skip
    """Return quantized value - zero for some blocks, exactly.

    Args:
        words: [num_blocks, 128] int32.
        zeros: [num_blocks, 8, 4, 16 / BITS] int16 from `pairs_of_zeros`, if there are any.
        magic: from `conversion`.

    Returns:
        [num_blocks, 8, 4, 16 / BITS, 2, 2, 2] of DTYPE: [a, b, c, d, e, f, g] is the value of block a, output 8 * e
        + b and input 16 * d + 8 * f + 2 * c + g.
    """
    words = words.to(tl.uint32, bitcast=True)
    IS_HALF: tl.constexpr = tl.float16 == DTYPE
    IN_HALVES: tl.constexpr = IS_HALF or tl.bfloat16 == DTYPE
    IN_TWO: tl.constexpr = BITS == 8 and tl.bfloat16 == DTYPE
    if IS_E2M1 and IN_HALVES:
        UP: tl.constexpr = 9 if IS_HALF else 6  # shift from e2m1's exponent to a float's
        pairs = tl.join(
            tl.join(_e2m1(words, 0, UP), _e2m1(words, 4, UP)), tl.join(_e2m1(words, 8, UP), _e2m1(words, 12, UP))
        )
    elif BITS == 4:
        MASK: tl.constexpr = 0x000F000F
        pairs = tl.join(tl.join(words & MASK, (words >> 4) & MASK), tl.join((words >> 8) & MASK, (words >> 12) & MASK))
    else:
        pairs = tl.join(words & 0x00FF00FF, (words >> 8) & 0x00FF00FF)
    if IS_E2M1 and not IN_HALVES:
        low, high = _wide_e2m1(pairs & 0xF), _wide_e2m1(pairs >> 16)
    elif IN_HALVES:
        if not (IS_E2M1 or IN_TWO):
            pairs = pairs | magic
        low, high = _halves(pairs, magic, DTYPE, IN_TWO)
    else:
        low, high = _float(pairs & 0xFFFF, magic), _float(pairs >> 16, magic)
    found = tl.reshape(tl.join(low, high), [words.shape[0], 8, 4, 16 // BITS, 2, 2, 2])
    if IS_E2M1:
        found = found * (16384.0 if IS_HALF else 2.0**126)
    elif IS_RAW or (IN_TWO and not HAS_ZEROS):
        found = found
    elif HAS_ZEROS:
        zeros = zeros.to(tl.uint16, bitcast=True).to(tl.uint32)
        zeros = tl.join(zeros & 0xFF, zeros >> 8)
        if IN_HALVES:  # made from one word, like the values, so that the compiler sees one subtraction in two halves
            zeros = zeros * 0x10001
            if not IN_TWO:
                zeros = zeros | magic
            low, high = _halves(zeros, magic, DTYPE, IN_TWO)
            found = found - tl.join(low, high)[:, :, :, :, :, None, :]
        else:
            found = found - _float(zeros, magic)[:, :, :, :, :, None, None]
    else:
        BASE: tl.constexpr = (1024 if IS_HALF else 128) if IN_HALVES else 1 << 23
        found = found - float(BASE + 2 ** (BITS - 1))
    return found.to(DTYPE)


@triton.jit
def nibbles(words, magic, DTYPE: tl.constexpr, FROM: tl.constexpr):
    """Return 128 + the four bits from bit FROM of 8-bit values, as bfloat16.

    The arguments and the shape of the result are those of `dequantize_unscaled`.
    """
    words = words.to(tl.uint32, bitcast=True)
    pairs = tl.join((words >> FROM) & 0x000F000F, (words >> (FROM + 8)) & 0x000F000F) | magic
    found = tl.join(_low_half(pairs, DTYPE), _low_half(pairs >> 16, DTYPE))
    return tl.reshape(found, [words.shape[0], 8, 4, 2, 2, 2, 2])


@triton.jit
def load_pairs(values_ptr, pair, mask):
    """Load values 2 * pair and 2 * pair + 1: as words for `halves` if they have 16 bits, otherwise [..., 2].

    A loop that loads an iteration ahead should load words: two 16-bit values take a register each, and putting them
    there waits for the load.
    """
    if values_ptr.dtype.element_ty.primitive_bitwidth == 16:
        return tl.load(values_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + pair, mask=mask, other=0)
    else:
        two = tl.arange(0, 2)
        for _ in tl.static_range(len(pair.shape)):
            two = tl.expand_dims(two, 0)
        mask = tl.expand_dims(mask, len(pair.shape))
        return tl.load(values_ptr + tl.expand_dims(pair, len(pair.shape)) * 2 + two, mask=mask, other=0.0)


@triton.jit
def halves(pairs, DTYPE: tl.constexpr):
    """Return the values that `load_pairs` loaded: [..., 2] of DTYPE."""
    if DTYPE.primitive_bitwidth == 16:
        return tl.join(_low_half(pairs, DTYPE), _low_half(pairs >> 16, DTYPE))
    else:
        return pairs


@triton.jit
def of_steps(of_groups, KB: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, LAST: tl.constexpr):
    """Repeat a value per group and block for the group's inputs.

    Args:
        of_groups: [num_groups * BLOCKS, 32 threads, LAST], groups that divide KB blocks' inputs equally.

    Returns:
        [KB * BLOCKS, 8, 4, STEPS, LAST] for the blocks of `dequantize_unscaled`, whose first dimension is
        (k block, block).
    """
    GROUPS: tl.constexpr = of_groups.numel // (BLOCKS * 32 * LAST)
    by_group = tl.permute(tl.reshape(of_groups, [GROUPS, 1, BLOCKS, 8, 4, LAST]), [2, 3, 4, 0, 1, 5])
    by_step = tl.broadcast_to(by_group, [BLOCKS, 8, 4, GROUPS, KB * STEPS // GROUPS, LAST])
    by_step = tl.permute(tl.reshape(by_step, [BLOCKS, 8, 4, KB, STEPS, LAST]), [3, 0, 1, 2, 4, 5])
    return tl.reshape(by_step, [KB * BLOCKS, 8, 4, STEPS, LAST])


@triton.jit
def scaled(found, scale):
    """Multiply the result of `dequantize_unscaled`, [..., 2, 2, 2], by the scales of outputs g and g + 8, [..., 2].

    The product is rounded once.
    """
    if scale.dtype == found.dtype and found.dtype != tl.float32:  # made from one word, as above
        twice = scale.to(tl.uint16, bitcast=True).to(tl.uint32) * 0x10001
        twice = tl.join(_low_half(twice, scale.dtype), _low_half(twice >> 16, scale.dtype))
        return found * twice[:, :, :, :, :, None, :]
    else:
        return (found.to(tl.float32) * scale.to(tl.float32)[:, :, :, :, :, None, None]).to(found.dtype)


@triton.jit
def _low_half(words, DTYPE: tl.constexpr):
    return words.to(tl.uint16).to(DTYPE, bitcast=True)


@triton.jit
def _halves(pairs, magic, DTYPE: tl.constexpr, IN_TWO: tl.constexpr):
    """Return the floats in both halves, or, if `IN_TWO`, q - 128 of the quantized values q in them."""
    if IN_TWO:
        rest, taken = (pairs & 0x007F007F) | magic, (pairs & 0x00800080) ^ (magic | 0x00800080)
        low = _low_half(rest, DTYPE) - _low_half(taken, DTYPE)
        return low, _low_half(rest >> 16, DTYPE) - _low_half(taken >> 16, DTYPE)
    else:
        return _low_half(pairs, DTYPE), _low_half(pairs >> 16, DTYPE)


@triton.jit
def _float(values, magic):
    return (values | magic).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(words, AT: tl.constexpr, UP: tl.constexpr):
    """Turn the e2m1 values at bit AT of both halves into 16-bit floats whose exponents are too small."""
    return (_moved(words, 12 - AT) & 0x80008000) | (_moved(words, UP - AT) & ((7 << UP) | (7 << (UP + 16))))


@triton.jit
def _wide_e2m1(values):
    """Turn e2m1 values into float32 whose exponents are too small."""
    return (((values & 8) << 28) | ((values & 7) << 22)).to(tl.float32, bitcast=True)


@triton.jit
def _moved(words, UP: tl.constexpr):
    if UP >= 0:
        return words << UP
    else:
        return words >> -UP
