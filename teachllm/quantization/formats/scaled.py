"""Projections whose files hold 8-bit values as they are: int8, or fp8 (e4m3).

Several projects write them, with other names for the same: see `compressed_tensors.py`, `fp8.py`, `modelopt.py`.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from teachllm.layers.weights.quantized_weights import BLOCK, Activations, ScaledWeight
from teachllm.layers.weights.scheme import FLOATS, Stored
from teachllm.quantization.formats import rounding

_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)  # powers of two


@dataclass(frozen=True)
class Scaled:
    """A projection.

    Attributes:
        dtype: int8 or float8_e4m3fn.
        per: what has a scale: the "tensor", a "channel" (an output), or a "block".
        scale_name, input_scale_name: of tensors. Scales multiply quantized values, whatever they are called.
        block: (outputs, inputs) of a block.
        of_batch: the file asks for one scale for the activations of a whole batch. What a token becomes would depend on
            the others then, so each gets its own.
    """

    dtype: torch.dtype
    per: str
    activations: Activations
    scale_name: str = "weight_scale"
    input_scale_name: str = "input_scale"
    block: tuple[int, int] = (BLOCK, BLOCK)
    of_batch: bool = False

    def __str__(self) -> str:
        what = f"block of {self.block[0]} x {self.block[1]}" if self.per == "block" else self.per
        return f"{str(self.dtype).removeprefix('torch.')} by {what}"

    def stored(self, out_features: int, in_features: int) -> dict[str, Stored]:
        """Implement `Scheme.stored`."""
        dtypes = (*FLOATS, *_EXPONENTS)
        one = ((1,), (), (1, 1))
        scales = Stored(one[0], dtypes, others=one[1:])
        if self.per == "channel":
            scales = Stored((out_features, 1), dtypes, others=((out_features,), *one))
        elif self.per == "block":
            blocks = (-(-out_features // self.block[0]), -(-in_features // self.block[1]))
            scales = Stored(blocks, dtypes, others=((blocks[0], 1, blocks[1], 1), *(one if blocks == (1, 1) else ())))
        tensors = {"weight": Stored((out_features, in_features), (self.dtype,)), self.scale_name: scales}
        if self.activations is Activations.STATIC:
            tensors[self.input_scale_name] = Stored(one[0], FLOATS, others=one[1:])
        return tensors

    def read(self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> ScaledWeight:
        """Implement `Scheme.read`."""
        scales = tensors[self.scale_name]
        if scales.dtype in _EXPONENTS:
            scales = power_of_two(scales)
        is_blocked = self.per == "block"
        shape = (-(-out_features // self.block[0]), -1) if is_blocked else (-1, 1)
        static = tensors[self.input_scale_name].float().reshape(1) if self.activations is Activations.STATIC else None
        block = self.block if is_blocked else None
        return ScaledWeight(tensors["weight"], scales.float().reshape(shape), self.activations, static, block)

    def quantize(self, weight: torch.Tensor) -> ScaledWeight:
        """Implement `Scheme.quantize`."""
        if self.activations is Activations.STATIC:
            raise ValueError("static scales of activations come from a file: set load_format='auto'")
        return rounding.scaled(weight, self.dtype, self.per, self.activations)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Implement `Scheme.num_bytes`."""
        if self.per == "block" and self.block != (BLOCK, BLOCK):  # which are dequantized
            return 2 * out_features * in_features
        return out_features * in_features + 4 * out_features


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Convert e8m0, as uint8 or as its own dtype, to float32.

    Raises:
        ValueError: one is NaN.
    """
    exponents = exponents.view(torch.uint8)
    if bool((exponents == 255).any()):
        raise ValueError("a scale is NaN: the file is broken, download it again")
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.to(torch.int32) - 127)
