"""Linear layers, merged where several projections read the same input.

Q, K and V read one input, and so do gate and up: as one matrix each they cost one product instead of three or two,
and larger products run nearer to the hardware's limit. A checkpoint stores the parts apart; `parts` says which rows
of the merged matrix each of them fills.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn

from teachllm.layers.norm import RMSNorm
from teachllm_kernels import few_rows_linear, hopper_gated_linear, hopper_linear
from teachllm_kernels.fixed_linear import fixed_linear_triton
from teachllm_kernels.gemv import gemv_triton
from teachllm_kernels.linear import can_pack, linear_reference, pack_weight, packed_linear
from teachllm_kernels.silu_and_mul import silu_and_mul

_ADDS_ITSELF = 1024  # rows from which on the library's product adds to what it writes over; before, it splits K


class Linear(nn.Module):
    """y = x W^T + b.

    Args:
        in_features: size of x's last dimension.
        out_features: rows of W by the name that the checkpoint gives to them, in the order of y's columns.
            `{"q_proj": 2048, "k_proj": 512, "v_proj": 512}` is a merged projection.

    Attributes:
        is_fixed: a row of y does not depend, by one bit, on how many others there are; on a GPU only.
    """

    def __init__(self, in_features: int, out_features: dict[str, int], bias: bool = False) -> None:
        super().__init__()
        self.out_features = out_features
        size = sum(out_features.values())
        self.weight = nn.Parameter(torch.empty(size, in_features))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.packed: torch.Tensor | None = None
        self.is_fixed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] -> [num_tokens, sum of out_features]."""
        if self.packed is not None:
            return packed_linear(x, self.packed, self.bias)
        if self.is_fixed:
            return fixed_linear_triton(x, self.weight, self.bias)
        kernel = self._kernel(x)
        if kernel == "hopper":
            return hopper_linear.hopper_linear(x, self.weight, self.bias)
        if kernel == "few rows":
            return few_rows_linear.few_rows_linear_triton(x, self.weight, self.bias)
        return linear_reference(x, self.weight, self.bias)

    def onto(self, stream: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What `RMSNorm` adds up to stream + x W^T + b, in the form that is the fastest for so many tokens.

        Args:
            stream: [num_tokens, sum of out_features]; may be changed in place.

        Returns:
            (y, stream), [num_tokens, sum of out_features]. y may be in parts to be added up, [num_parts, num_tokens,
            sum of out_features] float32, or None: added already.
        """
        kernel = self._kernel(x)
        if kernel == "hopper":
            return hopper_linear.hopper_linear(x, self.weight, self.bias, parts=True), stream
        if x.is_cuda and kernel == "library" and x.shape[0] >= _ADDS_ITSELF and not self.is_fixed and self.bias is None:
            return None, stream.addmm_(x, self.weight.t())
        return self(x), stream

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of a layer whose parts are gate and up: [num_tokens, in_features] -> [num_tokens, size]."""
        kernel = self._kernel(x)
        if kernel == "hopper":
            return hopper_linear.hopper_linear(x, self.weight, self.bias, gated=True)
        if kernel == "few rows":
            return few_rows_linear.few_rows_linear_triton(x, self.weight, self.bias, gated=True)
        if self.bias is None and x.shape[0] >= hopper_gated_linear.FROM_ROWS and self._on_hopper(x):
            return hopper_gated_linear.hopper_gated_linear(x, self.weight)
        return silu_and_mul(self(x))

    def one_row(
        self, x: torch.Tensor, norm: RMSNorm | None = None, residual: torch.Tensor | None = None, gated: bool = False
    ) -> torch.Tensor:
        """residual + act(norm(x) W^T + b) on a GPU, in one launch; `gated`: act is silu(gate) * up.

        Args:
            x: [1, in_features].
        """
        prologue = None if norm is None else (norm.weight, norm.eps)
        return gemv_triton(x, self.weight, self.bias, prologue, residual, gated)

    def _kernel(self, x: torch.Tensor) -> Literal["hopper", "few rows", "library"]:
        """Whose plain product is the fastest for so many rows; measured, see benchmarks/NOTES.md."""
        num_rows = x.shape[0]
        if num_rows <= hopper_linear.MAX_ROWS and self._on_hopper(x):
            return "hopper"
        return "few rows" if x.is_cuda and not self.is_fixed and num_rows <= few_rows_linear.MAX_ROWS else "library"

    def _on_hopper(self, x: torch.Tensor) -> bool:
        """Whether Hopper's own products take such rows."""
        fits = x.is_cuda and not self.is_fixed and x.element_size() == 2
        return fits and x.shape[1] % 8 == 0 and self.weight.shape[0] % 16 == 0 and hopper_linear.has_hopper(x.device)

    def pack(self) -> None:
        """Lays the filled weight out for a CPU, if that can be done; `weight` is gone then."""
        if can_pack(self.weight.dtype):
            self.packed = pack_weight(self.weight.data)
            del self.weight

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """("q_proj.weight", the rows it fills), and so on for every tensor that the checkpoint holds."""
        first = 0
        for name, rows in self.out_features.items():
            yield f"{name}.weight", self.weight.data[first : first + rows]
            if self.bias is not None:
                yield f"{name}.bias", self.bias.data[first : first + rows]
            first += rows
