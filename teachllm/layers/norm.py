"""RMS norm as a layer: the weight, and the operation of `teachllm_kernels.rms_norm`."""

from __future__ import annotations

import torch
from torch import nn

from teachllm_kernels.rms_norm import prepare_rms_norm, rms_norm_cpu, rms_norm_reference, rms_norm_triton


class RMSNorm(nn.Module):
    """Scales vectors to unit root mean square, then by a learned weight.

    Args:
        shape: of the weight. (hidden_size,) for whole rows; (num_heads, head_size) where every head has its own.
        eps: added to the mean square.
    """

    def __init__(self, *shape: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))
        self.eps = eps
        self.prepared: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self, y: torch.Tensor | None, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., size] -> (norm(residual + y), residual + y), both [..., size]; of one alone, where the other is None.

        On a GPU y may be in parts that are to be added up first, see `Linear.onto`.
        """
        if y is None:
            assert residual is not None
            y, residual = residual, None
        if y.is_cuda:
            return rms_norm_triton(y, residual, self.weight, self.eps)
        if self.prepared is not None:
            return rms_norm_cpu(y, residual, self.prepared)
        return rms_norm_reference(y, residual, self.weight, self.eps)

    def prepare(self) -> None:
        """Prepares the filled weight for a CPU."""
        self.prepared = prepare_rms_norm(self.weight.data, self.eps)
