"""RMS norm, with the residual added first where there is one.

Every sub-layer of a Llama-family model ends in `x = residual + y` and the next begins with `rms_norm(x)`, so the
two belong in one operation: done apart, each row travels to memory and back several times. Memory-bound: its speed
is bytes over bandwidth, see `cost`.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

from functools import cache

import torch


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
    # sqrt(mean(x^2) + eps) from the length of x, which is one fused sum: half the passes of squaring, mean and root.
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    rms = torch.hypot(length * wide.shape[-1] ** -0.5, _scalar(eps**0.5, wide.dtype, wide.device))
    return (wide / rms * weight).to(y.dtype), x


@cache
def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def cost(num_tokens: int, hidden_size: int, dtype_bytes: int = 2) -> tuple[int, int]:
    """(bytes, FLOPs) that any implementation must spend: y and residual in, both out, weight once."""
    elements = num_tokens * hidden_size
    return (4 * elements + hidden_size) * dtype_bytes, 5 * elements
