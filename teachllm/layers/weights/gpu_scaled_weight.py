"""An 8-bit weight on a GPU, see `cpu_scaled_weight.py`: how each kernel of `selection.py` is launched with it.

All kernels quantize x alike, so a request's tokens do not depend on the requests that it is batched with. GPUs before
compute capability 8.9 lack e4m3: on them only the weight is quantized.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from teachllm.layers.norm import InputQuantization, RMSNorm
from teachllm.layers.weights.base import Rows, Weight
from teachllm.layers.weights.bound_weight import BoundWeight, Launches
from teachllm.layers.weights.quantized_weights import BLOCK, Activations, ScaledWeight
from teachllm_kernels._hopper import capability
from teachllm_kernels.linear.hopper_linear import hopper_scaled_linear
from teachllm_kernels.linear.scaled.hopper_scaled_mm import hopper_scaled_mm
from teachllm_kernels.linear.scaled.scaled_gemv import scaled_gemv_triton
from teachllm_kernels.linear.scaled.scaled_linear import scaled_linear_triton, weight_only_triton
from teachllm_kernels.linear.scaled.scaled_mm import scaled_mm
from teachllm_kernels.linear.scaled.scaled_reference import scale_kind
from teachllm_kernels.quantize_rows import QuantizedRows, quantize_rows
from teachllm_kernels.selection import AS_PRODUCT, Operands, card_of

_HAS_E4M3 = (8, 9)  # compute capability


class GPUScaledWeight(BoundWeight):
    """Multiply x by an 8-bit weight with GPU kernels.

    Attributes:
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
        self.launches = _WEIGHT_ONLY if is_weight_only else _LAUNCHES
        self.bind()

    def _rows(self, x: Rows) -> QuantizedRows:
        """Quantize x, unless the norm before has done so."""
        if isinstance(x, QuantizedRows):
            return x
        return quantize_rows(x, self.qweight.dtype, self.input_scale, self.activations is Activations.BY_BLOCK)


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


def _products(gated: bool) -> dict[str, Callable[[GPUScaledWeight, Rows, torch.Tensor | None], torch.Tensor]]:
    """Return how products are launched, with or without gating."""
    return {
        "hopper_scaled_linear": lambda w, x, b: hopper_scaled_linear(
            w._rows(x), w.qweight, w.scales, b, gated=gated, dtype=w.dtype
        ),
        "hopper_scaled_mm": lambda w, x, b: hopper_scaled_mm(
            w._rows(x), w.qweight, w.scales, b, gated=gated, dtype=w.dtype
        ),
        "scaled_linear": lambda w, x, b: scaled_linear_triton(
            w._rows(x), w.qweight, w.scales, b, gated=gated, dtype=w.dtype
        ),
        "scaled_mm": lambda w, x, b: scaled_mm(w._rows(x), w.qweight, w.scales, b, gated=gated, dtype=w.dtype),
    }


# By the names of `selection.CASES`: w is the weight, b the bias.
_LAUNCHES = Launches[GPUScaledWeight, Rows](
    product=_products(gated=False),
    added={
        "hopper_scaled_linear": lambda w, residual, x, b: (
            hopper_scaled_linear(w._rows(x), w.qweight, w.scales, b, parts=True),
            residual,
        ),
        AS_PRODUCT: Weight.add_to_residual,
    },
    gated=_products(gated=True),
    one_row={"scaled_gemv": _scaled_gemv, AS_PRODUCT: Weight.one_row},
)
_WEIGHT_ONLY = Launches[GPUScaledWeight, torch.Tensor](
    product={"scaled_linear": lambda w, x, b: weight_only_triton(x, w.qweight, w.scales, b, False)},
    added={AS_PRODUCT: Weight.add_to_residual},
    gated={"scaled_linear": lambda w, x, b: weight_only_triton(x, w.qweight, w.scales, b, True)},
    one_row={"scaled_linear": Weight.one_row, AS_PRODUCT: Weight.one_row},
)
