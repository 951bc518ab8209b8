"""Quantize an unquantized checkpoint while it is loaded: `quantization="int8"` and its like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from teachllm.layers.weights.quantized_weights import Quantized
from teachllm.layers.weights.scheme import WEIGHT_FLOATS, Scheme, Stored


@dataclass(frozen=True)
class OnTheFly:
    """Quantize an unquantized checkpoint as it is loaded.

    Attributes:
        of_size: a projection's scheme, by its inputs.
    """

    of_size: Callable[[int], Scheme]

    def __str__(self) -> str:
        return "unquantized weights"

    def stored(self, out_features: int, in_features: int) -> dict[str, Stored]:
        """Implement `Scheme.stored`."""
        try:
            self.of_size(in_features).stored(out_features, in_features)  # refuses sizes that it cannot take
        except ValueError as error:
            what = str(error).partition(":")[0]
            raise ValueError(f"{what}: set quantization='int8', which takes any size") from None
        return {"weight": Stored((out_features, in_features), WEIGHT_FLOATS)}

    def read(self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> Quantized:
        """Implement `Scheme.read`."""
        return self.quantize(tensors["weight"])

    def quantize(self, weight: torch.Tensor) -> Quantized:
        """Implement `Scheme.quantize`."""
        return self.of_size(weight.shape[1]).quantize(weight)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Implement `Scheme.num_bytes`."""
        return self.of_size(in_features).num_bytes(out_features, in_features)
