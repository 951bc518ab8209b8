"""Quantized values packed in words of 32 bits, as files hold them, least significant first.

[1, 2, 3, 4, 5, 6, 7, 8] of 4 bits  <->  0x87654321
"""

from __future__ import annotations

import torch

WORD = 32
INTS = (torch.int32,)  # words that quantized values are packed into


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unpack int32 words to uint8 values, 32 / bits times as many along `dim`."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    words = words.movedim(dim, -1)
    values = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)  # the sign is shifted in, and masked off
    return values.flatten(-2).to(torch.uint8).movedim(-1, dim)


def pack(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack values to int32 words, the inverse of `unpack`; the last word is filled up with zeros.

    Args:
        values: any integer dtype, 0 to 2^bits - 1.
    """
    per_word = WORD // bits
    values = values.movedim(dim, -1).to(torch.int64)
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % per_word)).unflatten(-1, (-1, per_word))
    shifts = torch.arange(0, WORD, bits, device=values.device)
    words = (values << shifts).sum(dim=-1)
    words = torch.where(words >= 1 << (WORD - 1), words - (1 << WORD), words)  # two's complement
    return words.to(torch.int32).movedim(-1, dim).contiguous()
