"""Rotary position embedding: turn each pair of a head's channels by an angle proportional to the position.

The dot product of two turned vectors depends only on the distance between their positions, which is how attention
learns about order. Channel i is paired with channel i + size/2 (the layout of Hugging Face checkpoints, not the
interleaved one of the paper). Queries and keys lie side by side after the merged projection, so one call turns both.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import tl, triton


def rotary_reference(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate every head of every token: (a, b) -> (a cos - b sin, b cos + a sin) over the two halves of a head.

    Args:
        x: [num_tokens, num_heads, head_size].
        cos: [num_tokens, 1, head_size], each half holding the same angles.
        signed_sin: likewise, its first half negated, so that one multiply-add does both halves.
    """
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, x.roll(half, dims=-1), signed_sin)


@triton.jit
def normed_and_turned(a, b, weight_a, weight_b, cos, sin, eps, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Apply the RMS norm of heads, if they have one, and the rotation, inside a kernel. All values are float32.

    Args:
        a, b: [rows, at least HALF], the halves of each row's head, 0 after their ends.
        weight_a, weight_b: likewise, the norm's weights; without a norm they are not read.
        cos, sin: [1, at least HALF], per pair: the second half of each of `rotary_reference`'s two.
    """
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
        a = a * scale * weight_a
        b = b * scale * weight_b
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def load_halves(matrix_ptr, head, HALF: tl.constexpr, HALF_PADDED: tl.constexpr):
    """Load rows `head` of a matrix of heads as two halves, [rows, HALF_PADDED] float32; negative rows are zeros."""
    lane = tl.arange(0, HALF_PADDED)
    inside = (head >= 0)[:, None] & (lane < HALF)[None, :]
    head_ptrs = matrix_ptr + head[:, None] * 2 * HALF + lane[None, :]
    a = tl.load(head_ptrs, mask=inside, other=0.0).to(tl.float32)
    return a, tl.load(head_ptrs + HALF, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def turned_heads(heads, weights, angles, eps, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Norm and rotate heads, given as halves. Return [rows, 2 * HALF_PADDED]."""
    a, b = normed_and_turned(*heads, *weights, *angles, eps, HALF, HAS_NORM)
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


def cost(num_tokens: int, num_heads: int, head_size: int, dtype_bytes: int = 2) -> tuple[int, int]:
    """Return (bytes, FLOPs) that any implementation must spend: x in and out, cos and sin of each pair in."""
    elements = num_tokens * num_heads * head_size
    return (2 * elements + num_tokens * head_size) * dtype_bytes, 3 * elements
