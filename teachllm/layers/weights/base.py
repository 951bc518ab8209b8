"""Define the interface to a linear layer's weight, in whatever form it is stored.

A layer's products are one concept, how its weight is stored another: unquantized, in 4 bits with scales per group, in 8
bits that tensor cores multiply. Each form knows how its kernels are launched; which of them runs for how many rows is
`teachllm_kernels/selection.py`'s to say. A layer sees only this interface.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

from teachllm.layers.norm import InputQuantization, RMSNorm
from teachllm_kernels.quantize_rows import QuantizedRows
from teachllm_kernels.silu_and_mul import silu_and_mul

Rows: TypeAlias = torch.Tensor | QuantizedRows
Added: TypeAlias = tuple[torch.Tensor | None, torch.Tensor]  # (y, residual), see `Linear.add_to_residual`


class Weight(nn.Module):
    """Define W, [out, in], of a layer that computes x W^T + b. b: [out] or None.

    x is [num_tokens, in]; or, where `input_quantization` says what, `QuantizedRows` of it. A form of weight implements
    `product`. The other methods are made of it, and a form that has a faster kernel for one replaces that one.

    Attributes:
        num_out: rows of W.
        fuses_one_row: one row is multiplied the fastest by `one_row`; otherwise like several.
        input_quantization: how a norm before this layer may quantize x; None: not at all.
    """

    num_out: int
    fuses_one_row: bool = False
    input_quantization: InputQuantization | None = None

    def __init__(self, num_out: int) -> None:
        super().__init__()
        self.num_out = num_out

    def finish(self) -> None:
        """Do what remains to be done once the weight holds its values."""

    def product(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + b: [num_tokens, in] -> [num_tokens, out]."""
        raise NotImplementedError

    def add_to_residual(self, residual: torch.Tensor, x: Rows, bias: torch.Tensor | None) -> Added:
        """Multiply, and add to the residual or leave that to the next norm; see `Linear.add_to_residual`."""
        return self.product(x, bias), residual

    def gated(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """Return silu(gate) * up, [num_tokens, out / 2], of a W whose upper half is gate and lower half up."""
        return silu_and_mul(self.product(x, bias))

    def one_row(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """Multiply one row, with the norm before and the residual after; see `Linear.one_row`."""
        h = x if norm is None else norm(x)[0]
        y = self.gated(h, bias) if gated else self.product(h, bias)
        return y if residual is None else residual + y
