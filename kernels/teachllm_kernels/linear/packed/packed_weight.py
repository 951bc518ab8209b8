"""A 4-bit or 8-bit weight with group scales, laid out so that a GPU's threads load in one read what they multiply.

Tensor cores multiply fragments: a warp's 32 threads hold a tile of 16 outputs x 16 inputs, and thread 4 * g + q has the
values of outputs g and g + 8 at inputs 2q, 2q + 1, 2q + 8 and 2q + 9. Quantized values are stored in that order, so
they go from memory to registers, are dequantized there and multiplied, without any exchange between threads:

    block   16 outputs x 64 inputs of 4-bit values (32 of 8-bit ones) are 512 bytes in one run: 16 bytes per thread
    word    32 bits of a thread's 16 bytes, in two halves: values of inputs 2q in the lower half, of 2q + 1 in the upper
            half, at the same bits. One mask and one shift serve both, and each half becomes a 16-bit float
    scales  of an output's groups, 16 outputs side by side, g and g + 8 next to each other: one read for both

    4 bits  word s is the 16 inputs from 16s on: (g, 2q), (g + 8, 2q), (g, 2q + 8), (g + 8, 2q + 8) from the lowest bit
    8 bits  words 2s and 2s + 1 are g and g + 8 at the 16 inputs from 16s on: 2q, 2q + 8

Outputs are padded to multiples of 16, inputs to multiples of 64. Padding has zeros as values and scales. With gate
above up, a block has 8 outputs of each: the thread that has a gate also has its up, see `PackedWeight.is_gated`.

Source: Frantar et al., "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models", 2024, for
values in the order of fragments; PTX ISA, "Matrix Fragments for mma.m16n8k16".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from teachllm_kernels.linear.gemv import gemv_reference

__all__ = ["PackedWeight", "cost", "dequantize_reference", "pack", "packed_linear_reference", "unpack"]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by a 4-bit float's lower three bits; the fourth is the sign
INPUTS_OF_A_STEP = 16  # inputs that tensor cores multiply at once: a group is a multiple, or the whole row
_PAD_IN = 64  # a multiple of every block's inputs


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight laid out by `pack`.

    Attributes:
        qweight: [num_blocks, num_in / block_k, 32 threads, 4 words] int32, the quantized values; sizes rounded up.
        scales: [num_blocks, num_groups, 8, 2], as stored: of output 16 * i + 8 * k + j at [i, :, j, k].
        zeros: uint8 like scales, the zero points; None: the middle value, 2^(bits - 1), or that of e2m1.
        bits: bits per value, 4 or 8.
        group_size: inputs that share a scale.
        num_in: inputs, without padding.
        num_out: outputs, without padding.
        is_e2m1: the values are 4-bit floats.
        is_gated: block i has gates 8 * i to 8 * i + 7 instead of outputs g, and their ups instead of outputs g + 8.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group_size: int
    num_in: int
    num_out: int
    is_e2m1: bool = False
    is_gated: bool = False

    @property
    def block_k(self) -> int:
        """The number of inputs per block."""
        return 256 // self.bits

    @property
    def num_bytes(self) -> int:
        """The bytes that a product must read."""
        tensors = (self.qweight, self.scales) if self.zeros is None else (self.qweight, self.scales, self.zeros)
        return sum(tensor.nbytes for tensor in tensors)


def pack(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    is_e2m1: bool = False,
    is_gated: bool = False,
) -> PackedWeight:
    """Lay quantized values out for the kernels, on their own device; takes about three times the result's memory.

    Args:
        qweight: [num_out, num_in] uint8, 0 to 2^bits - 1; merged projections one above the other.
        scales: [num_out, num_groups], 2-byte floats or float32; groups are equal runs of inputs.
        zeros: [num_out, num_groups] integers, 0 to 2^bits - 1, the zero points; None: the middle value. Not for e2m1.
        bits: 4 or 8.
        is_e2m1: the values are 4-bit floats.
        is_gated: the first half of the outputs are gates, the second their ups. Any product takes such a weight, and
            one that ends in silu(gate) * up is computed in one kernel.

    Raises:
        ValueError: there are several groups whose size is not a multiple of 16 inputs.
    """
    num_out, num_in = qweight.shape
    num_groups = scales.shape[1]
    group_size = num_in // num_groups
    assert bits in (4, 8) and qweight.dtype == torch.uint8 and not (is_e2m1 and (bits != 4 or zeros is not None))
    if num_groups * group_size != num_in or (num_groups > 1 and group_size % INPUTS_OF_A_STEP):
        raise ValueError(
            f"{num_groups} groups of {num_in} inputs cannot be multiplied packed: a group must be a multiple of 16 "
            "inputs, or all of them; dequantize this weight when it is loaded"
        )
    rows = _by_block(torch.nn.functional.pad(qweight, (0, -num_in % _PAD_IN)), is_gated)  # block, i, g, inputs
    num_blocks = rows.shape[0]
    if bits == 4:
        both = (rows[:, 0] | (rows[:, 1] << 4)).reshape(num_blocks, 8, -1, 4, 2, 4, 2)  # block, g, k, s, j, q, h
        in_order = both.permute(0, 2, 1, 5, 3, 6, 4)  # block, k, g, q, s, h, j
    else:
        each = rows.reshape(num_blocks, 2, 8, -1, 2, 2, 4, 2)  # block, i, g, k, s, j, q, h
        in_order = each.permute(0, 3, 2, 6, 4, 1, 7, 5)  # block, k, g, q, s, i, h, j
    words = in_order.contiguous().view(num_blocks, -1, 32, 16).view(torch.int32)
    return PackedWeight(
        qweight=words,
        scales=_by_block(scales, is_gated).permute(0, 3, 2, 1).contiguous(),
        zeros=None if zeros is None else _by_block(zeros.to(torch.uint8), is_gated).permute(0, 3, 2, 1).contiguous(),
        bits=bits,
        group_size=group_size,
        num_in=num_in,
        num_out=num_out,
        is_e2m1=is_e2m1,
        is_gated=is_gated,
    )


def unpack(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return what `pack` was given: (qweight [num_out, num_in] uint8, scales [num_out, num_groups], zeros int32 or
    None).
    """
    num_blocks = weight.qweight.shape[0]
    in_order = weight.qweight.view(torch.uint8)
    if weight.bits == 4:
        both = in_order.view(num_blocks, -1, 8, 4, 4, 2, 2).permute(0, 2, 1, 4, 6, 3, 5)  # block, g, k, s, j, q, h
        rows = torch.stack((both & 15, both >> 4), dim=1)
    else:
        each = in_order.view(num_blocks, -1, 8, 4, 2, 2, 2, 2)
        rows = each.permute(0, 5, 2, 1, 4, 7, 3, 6)  # block, i, g, k, s, j, q, h
    qweight = _by_output(rows.reshape(num_blocks, 2, 8, -1), weight)[:, : weight.num_in].contiguous()
    zeros = None if weight.zeros is None else _by_output(weight.zeros.permute(0, 3, 2, 1), weight).to(torch.int32)
    return qweight, _by_output(weight.scales.permute(0, 3, 2, 1), weight), zeros


def dequantize_reference(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return [num_out, num_in]: (qweight - zero) * scale in float32 (float64 for that dtype), rounded once."""
    qweight, scales, zeros = unpack(weight)
    wide = torch.promote_types(dtype, torch.float32)
    if weight.is_e2m1:
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=qweight.device, dtype=wide)
        steps = table[qweight.long()]
    else:
        zero = 1 << (weight.bits - 1) if zeros is None else zeros.repeat_interleave(weight.group_size, dim=1)
        steps = (qweight.to(torch.int32) - zero).to(wide)
    return (steps * scales.to(wide).repeat_interleave(weight.group_size, dim=1)).to(dtype)


def packed_linear_reference(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """The definition: `gemv_reference` with the dequantized weight rounded to x's dtype.

    The kernels skip that rounding where this is cheaper: they sum up (qweight - zero) * x, which is exact, and multiply
    a group's sum by its scale. That is closer to the quantized weight's meaning, and equal within a product's rounding.
    """
    return gemv_reference(x, dequantize_reference(weight, x.dtype), bias, norm, residual, gated)


def cost(num_rows: int, weight: PackedWeight, dtype_bytes: int = 2, gated: bool = False) -> tuple[int, int]:
    """Return (bytes, FLOPs) that any implementation must spend: x in, the result out, the packed weight once."""
    num_out = weight.num_out // (2 if gated else 1)
    activations = num_rows * (weight.num_in + num_out) * dtype_bytes
    return weight.num_bytes + activations, 2 * num_rows * weight.num_in * weight.num_out


def _by_block(of_outputs: torch.Tensor, is_gated: bool) -> torch.Tensor:
    """Reshape [num_out, ...] to [num_blocks, 2, 8, ...], padded with zeros."""
    size = of_outputs.shape[-1]
    if is_gated:
        halves = of_outputs.unflatten(0, (2, -1))
        return torch.nn.functional.pad(halves, (0, 0, 0, -halves.shape[1] % 8)).view(2, -1, 8, size).transpose(0, 1)
    return torch.nn.functional.pad(of_outputs, (0, 0, 0, -of_outputs.shape[0] % 16)).view(-1, 2, 8, size)


def _by_output(of_blocks: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Undo `_by_block`."""
    size = of_blocks.shape[-1]
    if weight.is_gated:
        return of_blocks.transpose(0, 1).reshape(2, -1, size)[:, : weight.num_out // 2].reshape(-1, size)
    return of_blocks.reshape(-1, size)[: weight.num_out].contiguous()
