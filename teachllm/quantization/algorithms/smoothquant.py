"""SmoothQuant: move what is hard to round from activations to weights.

With a scale for each token, one activation a hundred times as large as the others leaves these no more than one or two
quantized values. Such outliers sit in the same few inputs for every token, and a scale for each input cannot be taken
out of an integer product. But it can be taken over by the weights: x_j / s_j and W[:, j] * s_j, as in AWQ, where

    s_j = max |x_j|^m / max |W[:, j]|^(1 - m)

with m = 0.5 makes both equally hard. The norm before divides, so that nothing is left to do while the model runs.

Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_SMALLEST = 1e-5


def smoothing_scales(weights: Sequence[torch.Tensor], max_abs: torch.Tensor, migration: float = 0.5) -> torch.Tensor:
    """Return what to multiply the weights of each input with, and to divide the input by.

    Args:
        weights: [out, in] of the layers that share the inputs.
        max_abs: [in], max of |x| over tokens.
        migration: how much of the difficulty moves, 0 to 1.

    Returns:
        [in] float32; 1 where an input is always 0.
    """
    of_weights = torch.stack([weight.abs().amax(dim=0) for weight in weights]).amax(dim=0)
    scales = max_abs.clamp_min(_SMALLEST) ** migration / of_weights.clamp_min(_SMALLEST) ** (1.0 - migration)
    return torch.where(max_abs == 0, torch.ones_like(scales), scales).clamp_min(_SMALLEST)
