"""RMS norm, with the residual added first where there is one.

Every sub-layer of a Llama-family model ends in `x = residual + y` and the next begins with `rms_norm(x)`, so the
two belong in one operation: done apart, each row travels to memory and back several times. Memory-bound: its speed
is bytes over bandwidth, see `cost`.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm_reference(
    y: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float32 (float64 stays float64).

    Args:
        y: [..., size], any float dtype.
        residual: like `y`, or None where nothing is to be added.
        weight: broadcast over the leading dimensions; its last dimension is `size`. A weight of
            [num_heads, head_size] gives every head its own.
        eps: added to the mean square.

    Returns:
        (x / rms(x) * weight, x) with x = residual + y.
    """
    x = y if residual is None else residual + y
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if weight.dim() == 1:
        normed = F.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps)
    else:
        normed = F.rms_norm(wide, weight.shape[-1:], None, eps) * weight
    return normed.to(y.dtype), x


def cost(num_tokens: int, hidden_size: int, dtype_bytes: int = 2) -> tuple[int, int]:
    """(bytes, FLOPs) that any implementation must spend: y and residual in, both out, weight once."""
    elements = num_tokens * hidden_size
    return (4 * elements + hidden_size) * dtype_bytes, 5 * elements
