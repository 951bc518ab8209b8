"""Round to nearest: the simplest way to quantize, and the baseline of every better one.

A scale is as large as the largest weight of its group needs, and no larger; each weight takes the nearest quantized
value. Nothing is known of the activations that the weight will be multiplied with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from teachllm.layers.weights.quantized_weights import BLOCK, Activations, GroupedWeight, ScaledWeight

E4M3_MAX = 448.0
_TINY = 1e-10  # a group of zeros has a scale, too


def grouped(
    weight: torch.Tensor,
    bits: int,
    group_size: int,
    is_symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float16,
) -> GroupedWeight:
    """Quantize a weight [out, in] by groups.

    Args:
        group_size: inputs that share a scale; must divide `in`.
        is_symmetric: 0.0 is the middle of the range; otherwise each group has its own zero.
        scale_dtype: values are rounded for the scale as it is stored.

    Raises:
        ValueError: the group size does not divide.
    """
    num_out, num_in = weight.shape
    if num_in % group_size:
        raise ValueError(f"groups of {group_size} do not divide {num_in} inputs: choose a group size that does")
    groups = weight.float().reshape(num_out, -1, group_size)
    most = (1 << bits) - 1
    low, high = groups.amin(dim=2).clamp_max(0.0), groups.amax(dim=2).clamp_min(0.0)
    span = 2 * torch.maximum(high, -low) if is_symmetric else high - low
    scales = (span / most).clamp_min(smallest_scale(scale_dtype)).to(scale_dtype)
    steps = scales.float()
    zeros = None if is_symmetric else (-low / steps).round().clamp(0, most)
    middle = zeros.unsqueeze(2) if zeros is not None else 1 << (bits - 1)
    qweight = (groups / steps.unsqueeze(2)).round().add(middle).clamp(0, most).to(torch.uint8)
    return GroupedWeight(
        qweight.reshape(num_out, num_in), scales, None if zeros is None else zeros.to(torch.int32), bits
    )


def scaled(
    weight: torch.Tensor,
    dtype: torch.dtype,
    per: str = "channel",
    activations: Activations = Activations.BY_TOKEN,
    scale_dtype: torch.dtype = torch.float32,
) -> ScaledWeight:
    """Quantize a weight [out, in] to 8 bits.

    Args:
        dtype: int8 or float8_e4m3fn.
        per: what has a scale: the "tensor", a "channel" (an output), or a "block" of 128 x 128.
        scale_dtype: values are rounded for the scale as it is stored.
    """
    wide = weight.float()
    largest = E4M3_MAX if dtype is torch.float8_e4m3fn else 127.5
    amax = wide.abs()
    if per == "tensor":
        amax = amax.amax().reshape(1, 1)
    elif per == "channel":
        amax = amax.amax(dim=1, keepdim=True)
    else:
        num_out, num_in = weight.shape
        padded = F.pad(amax, (0, -num_in % BLOCK, 0, -num_out % BLOCK))
        amax = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).amax(dim=(1, 3))
    scales = (amax.clamp_min(_TINY) / largest).clamp_min(smallest_scale(scale_dtype)).to(scale_dtype).float()
    block = (BLOCK, BLOCK) if per == "block" else None
    ones = ScaledWeight(torch.ones_like(wide, dtype=dtype), scales, activations, block=block)
    steps = wide / ones.dequantize(torch.float32)
    if dtype is torch.float8_e4m3fn:
        return ScaledWeight(steps.clamp(-E4M3_MAX, E4M3_MAX).to(dtype), scales, activations, block=block)
    return ScaledWeight(steps.round().clamp(-128, 127).to(dtype), scales, activations, block=block)


def smallest_scale(dtype: torch.dtype) -> float:
    """Return the smallest positive scale: in float16 small ones are subnormal, with 5 binary digits or more."""
    return 2.0**-20 if dtype is torch.float16 else torch.finfo(dtype).tiny
