"""A quantized weight holds quantized values, and the scales and zeros to dequantize them, whatever file it came from.

Weights are close to each other, and a product needs them only roughly. So each is stored as a value of 4 or 8 bits, and
many values share a scale, the size of one step:

    grouped   weight = (qweight - zero) * scale, with a scale (and a zero) per group of inputs of each output. Only the
              weight is quantized: a product dequantizes it first. This saves bytes to read
    scaled    weight = qweight * scale, 8-bit values that tensor cores multiply directly (integers or e4m3), with a
              scale per weight, per output, or per block of 128 x 128. Activations are quantized, too

Every format on disk is one of the two in some packing; here `qweight` has a byte per value, in the weight's order.

Source: Gholami et al., "A Survey of Quantization Methods for Efficient Neural Network Inference", 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from teachllm_kernels.linear.packed.packed_weight import E2M1, INPUTS_OF_A_STEP

BLOCK = 128  # rows and columns of a block that has a scale
_FEWER_RANKS = "set tensor_parallel_size lower"
_ROWS = 4096  # rows dequantized at a time: intermediate results take 16 bytes per weight; a multiple of `BLOCK`


class Activations(Enum):
    """Says how x is quantized before it is multiplied by an 8-bit weight."""

    UNQUANTIZED = "unquantized: only the weight is quantized"
    BY_TOKEN = "quantized, with a scale for each token"
    BY_BLOCK = "quantized, with a scale for each token and 128 inputs"
    STATIC = "quantized, with one scale that was calibrated"


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Holds a quantized weight; every `group_size` inputs of an output share a scale.

    Attributes:
        qweight: [out, in] uint8, the quantized values, 0 to 2^bits - 1.
        scales: [out, num_groups], of any sign, in the float dtype of the file.
        zeros: [out, num_groups] int32, the quantized value of 0.0; None: it is 2^(bits - 1), the middle.
        bits: bits per weight, 4 or 8.
        group_index: [in] int32, the group of each input; None: groups of `group_size` adjacent inputs.
        is_e2m1: the quantized values are 4-bit floats (`E2M1`), and there are no zeros.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group_index: torch.Tensor | None = None
    is_e2m1: bool = False

    @property
    def group_size(self) -> int:
        """Return the number of inputs that share a scale; the last group may have fewer."""
        return -(-self.qweight.shape[1] // self.scales.shape[1])

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized weight, [out, in]: products in float32, rounded once."""
        dequantized = torch.empty(self.qweight.shape, dtype=dtype, device=self.qweight.device)
        for first in range(0, len(dequantized), _ROWS):
            rows = slice(first, first + _ROWS)
            if self.is_e2m1:
                table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=self.qweight.device)
                steps = table[self.qweight[rows].long()]
            else:
                zeros = 1 << (self.bits - 1) if self.zeros is None else self._of_inputs(self.zeros[rows])
                steps = (self.qweight[rows].to(torch.int32) - zeros).to(torch.float32)
            dequantized[rows] = (steps * self._of_inputs(self.scales[rows]).to(torch.float32)).to(dtype)
        return dequantized

    def with_zeros(self) -> torch.Tensor:
        """Return `zeros`, even if all of them are the middle of the range."""
        if self.zeros is not None:
            return self.zeros
        return torch.full(self.scales.shape, 1 << (self.bits - 1), dtype=torch.int32, device=self.scales.device)

    def _of_inputs(self, of_groups: torch.Tensor) -> torch.Tensor:
        """Repeat each group's value for its inputs: [out, num_groups] -> [out, in]."""
        if self.group_index is not None:
            return of_groups.index_select(1, self.group_index.long())
        return of_groups.repeat_interleave(self.group_size, dim=1)[:, : self.qweight.shape[1]]


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """Holds a weight of 8-bit values that tensor cores multiply directly.

    Attributes:
        qweight: [out, in] int8 or float8_e4m3fn, the quantized values.
        scales: float32; [1, 1] for the whole weight, [out, 1] for outputs, or one scale per block, incomplete ones
            included.
        block: (outputs, inputs) that share a scale; None: there are no blocks.
        activations: how x is quantized.
        input_scale: [1] float32, the scale of x, if it was calibrated.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    activations: Activations = Activations.BY_TOKEN
    input_scale: torch.Tensor | None = None
    block: tuple[int, int] | None = None

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized weight, [out, in]: products in float32, rounded once."""
        num_out, num_in = self.qweight.shape
        dequantized = torch.empty(self.qweight.shape, dtype=dtype, device=self.qweight.device)
        of_rows = self.scales if self.block is None else self.scales.repeat_interleave(self.block[0], 0)[:num_out]
        for first in range(0, num_out, _ROWS):
            rows = slice(first, first + _ROWS)
            scales = of_rows if len(of_rows) == 1 else of_rows[rows]
            if self.block is not None:
                scales = scales.repeat_interleave(self.block[1], 1)[:, :num_in]
            dequantized[rows] = (self.qweight[rows].to(torch.float32) * scales).to(dtype)
        return dequantized


Quantized = GroupedWeight | ScaledWeight


def part_of(quantized: Quantized, rows: slice, columns: slice) -> Quantized:
    """Return some outputs and inputs of a weight, with the same values.

    Raises:
        ValueError: the part would cut blocks; the message has the reason, a colon, and the fix.
    """
    at, inputs = (
        slice(*each.indices(size)) for each, size in zip((rows, columns), quantized.qweight.shape, strict=True)
    )
    if isinstance(quantized, GroupedWeight):
        return _part_of_groups(quantized, at, inputs)
    qweight, scales = quantized.qweight[at, inputs].clone(), quantized.scales
    if quantized.block is not None:
        scales = scales[_blocks(at, quantized.block[0]), _blocks(inputs, quantized.block[1])]
    elif len(scales) > 1:
        scales = scales[at]
    return replace(quantized, qweight=qweight, scales=scales.clone())


def _blocks(part: slice, size: int) -> slice:
    """Return the blocks of a part. The part must begin with a block or lie within one."""
    first, last = part.start // size, (part.stop - 1) // size
    if part.start % size and first != last:
        raise ValueError(f"a part from {part.start} on cuts blocks of {size}, which have a scale: {_FEWER_RANKS}")
    return slice(first, last + 1)


def _part_of_groups(quantized: GroupedWeight, at: slice, inputs: slice) -> GroupedWeight:
    """Return a part of a grouped weight. Cut groups keep their scale: `group_index` maps each input to its group."""
    size, num_in = quantized.group_size, quantized.qweight.shape[1]
    groups, index = slice(None), quantized.group_index
    if index is not None:
        index = index[inputs]
    elif inputs.start % size == 0 and (inputs.stop % size == 0 or inputs.stop == num_in):
        groups = slice(inputs.start // size, -(-inputs.stop // size))
    elif quantized.scales.shape[1] > 1:
        index = torch.arange(inputs.start, inputs.stop, dtype=torch.int32, device=quantized.qweight.device) // size
    zeros = None if quantized.zeros is None else quantized.zeros[at, groups].clone()
    qweight, scales = quantized.qweight[at, inputs].clone(), quantized.scales[at, groups].clone()
    return replace(quantized, qweight=qweight, scales=scales, zeros=zeros, group_index=index)


def fits_kernels(num_groups: int, group_size: int) -> bool:
    """Return whether GPU kernels support such groups; a weight with other groups is dequantized when it is loaded."""
    return num_groups == 1 or group_size % INPUTS_OF_A_STEP == 0


def merged(parts: Sequence[Quantized | torch.Tensor]) -> Quantized | torch.Tensor | None:
    """Merge several weights, one below the other; return None if they are too different.

    Args:
        parts: weights with the same inputs; a tensor is an unquantized weight.
    """
    if len(parts) == 1:
        return parts[0]
    grouped = [part for part in parts if isinstance(part, GroupedWeight)]
    if len(grouped) == len(parts):
        return _merged_groups(grouped)
    scaled = [part for part in parts if isinstance(part, ScaledWeight)]
    return _merged_scaled(scaled) if len(scaled) == len(parts) else None


def _merged_groups(parts: Sequence[GroupedWeight]) -> GroupedWeight | None:
    first = parts[0]
    for other in parts[1:]:
        same_kind = (first.bits, first.is_e2m1, first.scales.dtype) == (other.bits, other.is_e2m1, other.scales.dtype)
        if not same_kind or first.scales.shape[1] != other.scales.shape[1]:
            return None
        if not _equal(first.group_index, other.group_index):
            return None
    has_zeros = any(part.zeros is not None for part in parts)
    return GroupedWeight(
        torch.cat([part.qweight for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.with_zeros() for part in parts]) if has_zeros else None,
        first.bits,
        first.group_index,
        first.is_e2m1,
    )


def _merged_scaled(parts: Sequence[ScaledWeight]) -> ScaledWeight | None:
    first = parts[0]
    for other in parts[1:]:
        if (first.qweight.dtype, first.activations) != (other.qweight.dtype, other.activations):
            return None
        if first.block != other.block or not _equal(first.input_scale, other.input_scale):
            return None
    if first.block is not None and any(part.qweight.shape[0] % first.block[0] for part in parts[:-1]):
        return None
    of_rows = [part.scales if part.block else part.scales.expand(len(part.qweight), 1) for part in parts]
    qweight = torch.cat([part.qweight.view(torch.uint8) for part in parts]).view(first.qweight.dtype)
    return ScaledWeight(qweight, torch.cat(of_rows), first.activations, first.input_scale, first.block)


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.is_meta or torch.equal(a, b)  # meta tensors have no values that could differ
