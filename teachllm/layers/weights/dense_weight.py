"""An unquantized weight, and which kernel multiplies it the fastest for how many rows of x.

one row       this project's matrix-vector product, with the norm before it and the residual after it
few           Hopper's own kernel up to 256 rows, elsewhere the portable one up to 16
many          the library; gate and up of thousands of rows are multiplied in the epilogue, on Hopper
on a CPU      oneDNN, which comes with PyTorch, on a weight that is laid out for it once
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from teachllm.layers.norm import RMSNorm
from teachllm.layers.weights.base import Weight
from teachllm_kernels.linear import hopper_gated_linear, hopper_linear, skinny_gemm
from teachllm_kernels.linear.batch_invariant_gemm import batch_invariant_gemm_triton
from teachllm_kernels.linear.dense_gemm import linear_reference, pack_weight, packed_linear, pays_to_pack
from teachllm_kernels.linear.gemv import gemv_triton
from teachllm_kernels.silu_and_mul import silu_and_mul

_ADDS_ITSELF = 1024  # rows from which on the library's product adds to what it writes over; before, it splits K


class DenseWeight(Weight):
    """Hold an unquantized weight [out, in] of the model's dtype.

    Attributes:
        is_fixed: a row of y does not depend, by one bit, on how many others there are; on a GPU only.
    """

    fuses_one_row = True

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__(num_out=data.shape[0])
        self.weight = nn.Parameter(data, requires_grad=False)
        self.packed: torch.Tensor | None = None
        self.is_fixed = False

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[num_tokens, in] -> [num_tokens, out]."""
        if self.packed is not None:
            return packed_linear(x, self.packed, bias)
        if self.is_fixed:
            return batch_invariant_gemm_triton(x, self.weight, bias)
        kernel = self._kernel(x)
        if kernel == "hopper":
            return hopper_linear.hopper_linear(x, self.weight, bias)
        if kernel == "few rows":
            return skinny_gemm.skinny_gemm_triton(x, self.weight, bias)
        return linear_reference(x, self.weight, bias)

    def add_to_residual(
        self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Implement `Linear.add_to_residual`."""
        kernel = self._kernel(x)
        if kernel == "hopper":
            return hopper_linear.hopper_linear(x, self.weight, bias, parts=True), residual
        if x.is_cuda and kernel == "library" and x.shape[0] >= _ADDS_ITSELF and not self.is_fixed and bias is None:
            return None, residual.addmm_(x, self.weight.t())
        return self.product(x, bias), residual

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[num_tokens, in] -> [num_tokens, out / 2]."""
        kernel = self._kernel(x)
        if kernel == "hopper":
            return hopper_linear.hopper_linear(x, self.weight, bias, gated=True)
        if kernel == "few rows":
            return skinny_gemm.skinny_gemm_triton(x, self.weight, bias, gated=True)
        if bias is None and x.shape[0] >= hopper_gated_linear.FROM_ROWS and self._on_hopper(x):
            return hopper_gated_linear.hopper_gated_linear(x, self.weight)
        return silu_and_mul(self.product(x, bias))

    def one_row(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """Implement `Linear.one_row`."""
        prologue = None if norm is None else (norm.weight, norm.eps)
        return gemv_triton(x, self.weight, bias, prologue, residual, gated)

    def pack(self) -> None:
        """Lays the filled weight out for a CPU, if that pays; `weight` is gone then."""
        if pays_to_pack(self.weight):
            self.packed = pack_weight(self.weight.data)
            del self.weight

    def _kernel(self, x: torch.Tensor) -> Literal["hopper", "few rows", "library"]:
        """Whose plain product is the fastest for so many rows; measured, see benchmarks/NOTES.md."""
        num_rows = x.shape[0]
        if num_rows <= hopper_linear.MAX_ROWS and self._on_hopper(x):
            return "hopper"
        return "few rows" if x.is_cuda and not self.is_fixed and num_rows <= skinny_gemm.MAX_ROWS else "library"

    def _on_hopper(self, x: torch.Tensor) -> bool:
        """Return whether Hopper's own products take such rows."""
        fits = x.is_cuda and not self.is_fixed and x.element_size() == 2
        return fits and x.shape[1] % 8 == 0 and self.num_out % 16 == 0 and hopper_linear.has_hopper(x.device)
