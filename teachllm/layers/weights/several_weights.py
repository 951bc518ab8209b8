"""Several weights as one: the projections of a merged layer that a checkpoint stores in different forms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from teachllm.layers.norm import RMSNorm
from teachllm.layers.weights.base import Rows, Weight
from teachllm_kernels.silu_and_mul import silu_and_mul


class SeveralWeights(Weight):
    """Stack weights of different forms: a checkpoint may leave some projections unquantized."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        super().__init__(num_out=sum(weight.num_out for weight in weights))
        self.weights = list(weights)
        self.fuses_one_row = all(weight.fuses_one_row for weight in weights)
        for index, weight in enumerate(weights):
            self.add_module(str(index), weight)

    def finish(self) -> None:
        """Implement `Weight.finish`."""
        for weight in self.weights:
            weight.finish()

    def product(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """Implement `Weight.product`."""
        biases = self._apart(bias)
        return torch.cat([weight.product(x, b) for weight, b in zip(self.weights, biases, strict=True)], dim=-1)

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
