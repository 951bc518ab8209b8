"""Quantized K and V as operands of Hopper's tensor cores: they are dequantized on their way through registers.

The copy engine brings quantized values to shared memory, but a float16 product reads its right operand from there as
float16. Its left operand may come from registers. Decodes have K and V on the left (`hopper_decode.py` says why), so
quantized values need no second place: a thread loads them, converts them and multiplies.

Of each operand a thread holds scattered pairs of neighbours; loading them like that would take one instruction per
pair. But the order of the terms of a dot product is free if both sides have the same one, and so is the order of a
result's rows. So the operands' columns and rows are renumbered such that a thread holds values that lie side by side:

    K    [keys, channels]: 16 or 32 channels of a key. q's channels are put in the same order once
    V^T  [channels, keys]: 2 or 4 channels of a key. The rows of the sums come in that order, see `channel_of`

Either way every bank of shared memory is read once. The definitions are those of `kv_quantization.py`.

Source: CUTLASS's mixed-input products for Hopper have the idea of shuffled columns.
"""

from __future__ import annotations

from functools import cache

from teachllm_kernels._triton import gl, gluon


@cache
def key_layout(tile: int, head_size: int) -> gl.DistributedLinearLayout:
    """Return which of four warps' threads loads which values of K, [tile, head_size], as in a left operand."""
    num_bits = head_size.bit_length() - 1
    channels = [[0, 1 << i] for i in range(num_bits)]
    keys = [[8, 0], *([64 << i, 0] for i in range(tile.bit_length() - 7))]
    lanes = [*channels[-2:], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(channels[:-2] + keys, lanes, [[16, 0], [32, 0]], [], [tile, head_size])


@cache
def value_layout(tile: int, head_size: int) -> gl.DistributedLinearLayout:
    """Return the same for V, whose channels are the rows."""
    num_bits = head_size.bit_length() - 1
    channels = [[0, 1 << i] for i in range(num_bits)]
    keys = [[1, 0], *([8 << i, 0] for i in range(tile.bit_length() - 4))]
    lanes = [[2, 0], [4, 0], *channels[-5:-2]]
    return gl.DistributedLinearLayout(channels[:-5] + keys, lanes, channels[-2:], [], [tile, head_size])


# Convert four int8 to float16: x + 128 becomes the last bits of the float 1024 + x + 128.
_INTEGERS = gl.constexpr("""{
.reg .b32 shifted, offset;
xor.b32 shifted, $2, 0x80808080;
mov.b32 offset, 0x64806480;
prmt.b32 $0, shifted, 0x64646464, 0x4140;
prmt.b32 $1, shifted, 0x64646464, 0x4342;
sub.f16x2 $0, $0, offset;
sub.f16x2 $1, $1, offset;
}""")


@gluon.jit
def dequantize_unscaled(quantized):
    """Convert to float16 like `kv_quantization.dequantize_unscaled`; a thread holds values in groups of four."""
    if quantized.dtype == gl.int8:
        return gl.inline_asm_elementwise(_INTEGERS, "=r,=r,r", [quantized], dtype=gl.float16, is_pure=True, pack=4)
    return quantized.to(gl.float16)


@gluon.jit
def in_order_of_keys(x):
    """Reorder [rows, channels] of K or q: the channels come in the order in which they are multiplied."""
    STEPS: gl.constexpr = x.shape[1] // 16
    return x.reshape([x.shape[0], 4, STEPS, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([x.shape[0], 16 * STEPS])


@gluon.jit
def in_order_of_values(x):
    """Reorder [channels, keys] of V^T: the channels come in the order in which their sums come, see `channel_of`."""
    PAIRS: gl.constexpr = x.shape[0] // 64
    rows = x.reshape([4, 8, PAIRS, 2, x.shape[1]]).permute((2, 0, 3, 1, 4))
    return rows.reshape([64 * PAIRS, x.shape[1]])


@gluon.jit
def key_operand(quantized, LOADED: gl.constexpr, PRODUCT: gl.constexpr):
    """Load K [tile, channels] from shared memory as a left operand; `LOADED` is its `key_layout`."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    return gl.convert_layout(
        in_order_of_keys(dequantize_unscaled(quantized.load(LOADED))), OPERAND, assert_trivial=True
    )


@gluon.jit
def value_operand(quantized, num_keys, LOADED: gl.constexpr, PRODUCT: gl.constexpr):
    """Load V^T [channels, tile] from shared memory as a left operand; `LOADED` is its `value_layout`.

    Keys from `num_keys` on are set to 0: those slots were never written, and 0 * NaN is NaN.
    """
    TILE: gl.constexpr = quantized.shape[0]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    values = dequantize_unscaled(quantized.load(LOADED))
    if num_keys < TILE:
        values = gl.where((gl.arange(0, TILE, gl.SliceLayout(1, LOADED)) < num_keys)[:, None], values, 0.0)
    return gl.convert_layout(in_order_of_values(values.permute((1, 0))), OPERAND, assert_trivial=True)


@gluon.jit
def channel_of(row, D: gl.constexpr):
    """Return the channel of V that a row of V^T holds."""
    return ((row // 16 % 4 * 8 + row % 8) * (D // 64) + row // 64) * 2 + row // 8 % 2


@gluon.jit
def quantize_kv(x, scale, CACHE_DTYPE: gl.constexpr):
    """Quantize like `kv_quantization.quantize_kv_reference`, after rounding to the model's dtype."""
    steps = gl.div_rn(x.to(gl.float32), scale)
    if gl.int8 == CACHE_DTYPE:
        clamped = gl.minimum(gl.maximum(steps, -127.0), 127.0)
        return (clamped + 12582912.0 - 12582912.0).to(gl.int8)
    return gl.minimum(gl.maximum(steps, -448.0), 448.0).to(CACHE_DTYPE)


@gluon.jit
def multiplicand(x):
    """Convert q like `kv_quantization.multiplicand`, to float16."""
    return gl.minimum(gl.maximum(x.to(gl.float32), -65504.0), 65504.0).to(gl.float16)
