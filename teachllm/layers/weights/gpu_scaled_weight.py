"""An 8-bit weight on a GPU, see `cpu_scaled_weight.py`: how each kernel of `selection.py` is launched with it.

All kernels quantize x alike, so a request's tokens do not depend on the requests that it is batched with. GPUs before
compute capability 8.9 lack e4m3: on them only the weight is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from teachllm.layers.norm import InputQuantization, RMSNorm
from teachllm.layers.weights.base import Added, Rows, Weight
from teachllm.layers.weights.quantized_weights import BLOCK, Activations, ScaledWeight
from teachllm_kernels._hopper import capability
from teachllm_kernels.linear.hopper_linear import hopper_scaled_linear
from teachllm_kernels.linear.scaled.hopper_scaled_mm import hopper_scaled_mm
from teachllm_kernels.linear.scaled.scaled_gemv import scaled_gemv_triton
from teachllm_kernels.linear.scaled.scaled_linear import scaled_linear_triton, weight_only_triton
from teachllm_kernels.linear.scaled.scaled_mm import scaled_mm
from teachllm_kernels.linear.scaled.scaled_reference import scale_kind
from teachllm_kernels.quantize_rows import QuantizedRows, quantize_rows
from teachllm_kernels.selection import AS_PRODUCT, Operands, at, bound, card_of, case_of

_HAS_E4M3 = (8, 9)  # compute capability


class GPUScaledWeight(Weight):
    """Multiply x by an 8-bit weight with GPU kernels.

    Attributes:
        operands: what the choice of its kernels depends on.
        lacks_fp8: only the weight is quantized because the card does not multiply e4m3.
    """

    def __init__(self, quantized: ScaledWeight, dtype: torch.dtype) -> None:
        num_out, num_in = quantized.qweight.shape
        super().__init__(num_out)
        assert quantized.block in (None, (BLOCK, BLOCK))
        self.qweight, self.scales, self.dtype = quantized.qweight, quantized.scales.contiguous(), dtype
        self.activations, self.input_scale = quantized.activations, quantized.input_scale
        card, is_e4m3 = capability(self.qweight.device), self.qweight.dtype is torch.float8_e4m3fn
        is_weight_only = self.activations is Activations.UNQUANTIZED
        self.lacks_fp8 = is_e4m3 and not is_weight_only and card is not None and card < _HAS_E4M3
        if self.lacks_fp8:
            self.activations, is_weight_only = Activations.UNQUANTIZED, True
        if not is_weight_only:
            by_block = self.activations is Activations.BY_BLOCK
            self.input_quantization = InputQuantization(self.qweight.dtype, self.input_scale, by_block)
        self.operands = Operands(
            form="fp8_weight_only" if is_weight_only else "scaled",
            card=card_of(self.qweight.device),
            dtype=dtype,
            capability=card,
            num_in=num_in,
            num_out=num_out,
            is_e4m3=is_e4m3,
            has_blocks=scale_kind(self.qweight, self.scales) == "block" if is_e4m3 else quantized.block is not None,
        )
        products, one_row = (_WEIGHT_ONLY, _WEIGHT_ONLY_ROW) if is_weight_only else (_PRODUCTS, _ONE_ROW)
        self._product = bound("product", self.operands, products)
        self._added = bound("add_to_residual", self.operands, _ADDED)
        self._gated = bound("gated", self.operands, products)
        self._one_row = at(bound("one_row", self.operands, one_row), 1)
        self.fuses_one_row = case_of("one_row", self.operands, 1).has_kernel

    def product(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + b: [num_tokens, in] -> [num_tokens, out]."""
        num_rows = (x if isinstance(x, torch.Tensor) else x.values).shape[0]
        return at(self._product, num_rows)(self, x, bias, False)

    def add_to_residual(self, residual: torch.Tensor, x: Rows, bias: torch.Tensor | None) -> Added:
        """Multiply, and add to the residual or leave that to the next norm; see `Linear.add_to_residual`."""
        num_rows = (x if isinstance(x, torch.Tensor) else x.values).shape[0]
        return at(self._added, num_rows)(self, residual, x, bias)

    def gated(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """Return silu(gate) * up: [num_tokens, in] -> [num_tokens, out / 2]."""
        num_rows = (x if isinstance(x, torch.Tensor) else x.values).shape[0]
        return at(self._gated, num_rows)(self, x, bias, True)

    def one_row(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """Multiply one row, fused with the norm before and the residual after; see `Linear.one_row`."""
        return self._one_row(self, x, bias, norm, residual, gated)

    def _rows(self, x: Rows) -> QuantizedRows:
        """Quantize x, unless the norm before has done so."""
        if isinstance(x, QuantizedRows):
            return x
        return quantize_rows(x, self.qweight.dtype, self.input_scale, self.activations is Activations.BY_BLOCK)


def _weight_only(weight: GPUScaledWeight, x: Rows, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)
    return weight_only_triton(x, weight.qweight, weight.scales, bias, gated)


def _scaled_gemv(
    weight: GPUScaledWeight,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    norm: RMSNorm | None,
    residual: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    prologue = None if norm is None else (norm.weight, norm.eps)
    scale = weight.input_scale
    return scaled_gemv_triton(x, weight.qweight, weight.scales, bias, prologue, residual, gated, scale)


_Product = Callable[[GPUScaledWeight, Rows, torch.Tensor | None, bool], torch.Tensor]
_OneRow = Callable[
    [GPUScaledWeight, torch.Tensor, torch.Tensor | None, RMSNorm | None, torch.Tensor | None, bool], torch.Tensor
]
# By the names of `selection.CASES`: w is the weight, b the bias; with or without gating.
_PRODUCTS: Mapping[str, _Product] = {
    "hopper_scaled_linear": lambda w, x, b, gated: hopper_scaled_linear(
        w._rows(x), w.qweight, w.scales, b, gated=gated, dtype=w.dtype
    ),
    "hopper_scaled_mm": lambda w, x, b, gated: hopper_scaled_mm(
        w._rows(x), w.qweight, w.scales, b, gated=gated, dtype=w.dtype
    ),
    "scaled_linear": lambda w, x, b, gated: scaled_linear_triton(
        w._rows(x), w.qweight, w.scales, b, gated=gated, dtype=w.dtype
    ),
    "scaled_mm": lambda w, x, b, gated: scaled_mm(w._rows(x), w.qweight, w.scales, b, gated=gated, dtype=w.dtype),
}
_WEIGHT_ONLY: Mapping[str, _Product] = {"scaled_linear": _weight_only}
_ADDED: Mapping[str, Callable[[GPUScaledWeight, torch.Tensor, Rows, torch.Tensor | None], Added]] = {
    "hopper_scaled_linear": lambda w, residual, x, b: (
        hopper_scaled_linear(w._rows(x), w.qweight, w.scales, b, parts=True),
        residual,
    ),
    AS_PRODUCT: Weight.add_to_residual,
}
_ONE_ROW: Mapping[str, _OneRow] = {"scaled_gemv": _scaled_gemv, AS_PRODUCT: Weight.one_row}
_WEIGHT_ONLY_ROW: Mapping[str, _OneRow] = {"scaled_linear": Weight.one_row, AS_PRODUCT: Weight.one_row}
