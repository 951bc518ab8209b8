"""An unquantized weight: how each kernel of `teachllm_kernels/selection.py` is launched with it.

On a CPU oneDNN, which comes with PyTorch, multiplies a weight that is laid out for it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from teachllm.layers.bound_module import matrix_operands
from teachllm.layers.norm import RMSNorm
from teachllm.layers.weights.base import Rows, Weight
from teachllm.layers.weights.bound_weight import BoundWeight, Launches
from teachllm_kernels.linear.batch_invariant_gemm import batch_invariant_gemm_triton
from teachllm_kernels.linear.dense_gemm import linear_reference, pack_weight, packed_linear, pays_to_pack
from teachllm_kernels.linear.gemv import gemv_triton
from teachllm_kernels.linear.hopper_gated_linear import hopper_gated_linear
from teachllm_kernels.linear.hopper_linear import hopper_linear
from teachllm_kernels.linear.skinny_gemm import skinny_gemm_triton
from teachllm_kernels.selection import AS_PRODUCT, at


class DenseWeight(BoundWeight):
    """Hold an unquantized weight [out, in] of the model's dtype.

    Args:
        has_bias: the layer adds a bias.

    Attributes:
        packed: the weight as laid out for oneDNN; `weight` is gone then.
    """

    def __init__(self, data: torch.Tensor, has_bias: bool = False) -> None:
        super().__init__(num_out=data.shape[0])
        self.weight = nn.Parameter(data, requires_grad=False)
        self.packed: torch.Tensor | None = None
        self._has_bias = has_bias
        self.launches = _LAUNCHES
        self.bind()

    def bind(self) -> None:
        """Look up the kernels that multiply this weight."""
        if self.packed is None:
            self.operands = matrix_operands(self.weight, self._has_bias)
        self.operands = self.operands._replace(is_prepacked=self.packed is not None, is_fixed=self.is_fixed)
        super().bind()

    def finish(self) -> None:
        """Lay the filled weight out for a CPU, if that pays, and look up its kernels."""
        if self.packed is None and self.weight.is_cpu and pays_to_pack(self.weight):
            self.packed = pack_weight(self.weight.data)
            del self.weight
        self.bind()

    def product(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + b: [num_tokens, in] -> [num_tokens, out]."""
        return at(self._product, x.shape[0])(x, self.weight if self.packed is None else self.packed, bias)


def _gemv(
    weight: DenseWeight,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    norm: RMSNorm | None,
    residual: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    prologue = None if norm is None else (norm.weight, norm.eps)
    return gemv_triton(x, weight.weight, bias, prologue, residual, gated)


# By the names of `selection.CASES`: w is the weight, b the bias. A product is called with x, the data of the weight and
# the bias. `PRODUCTS` is public for those who watch what is launched: it holds the kernels themselves.
PRODUCTS: Mapping[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]] = {
    "batch_invariant_gemm": batch_invariant_gemm_triton,
    "hopper_linear": hopper_linear,
    "library": linear_reference,
    "onednn": packed_linear,
    "skinny_gemm": skinny_gemm_triton,
}
_LAUNCHES = Launches[DenseWeight, torch.Tensor](
    product=PRODUCTS,
    added={
        "hopper_linear": lambda w, residual, x, b: (hopper_linear(x, w.weight, b, parts=True), residual),
        "library_added": lambda w, residual, x, b: (None, residual.addmm_(x, w.weight.t())),
        AS_PRODUCT: Weight.add_to_residual,
    },
    gated={
        "hopper_gated_linear": lambda w, x, b: hopper_gated_linear(x, w.weight),
        "hopper_linear": lambda w, x, b: hopper_linear(x, w.weight, b, gated=True),
        "skinny_gemm": lambda w, x, b: skinny_gemm_triton(x, w.weight, b, gated=True),
        AS_PRODUCT: Weight.gated,
    },
    one_row={"gemv": _gemv, AS_PRODUCT: Weight.one_row},
)
