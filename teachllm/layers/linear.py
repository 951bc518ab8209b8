"""Linear layers, merged where several projections read the same input.

Q, K and V read one input, and so do gate and up: as one matrix each they cost one product instead of three or two,
and larger products run nearer to the hardware's limit. A checkpoint stores the parts apart; `parts` says which rows
of the merged matrix each of them fills.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from teachllm.layers.norm import RMSNorm
from teachllm_kernels.few_rows_linear import few_rows_linear_triton
from teachllm_kernels.fixed_linear import fixed_linear_triton
from teachllm_kernels.gemv import gemv_triton
from teachllm_kernels.linear import can_pack, linear_reference, pack_weight, packed_linear

MAX_FEW_ROWS = 8  # up to here a layer's small operations cost more than its products, and are done inside of them


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
        return linear_reference(x, self.weight, self.bias)

    def few_rows(
        self, x: torch.Tensor, norm: RMSNorm | None = None, residual: torch.Tensor | None = None, gated: bool = False
    ) -> torch.Tensor:
        """residual + act(norm(x) W^T + b) on a GPU for a few rows; `gated`: act is silu(gate) * up.

        Args:
            x: [num_rows, in_features], at most `MAX_FEW_ROWS`.
        """
        if x.shape[0] == 1:
            prologue = None if norm is None else (norm.weight, norm.eps)
            return gemv_triton(x, self.weight, self.bias, prologue, residual, gated)
        h = x if norm is None else norm(x)[0]
        return few_rows_linear_triton(h, self.weight, self.bias, residual, gated)

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
