"""A linear layer on a GPU may quantize its weight alone, to 4 or 8 bits: W4A16, W8A16.

The time of a decode is the time to read the weights, so a quarter of the bytes gives up to four times the speed;
kernels dequantize in registers, which costs no time. Prompts are bound by arithmetic instead, which quantization does
not save: there the weight is dequantized first, and multiplied like the weights of `dense_weight.py`. Which kernel runs
for how many rows is in `teachllm_kernels/selection.py`.

GPTQ's `desc_act` forms groups of inputs in another order. Then the inputs of the weight and of x are sorted by group,
so that a group's inputs are adjacent.

Source: Frantar et al., "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference", 2024.
"""

from __future__ import annotations

import torch

from teachllm.layers.norm import RMSNorm
from teachllm.layers.weights.base import Weight
from teachllm.layers.weights.bound_weight import BoundWeight, Launches
from teachllm.layers.weights.quantized_weights import GroupedWeight
from teachllm_kernels.linear.dense_gemm import linear_reference
from teachllm_kernels.linear.hopper_gated_linear import hopper_gated_linear
from teachllm_kernels.linear.packed.dequantize import dequantize_triton
from teachllm_kernels.linear.packed.hopper_packed_linear import hopper_packed_linear
from teachllm_kernels.linear.packed.packed_gemv import packed_gemv_triton
from teachllm_kernels.linear.packed.packed_linear import packed_linear_triton
from teachllm_kernels.linear.packed.packed_weight import pack
from teachllm_kernels.selection import AS_PRODUCT, Operands, card_of


class GPUGroupedWeight(BoundWeight):
    """Multiply x by a weight of 4 or 8 bits with GPU kernels.

    Args:
        dtype: the dtype of x.
        is_gated: the upper half of the weight is gate and the lower half is up, so silu(gate) is multiplied by up.
        has_bias: the layer adds a bias.
    """

    def __init__(
        self, quantized: GroupedWeight, dtype: torch.dtype, is_gated: bool = False, has_bias: bool = False
    ) -> None:
        super().__init__(num_out=quantized.qweight.shape[0])
        self.order: torch.Tensor | None = None
        qweight = quantized.qweight
        if quantized.group_index is not None:
            self.order = torch.argsort(quantized.group_index, stable=True)
            qweight = qweight.index_select(1, self.order)
        self.weight = pack(qweight, quantized.scales, quantized.zeros, quantized.bits, quantized.is_e2m1, is_gated)
        self.operands = Operands(
            form="packed",
            card=card_of(qweight.device),
            dtype=dtype,
            num_in=self.weight.num_in,
            num_out=self.num_out,
            has_bias=has_bias,
            group_size=self.weight.group_size if self.weight.scales.shape[1] > 1 else 0,
            scale_bytes=self.weight.scales.element_size(),
            is_e2m1=self.weight.is_e2m1,
            in_turns=is_gated,
        )
        self.launches = _LAUNCHES
        self.bind()

    def _in_order(self, x: torch.Tensor) -> torch.Tensor:
        """Sort the inputs of x by group."""
        return x if self.order is None else x.index_select(1, self.order)

    def _dequantized(self) -> torch.Tensor:
        """Return W, [out, in], of x's dtype and with inputs as x has them in order."""
        return dequantize_triton(self.weight, self.operands.dtype)


def _packed_gemv(
    weight: GPUGroupedWeight,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    norm: RMSNorm | None,
    residual: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    prologue = None if norm is None else (norm.weight, norm.eps)
    if weight.order is not None:
        x, prologue = weight._in_order(x if norm is None else norm(x)[0]), None
    return packed_gemv_triton(x, weight.weight, bias, prologue, residual, gated)


# By the names of `selection.CASES`: w is the weight, b the bias.
_LAUNCHES = Launches[GPUGroupedWeight, torch.Tensor](
    product={
        "dequantize + library": lambda w, x, b: linear_reference(w._in_order(x), w._dequantized(), b),
        "hopper_packed_linear": lambda w, x, b: hopper_packed_linear(w._in_order(x), w.weight, b),
        "packed_linear": lambda w, x, b: packed_linear_triton(w._in_order(x), w.weight, b),
    },
    added={
        "dequantize + library_added": lambda w, residual, x, b: (
            None,
            residual.addmm_(w._in_order(x), w._dequantized().t()),
        ),
        "hopper_packed_linear": lambda w, residual, x, b: (
            hopper_packed_linear(w._in_order(x), w.weight, b, parts=True),
            residual,
        ),
        "packed_linear": lambda w, residual, x, b: (
            packed_linear_triton(w._in_order(x), w.weight, b, parts=True),
            residual,
        ),
        AS_PRODUCT: Weight.add_to_residual,
    },
    gated={
        "dequantize + hopper_gated_linear": lambda w, x, b: hopper_gated_linear(w._in_order(x), w._dequantized()),
        "hopper_packed_linear": lambda w, x, b: hopper_packed_linear(w._in_order(x), w.weight, b, gated=True),
        "packed_linear": lambda w, x, b: packed_linear_triton(w._in_order(x), w.weight, b, gated=True),
        AS_PRODUCT: Weight.gated,
    },
    one_row={"packed_gemv": _packed_gemv, AS_PRODUCT: Weight.one_row},
)
