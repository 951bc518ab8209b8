"""SwiGLU's activation: `silu(gate) * up`, on the output of the merged gate and up projection.

The two projections are one matrix product (one read of the input, one launch), so their results lie side by side
in each row. Memory-bound: done as two operations, the gate travels to memory and back once more.

Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """[num_tokens, 2 * size] (gate, then up) -> [num_tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def cost(num_tokens: int, size: int, dtype_bytes: int = 2) -> tuple[int, int]:
    """(bytes, FLOPs) that any implementation must spend: both halves in, one out."""
    return 3 * num_tokens * size * dtype_bytes, 5 * num_tokens * size
