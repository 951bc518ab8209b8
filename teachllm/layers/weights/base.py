"""Define the interface to a linear layer's weight, in whatever form it is stored.

A layer's products are one concept, how its weight is stored another: unquantized, in 4 bits with scales per group, in 8
bits that tensor cores multiply. Each form knows its own kernels. A layer sees only this interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from teachllm.layers.norm import InputQuantization, RMSNorm
from teachllm_kernels.silu_and_mul import silu_and_mul


class Weight(Protocol):
    """Define W, [out, in], of a layer that computes x W^T + b. b: [out] or None.

    x is [num_tokens, in]; or, where `input_quantization` says what, `QuantizedRows` of it.

    Attributes:
        num_out: rows of W.
        fuses_one_row: one row is multiplied the fastest by `one_row`; otherwise like several.
    """

    num_out: int
    fuses_one_row: bool

    @property
    def input_quantization(self) -> InputQuantization | None:
        """Return how a norm before this layer may quantize x; None: not at all."""
        ...

    def product(self, x: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + b, [num_tokens, out]."""
        ...

    def add_to_residual(
        self, residual: torch.Tensor, x: Any, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Implement `Linear.add_to_residual`."""
        ...

    def gated(self, x: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """Return silu(gate) * up, [num_tokens, out / 2], of a W whose upper half is gate and lower half up."""
        ...

    def one_row(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """Implement `Linear.one_row`; on a GPU only."""
        ...


class SeveralWeights(nn.Module):
    """Stack weights of different forms: a checkpoint may leave some projections unquantized."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        super().__init__()
        self.weights = list(weights)
        self.num_out = sum(weight.num_out for weight in weights)
        self.fuses_one_row = all(weight.fuses_one_row for weight in weights)
        for index, weight in enumerate(weights):
            if isinstance(weight, nn.Module):
                self.add_module(str(index), weight)

    input_quantization = None

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Implement `Weight.product`."""
        biases = self._apart(bias)
        return torch.cat([weight.product(x, b) for weight, b in zip(self.weights, biases, strict=True)], dim=-1)

    def add_to_residual(
        self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Implement `Weight.add_to_residual`."""
        return self.product(x, bias), residual

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Implement `Weight.gated`."""
        return silu_and_mul(self.product(x, bias))

    def one_row(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """Implement `Weight.one_row`."""
        biases = self._apart(bias)
        parts = [weight.one_row(x, b, norm) for weight, b in zip(self.weights, biases, strict=True)]
        y = torch.cat(parts, dim=-1)
        y = silu_and_mul(y) if gated else y
        return y if residual is None else residual + y

    def _apart(self, bias: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """Return each weight's own bias."""
        if bias is None:
            return [None] * len(self.weights)
        return bias.split([weight.num_out for weight in self.weights])
