"""An unquantized weight: how each kernel of `teachllm_kernels/selection.py` is launched with it.

On a CPU oneDNN, which comes with PyTorch, multiplies a weight that is laid out for it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

import torch
from torch import nn

from teachllm.layers.norm import RMSNorm
from teachllm.layers.weights.base import Added, Rows, Weight, bind_anew
from teachllm_kernels.linear.batch_invariant_gemm import batch_invariant_gemm_triton
from teachllm_kernels.linear.dense_gemm import linear_reference, pack_weight, packed_linear, pays_to_pack
from teachllm_kernels.linear.gemv import gemv_triton
from teachllm_kernels.linear.hopper_gated_linear import hopper_gated_linear
from teachllm_kernels.linear.hopper_linear import hopper_linear
from teachllm_kernels.linear.skinny_gemm import skinny_gemm_triton
from teachllm_kernels.selection import AS_PRODUCT, Operands, at, bound, card_of, case_of


class DenseWeight(Weight):
    """Hold an unquantized weight [out, in] of the model's dtype.

    Args:
        has_bias: the layer adds a bias.

    Attributes:
        operands: what the choice of its kernels depends on.
        packed: the weight as laid out for oneDNN; `weight` is gone then.
    """

    operands: Operands

    def __init__(self, data: torch.Tensor, has_bias: bool = False) -> None:
        super().__init__(num_out=data.shape[0])
        self.weight = nn.Parameter(data, requires_grad=False)
        self.packed: torch.Tensor | None = None
        self._has_bias, self._is_fixed = has_bias, False
        self.register_load_state_dict_post_hook(bind_anew)  # type: ignore[no-untyped-call]
        self.bind()

    @property
    def is_fixed(self) -> bool:
        """Return whether a row of y is the same, bit for bit, however many others there are; on a GPU only.

        Setting it binds the weight's kernels anew.
        """
        return self._is_fixed

    @is_fixed.setter
    def is_fixed(self, is_fixed: bool) -> None:
        self._is_fixed = is_fixed
        self.bind()

    def bind(self) -> None:
        """Look up the kernels that multiply this weight: when it is made, moved, loaded, laid out or set `is_fixed`."""
        self.operands = _operands(self)
        self._product = bound("product", self.operands, PRODUCTS)
        self._added = bound("add_to_residual", self.operands, _ADDED)
        self._gated = bound("gated", self.operands, _GATED)
        self._one_row = at(bound("one_row", self.operands, _ONE_ROW), 1)
        self.fuses_one_row = case_of("one_row", self.operands, 1).has_kernel

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move, as `nn.Module.to` does, and bind anew."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.bind()
        return self

    def finish(self) -> None:
        """Lay the filled weight out for a CPU, if that pays, and look up its kernels."""
        if self.packed is None and self.weight.is_cpu and pays_to_pack(self.weight):
            self.packed = pack_weight(self.weight.data)
            del self.weight
        self.bind()

    def product(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + b: [num_tokens, in] -> [num_tokens, out]."""
        assert isinstance(x, torch.Tensor)
        return at(self._product, x.shape[0])(x, self.weight if self.packed is None else self.packed, bias)

    def add_to_residual(self, residual: torch.Tensor, x: Rows, bias: torch.Tensor | None) -> Added:
        """Implement `Linear.add_to_residual`."""
        assert isinstance(x, torch.Tensor)
        return at(self._added, x.shape[0])(self, residual, x, bias)

    def gated(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """Return silu(gate) * up: [num_tokens, in] -> [num_tokens, out / 2]."""
        assert isinstance(x, torch.Tensor)
        return at(self._gated, x.shape[0])(self, x, bias)

    def one_row(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """Implement `Linear.one_row`."""
        return self._one_row(self, x, bias, norm, residual, gated)


def _operands(weight: DenseWeight) -> Operands:
    if weight.packed is not None:
        return weight.operands._replace(is_prepacked=True, is_fixed=weight.is_fixed)
    data = weight.weight
    return Operands(
        form="dense",
        card=card_of(data.device),
        dtype=data.dtype,
        num_in=data.shape[1],
        num_out=data.shape[0],
        has_bias=weight._has_bias,
        is_fixed=weight.is_fixed,
    )


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


_Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
_Gated = Callable[[DenseWeight, torch.Tensor, torch.Tensor | None], torch.Tensor]
_OneRow = Callable[
    [DenseWeight, torch.Tensor, torch.Tensor | None, RMSNorm | None, torch.Tensor | None, bool], torch.Tensor
]
# By the names of `selection.CASES`. A product is called with x, the data of the weight and the bias; in the others w is
# the weight and b the bias. `PRODUCTS` is public for those who watch what is launched: it holds the kernels themselves.
PRODUCTS: Mapping[str, _Product] = {
    "batch_invariant_gemm": batch_invariant_gemm_triton,
    "hopper_linear": hopper_linear,
    "library": linear_reference,
    "onednn": packed_linear,
    "skinny_gemm": skinny_gemm_triton,
}
_ADDED: Mapping[str, Callable[[DenseWeight, torch.Tensor, torch.Tensor, torch.Tensor | None], Added]] = {
    "hopper_linear": lambda w, residual, x, b: (hopper_linear(x, w.weight, b, parts=True), residual),
    "library_added": lambda w, residual, x, b: (None, residual.addmm_(x, w.weight.t())),
    AS_PRODUCT: Weight.add_to_residual,
}
_GATED: Mapping[str, _Gated] = {
    "hopper_gated_linear": lambda w, x, b: hopper_gated_linear(x, w.weight),
    "hopper_linear": lambda w, x, b: hopper_linear(x, w.weight, b, gated=True),
    "skinny_gemm": lambda w, x, b: skinny_gemm_triton(x, w.weight, b, gated=True),
    AS_PRODUCT: Weight.gated,
}
_ONE_ROW: Mapping[str, _OneRow] = {"gemv": _gemv, AS_PRODUCT: Weight.one_row}
