"""A linear layer on a GPU may quantize its weight alone, to 4 or 8 bits: W4A16, W8A16.

The time of a decode is the time to read the weights, so a quarter of the bytes gives up to four times the speed;
kernels dequantize in registers, which costs no time. Prompts are bound by arithmetic instead, which quantization does
not save: there the weight is dequantized first, and multiplied like the weights of `dense_weight.py`.

    one row           a matrix-vector product, fused with the norm before it and the residual after it
    up to 256 rows    Hopper's own kernel for the weights that it supports, the portable kernel for others
    more rows         the library; on Hopper the epilogue multiplies gate and up of thousands of rows

GPTQ's `desc_act` forms groups of inputs in another order. Then the inputs of the weight and of x are sorted by group,
so that a group's inputs are adjacent.

Source: Frantar et al., "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference", 2024.
"""

from __future__ import annotations

import torch

from teachllm.layers.norm import RMSNorm
from teachllm.layers.weights.base import Weight
from teachllm.layers.weights.quantized_weights import GroupedWeight
from teachllm_kernels.linear import hopper_gated_linear, hopper_linear
from teachllm_kernels.linear.dense_gemm import linear_reference
from teachllm_kernels.linear.packed.dequantize import dequantize_triton
from teachllm_kernels.linear.packed.hopper_packed_linear import hopper_packed_linear, is_fit
from teachllm_kernels.linear.packed.packed_gemv import packed_gemv_triton
from teachllm_kernels.linear.packed.packed_linear import MAX_ROWS, packed_linear_triton
from teachllm_kernels.linear.packed.packed_weight import pack
from teachllm_kernels.silu_and_mul import silu_and_mul

_ADDS_ITSELF = 1024  # from this many rows on, the library adds to the residual in place; see `dense_weight.py`


class GPUGroupedWeight(Weight):
    """Multiply x by a weight of 4 or 8 bits with GPU kernels.

    Args:
        is_gated: the upper half of the weight is gate and the lower half is up, so silu(gate) is multiplied by up.
    """

    fuses_one_row = True

    def __init__(self, quantized: GroupedWeight, is_gated: bool) -> None:
        super().__init__(num_out=quantized.qweight.shape[0])
        self.order: torch.Tensor | None = None
        qweight = quantized.qweight
        if quantized.group_index is not None:
            self.order = torch.argsort(quantized.group_index, stable=True)
            qweight = qweight.index_select(1, self.order)
        self.weight = pack(qweight, quantized.scales, quantized.zeros, quantized.bits, quantized.is_e2m1, is_gated)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + b: [num_tokens, in] -> [num_tokens, out]."""
        x = self._in_order(x)
        if x.shape[0] <= MAX_ROWS:
            return self._few_rows(x, bias)
        return linear_reference(x, dequantize_triton(self.weight, x.dtype), bias)

    def add_to_residual(
        self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Multiply, and add to the residual or leave that to the next norm; see `Linear.add_to_residual`."""
        if x.is_cuda and x.shape[0] <= MAX_ROWS:
            return self._few_rows(self._in_order(x), bias, parts=True), residual
        if x.is_cuda and x.shape[0] >= _ADDS_ITSELF and bias is None:
            return None, residual.addmm_(self._in_order(x), dequantize_triton(self.weight, x.dtype).t())
        return self.product(x, bias), residual

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return silu(gate) * up: [num_tokens, in] -> [num_tokens, out / 2]."""
        if x.shape[0] <= MAX_ROWS:
            return self._few_rows(self._in_order(x), bias, gated=True)
        if bias is None and x.shape[0] >= hopper_gated_linear.FROM_ROWS and self._on_hopper(x):
            dequantized = dequantize_triton(self.weight, x.dtype)
            return hopper_gated_linear.hopper_gated_linear(self._in_order(x), dequantized)
        return silu_and_mul(self.product(x, bias))

    def one_row(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """Multiply one row, fused with the norm before and the residual after; see `Linear.one_row`."""
        prologue = None if norm is None else (norm.weight, norm.eps)
        if self.order is not None:
            x, prologue = self._in_order(x if norm is None else norm(x)[0]), None
        return packed_gemv_triton(x, self.weight, bias, prologue, residual, gated)

    def _few_rows(
        self, x: torch.Tensor, bias: torch.Tensor | None, gated: bool = False, parts: bool = False
    ) -> torch.Tensor:
        """Multiply up to `MAX_ROWS` rows without dequantizing the weight to memory."""
        if self._on_hopper(x) and is_fit(x, self.weight, gated):
            return hopper_packed_linear(x, self.weight, bias, gated, parts)
        return packed_linear_triton(x, self.weight, bias, gated, parts)

    def _on_hopper(self, x: torch.Tensor) -> bool:
        """Return whether Hopper's own kernels support such rows."""
        fits = x.is_cuda and x.element_size() == 2 and x.shape[1] % 8 == 0 and self.num_out % 16 == 0
        return fits and hopper_linear.has_hopper(x.device)

    def _in_order(self, x: torch.Tensor) -> torch.Tensor:
        """Sort the inputs of x by group."""
        return x if self.order is None else x.index_select(1, self.order)
