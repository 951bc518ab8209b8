"""Calibration: what is kept of a layer's inputs while a text goes through a model.

Of thousands of tokens two things: how large each input is, and which are large together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from teachllm.quantization.algorithms.blocks import DecoderBlock


@dataclass
class InputStatistics:
    """Hold statistics of the inputs x [num_tokens, in] of a layer.

    Attributes:
        hessian: [in, in], mean of x^T x: half the second derivative of the squared error of the output.
        mean_abs, max_abs: [in], of |x|.
    """

    hessian: torch.Tensor
    mean_abs: torch.Tensor
    max_abs: torch.Tensor

    @classmethod
    def of(cls, block: DecoderBlock, name: str, hidden: torch.Tensor) -> InputStatistics:
        """Collect a linear layer's statistics while hidden states [rows, seq_len, hidden_size] go through its block."""
        size = block.linears()[name].in_features
        num_tokens = 0
        found = cls(*(torch.zeros(*shape, device=hidden.device) for shape in ((size, size), (size,), (size,))))

        def add(x: torch.Tensor) -> None:
            nonlocal num_tokens
            num_tokens += len(x)
            found.hessian.addmm_(x.t(), x)
            magnitude = x.abs()
            found.mean_abs += magnitude.sum(dim=0)
            torch.maximum(found.max_abs, magnitude.amax(dim=0), out=found.max_abs)

        block.watch(name, hidden, add)
        found.hessian /= num_tokens
        found.mean_abs /= num_tokens
        return found

    def divided_by(self, scales: torch.Tensor) -> InputStatistics:
        """Return the statistics of x / scales, [in]."""
        return InputStatistics(
            self.hessian / torch.outer(scales, scales), self.mean_abs / scales, self.max_abs / scales
        )
