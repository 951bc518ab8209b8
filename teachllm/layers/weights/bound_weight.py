"""A weight whose kernels `teachllm_kernels/selection.py` chooses, in whatever form it is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch

from teachllm.layers.bound_module import BoundModule
from teachllm.layers.norm import RMSNorm
from teachllm.layers.weights.base import Added, Rows, Weight
from teachllm_kernels.selection import at, bound, case_of

Bias: TypeAlias = torch.Tensor | None
W = TypeVar("W", bound="BoundWeight")
X = TypeVar("X")  # `Rows` where a norm may quantize x, otherwise a tensor


class Launches(NamedTuple, Generic[W, X]):
    """Hold how a form of weight launches each kernel, for each operation, by the kernel's name in `selection.CASES`.

    Attributes:
        product: called with (weight, x, bias); a form that says so calls its own otherwise.
        added: `Weight.add_to_residual` of (weight, residual, x, bias).
        gated: `Weight.gated` of (weight, x, bias).
        one_row: `Weight.one_row` of (weight, x, bias, norm, residual, gated).
    """

    product: Mapping[str, Callable[..., torch.Tensor]]
    added: Mapping[str, Callable[[W, torch.Tensor, X, Bias], Added]]
    gated: Mapping[str, Callable[[W, X, Bias], torch.Tensor]]
    one_row: Mapping[str, Callable[[W, torch.Tensor, Bias, RMSNorm | None, torch.Tensor | None, bool], torch.Tensor]]


class BoundWeight(Weight, BoundModule):
    """Compute each operation of a `Weight` by the kernel that the table names for so many rows.

    A form of weight sets `operands` and `launches`, and calls `bind`.

    Attributes:
        launches: how this form launches each kernel.
    """

    launches: Launches[Any, Any]

    def bind(self) -> None:
        """Look up the kernels for `operands`; a form whose tensors may be replaced sets these anew before."""
        self._product = bound("product", self.operands, self.launches.product)
        self._added = bound("add_to_residual", self.operands, self.launches.added)
        self._gated = bound("gated", self.operands, self.launches.gated)
        self._one_row = at(bound("one_row", self.operands, self.launches.one_row), 1)
        self.fuses_one_row = case_of("one_row", self.operands, 1).has_kernel

    def product(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + b: [num_tokens, in] -> [num_tokens, out]."""
        return at(self._product, x.shape[0])(self, x, bias)

    def add_to_residual(self, residual: torch.Tensor, x: Rows, bias: torch.Tensor | None) -> Added:
        """Multiply, and add to the residual or leave that to the next norm; see `Linear.add_to_residual`."""
        return at(self._added, x.shape[0])(self, residual, x, bias)

    def gated(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """Return silu(gate) * up: [num_tokens, in] -> [num_tokens, out / 2]."""
        return at(self._gated, x.shape[0])(self, x, bias)

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
