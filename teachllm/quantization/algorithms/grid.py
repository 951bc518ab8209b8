"""Grids: the values that a quantized weight can have, and the nearest one of each weight, in which every method ends.

A grid says how many values there are and how many inputs share a scale; the range of each group says the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from teachllm.layers.weights.quantized_weights import GroupedWeight
from teachllm.quantization.formats import rounding


@dataclass(frozen=True)
class Grid:
    """The values that quantized weights may take.

    Attributes:
        bits: 4 or 8.
        group_size: inputs that share a scale; -1: all.
        is_symmetric: 0.0 is the middle of the range; otherwise each group has its own.
        scale_dtype: of scales as they are stored, for which values are rounded.
    """

    bits: int
    group_size: int
    is_symmetric: bool = True
    scale_dtype: torch.dtype = torch.float16

    @property
    def middle(self) -> int:
        """Return the quantized 0.0 of a symmetric grid."""
        return 1 << (self.bits - 1)

    @property
    def most(self) -> int:
        """Return the largest quantized value."""
        return (1 << self.bits) - 1

    def width(self, num_in: int) -> int:
        """Return the number of inputs per group, for a weight with `num_in` inputs."""
        return num_in if self.group_size == -1 else self.group_size

    def nearest(self, weight: torch.Tensor) -> GroupedWeight:
        """Round a weight [out, in] to nearest, in the range of each group.

        Raises:
            ValueError: the group size does not divide.
        """
        return rounding.grouped(weight, self.bits, self.width(weight.shape[1]), self.is_symmetric, self.scale_dtype)
