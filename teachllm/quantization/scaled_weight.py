"""A linear layer whose weight is codes of 8 bits, multiplied with codes: W8A8, integers or e4m3.

    y = (q_x W_q^T) * s_x * s_w + b     q_x: x / s_x, rounded to a code; s_x of each token, s_w of each output

Tensor cores multiply codes of 8 bits twice as fast as numbers of 16, so prompts gain as well as decodes, which
weight-only codes do not give. What a token's x becomes depends on that token alone, so a request's tokens do not depend
on what runs beside it.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; Dettmers et al., "LLM.int8()", NeurIPS 2022.
"""

from __future__ import annotations

import torch
from torch import nn

from teachllm.layers.norm import RMSNorm
from teachllm.quantization.quantized_weights import Activations, ScaledWeight
from teachllm_kernels.linear.dense_gemm import linear_reference, pack_weight, packed_linear, pays_to_pack
from teachllm_kernels.linear.scaled.quantize_rows import QuantizedRows, quantize_rows
from teachllm_kernels.silu_and_mul import silu_and_mul


class CPUScaledWeight(nn.Module):
    """The methods are those of `Weight`. Codes are whole numbers, or few digits, that oneDNN multiplies as numbers."""

    row_codes = None
    fuses_one_row = False

    def __init__(self, numbers: ScaledWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_out = numbers.codes.shape[0]
        self.activations, self.codes_dtype = numbers.activations, numbers.codes.dtype
        self.input_scale = numbers.input_scale
        # Codes and scales, where every input of an output has the same; else numbers.
        self.scales = None if numbers.block is not None else numbers.scales.reshape(1, -1)
        self._dtype = torch.float32 if dtype is torch.float16 else dtype  # sums of codes are larger than float16 holds
        plain = numbers.dequantize(self._dtype) if numbers.block is not None else numbers.codes.to(self._dtype)
        self._packed = pack_weight(plain) if pays_to_pack(plain) else None
        self._plain = plain if self._packed is None else None

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[num_tokens, in] -> [num_tokens, out]."""
        rows = self._rows(x)
        if self.scales is None:
            return self._multiply(rows.dequantize().to(self._dtype), bias).to(x.dtype)
        y = self._multiply(rows.codes.to(self._dtype), None).float() * rows.scales * self.scales
        return (y if bias is None else y + bias).to(x.dtype)

    def add_to_residual(
        self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """As `Linear.add_to_residual`."""
        return self.product(x, bias), residual

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[num_tokens, in] -> [num_tokens, out / 2]."""
        return silu_and_mul(self.product(x, bias))

    def one_row(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """As `Linear.one_row`."""
        h = x if norm is None else norm(x)[0]
        y = self.gated(h, bias) if gated else self.product(h, bias)
        return y if residual is None else residual + y

    def _rows(self, x: torch.Tensor) -> QuantizedRows:
        """x as codes."""
        return quantize_rows(x, self.codes_dtype, self.input_scale, self.activations is Activations.BY_BLOCK)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._packed is not None:
            return packed_linear(x, self._packed, bias)
        assert self._plain is not None
        return linear_reference(x, self._plain, bias)
