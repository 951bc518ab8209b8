"""A linear layer may quantize its weight and its input to 8 bits, integers or e4m3: W8A8.

    y = (q_x W_q^T) * s_x * s_w + b     q_x: x / s_x, rounded; a scale s_x per token, a scale s_w per output

Tensor cores multiply 8-bit values twice as fast as 16-bit values, so prompts gain as well as decodes, unlike with
weight-only quantization. The quantized x of a token depends on that token alone, so a request's tokens do not depend on
the requests that it is batched with.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; Dettmers et al., "LLM.int8()", NeurIPS 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from teachllm.layers.weights.base import Rows, Weight
from teachllm.layers.weights.quantized_weights import Activations, ScaledWeight
from teachllm_kernels.linear.dense_gemm import linear_reference, pack_weight, packed_linear, pays_to_pack
from teachllm_kernels.quantize_rows import QuantizedRows, quantize_rows
from teachllm_kernels.selection import Operands, at, bound


class CPUScaledWeight(Weight):
    """Multiply x by an 8-bit weight on a CPU.

    oneDNN multiplies the quantized values as floats, which hold them exactly.
    """

    def __init__(self, quantized: ScaledWeight, dtype: torch.dtype) -> None:
        super().__init__(num_out=quantized.qweight.shape[0])
        self.activations, self.quantized_dtype = quantized.activations, quantized.qweight.dtype
        self.input_scale = quantized.input_scale
        # The weight stays quantized if all inputs of an output share a scale; otherwise it is dequantized.
        self.scales = None if quantized.block is not None else quantized.scales.reshape(1, -1)
        self._dtype = (
            torch.float32 if dtype is torch.float16 else dtype
        )  # sums of quantized values exceed float16's range
        weight = quantized.dequantize(self._dtype) if quantized.block is not None else quantized.qweight.to(self._dtype)
        self._packed = pack_weight(weight) if pays_to_pack(weight) else None
        self._weight = weight if self._packed is None else None
        floats = Operands(form="dense", card="cpu", dtype=self._dtype, is_prepacked=self._packed is not None)
        self._multiply = at(bound("product", floats, _PRODUCTS), 1)

    def product(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + b: [num_tokens, in] -> [num_tokens, out]."""
        assert isinstance(x, torch.Tensor)
        rows = self._rows(x)
        if self.scales is None:
            return self._multiply(self, rows.dequantize().to(self._dtype), bias).to(x.dtype)
        y = self._multiply(self, rows.values.to(self._dtype), None).float() * rows.scales * self.scales
        return (y if bias is None else y + bias).to(x.dtype)

    def _rows(self, x: torch.Tensor) -> QuantizedRows:
        """Quantize x."""
        return quantize_rows(x, self.quantized_dtype, self.input_scale, self.activations is Activations.BY_BLOCK)


def _onednn(weight: CPUScaledWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    assert weight._packed is not None
    return packed_linear(x, weight._packed, bias)


def _library(weight: CPUScaledWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    assert weight._weight is not None
    return linear_reference(x, weight._weight, bias)


# By the names of `selection.CASES`.
_PRODUCTS: Mapping[str, Callable[[CPUScaledWeight, torch.Tensor, torch.Tensor | None], torch.Tensor]] = {
    "library": _library,
    "onednn": _onednn,
}
