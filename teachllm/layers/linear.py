"""Linear layers, merged where several projections read the same input.

Q, K and V read one input, and so do gate and up: as one matrix each they cost one product instead of three or two,
and larger products run nearer to the hardware's limit. A checkpoint stores the parts apart; `parts` says which rows
of the merged matrix each of them fills.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from teachllm_kernels.linear import can_pack, linear_reference, pack_weight, packed_linear


class Linear(nn.Module):
    """y = x W^T + b.

    Args:
        in_features: size of x's last dimension.
        out_features: rows of W by the name that the checkpoint gives to them, in the order of y's columns.
            `{"q_proj": 2048, "k_proj": 512, "v_proj": 512}` is a merged projection.
    """

    def __init__(self, in_features: int, out_features: dict[str, int], bias: bool = False) -> None:
        super().__init__()
        self.out_features = out_features
        size = sum(out_features.values())
        self.weight = nn.Parameter(torch.empty(size, in_features))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.packed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] -> [num_tokens, sum of out_features]."""
        if self.packed is not None:
            return packed_linear(x, self.packed, self.bias)
        return linear_reference(x, self.weight, self.bias)

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
