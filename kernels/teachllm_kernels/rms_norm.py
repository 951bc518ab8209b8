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
    wide = x if x.dtype.itemsize >= 4 else x.float()
    # sqrt(mean(x^2) + eps) from the length of x, which is one fused sum: half the passes of squaring, mean and root.
    scale, root_eps = _constants(wide.shape[-1], eps, wide.dtype, wide.device)
    rms = torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True) * scale, root_eps)
    normed = wide / rms * weight
    return normed if wide is x else normed.to(x.dtype), x


@cache
def _constants(size: int, eps: float, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """1 / sqrt(size) and sqrt(eps) as tensors, made once: a Python number would be made into one by every call."""
    values = torch.tensor([size**-0.5, eps**0.5], dtype=dtype, device=device)
    return values[0], values[1]


def cost(num_tokens: int, hidden_size: int, dtype_bytes: int = 2) -> tuple[int, int]:
    """(bytes, FLOPs) that any implementation must spend: y and residual in, both out, weight once."""
    elements = num_tokens * hidden_size
    return (4 * elements + hidden_size) * dtype_bytes, 5 * elements
