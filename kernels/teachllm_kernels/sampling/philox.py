"""Random numbers as a function of the draw's identity (lesson 07): Philox4x32-10, and Gumbel noise made from it.

With a stateful generator a request's tokens would depend on which requests drew before it. This function has no state:

    key      64 bits   the request's seed: low word, high word
    counter  word 0    vocabulary index // 4: one call serves four neighbours, index % 4 picks its word
             word 1    output index: how many tokens of this completion were sampled before
             word 2    child index: which of the request's n completions
             word 3    stream: the purpose of the noise, so that no two uses ever share a number

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from teachllm_kernels._triton import tl, triton

try:
    from triton.language.extra import libdevice  # as it is compiled, Triton puts the target's own in its place
except ImportError:
    libdevice = None

STREAM_SAMPLE = 0  # Gumbel noise: which token is drawn
STREAM_ACCEPT = 1  # uniform numbers: whether a draft is accepted, see `rejection_reference.py`
STREAM_DRAFT = 2  # Gumbel noise: which token is drafted

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # for counter words 0 and 2
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # added to the key words after each round
_WORD = 0xFFFFFFFF
_LARGEST_UNIFORM = 1.0 - 2.0**-24  # the last float32 below 1: at 1 the noise would be minus infinity

if os.environ.get("TRITON_INTERPRET") == "1":  # the interpreter has none of the GPU's own functions

    @triton.jit
    def _log(x):
        return tl.log(x)
else:

    @triton.jit
    def _log(x):
        if hasattr(libdevice, "fast_logf"):
            return libdevice.fast_logf(x)
        else:  # on AMD's GPUs
            return tl.log(x)


def philox_reference(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10, the same function as `tl.philox` in Triton.

    torch has no unsigned 64-bit multiply, but the product's bits are the same in signed arithmetic that wraps,
    so words live in int64 and are masked back to 32 bits.

    Args:
        counter: [4, ...] int64, words in [0, 2^32).
        key: [2, ...] int64, words in [0, 2^32); the trailing dimensions broadcast against the counter's.

    Returns:
        [4, ...] int64, four random words in [0, 2^32).
    """
    multipliers, steps = (pair.view(2, *[1] * (counter.dim() - 1)) for pair in _constants(counter.device))
    even, odd = counter[0::2], counter[1::2]  # words (0, 2) and (1, 3), [2, ...] each
    for _ in range(_ROUNDS):
        product = (even * multipliers).flip(0)  # word 2's product lands on word 0 and the other way round
        even = ((product >> 32) ^ odd ^ key) & _WORD
        odd = product & _WORD
        key = (key + steps) & _WORD
    return torch.stack((even[0], odd[0], even[1], odd[1]))


@lru_cache(maxsize=16)
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return multipliers and key steps, [2] int64 each; cached, since a copy to the GPU would block every step."""
    return torch.tensor(_MULTIPLIERS, device=device), torch.tensor(_KEY_STEPS, device=device)


def philox_uniform_reference(
    seeds: torch.Tensor,
    output_indices: torch.Tensor,
    child_indices: torch.Tensor,
    vocab_size: int,
    stream: int = STREAM_SAMPLE,
    first_id: int = 0,
) -> torch.Tensor:
    """Return one uniform number in (0, 1) for each row and vocabulary index.

    Args:
        seeds, output_indices, child_indices: [num_rows] int64; a seed's 64 bits are read as they are.
        vocab_size: the number of indices.
        stream: the purpose of the noise.
        first_id: the first index.

    Returns:
        [num_rows, vocab_size] float32. Near 0 its steps are 2^-32 fine; it is never 0 and never 1.
    """
    quad, skipped = divmod(first_id, 4)
    num_rows, num_groups = seeds.shape[0], (skipped + vocab_size + 3) // 4
    counter = torch.empty((4, num_rows, num_groups), dtype=torch.int64, device=seeds.device)
    counter[0] = quad + torch.arange(num_groups, device=seeds.device)
    counter[1] = (output_indices & _WORD)[:, None]
    counter[2] = (child_indices & _WORD)[:, None]
    counter[3] = stream
    key = torch.stack((seeds & _WORD, (seeds >> 32) & _WORD))[:, :, None]  # [2, num_rows, 1]
    words = philox_reference(counter, key).permute(1, 2, 0).reshape(num_rows, 4 * num_groups)
    uniform = words[:, skipped : skipped + vocab_size].float() * 2.0**-32 + 2.0**-33
    return uniform.clamp_(max=_LARGEST_UNIFORM)


@triton.jit
def philox_words(quads, seed, output_index, child_index, STREAM: tl.constexpr = STREAM_SAMPLE):
    """Return [4 * N] uint32 for the vocabulary indices 4 * quads, 4 * quads + 1, ... in order. `quads` is [N]
    int32.
    """
    a, b, c, d = tl.philox(seed, quads, output_index.to(tl.int32), child_index.to(tl.int32), STREAM)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def uniform_numbers(quads, seed, output_index, child_index, STREAM: tl.constexpr = STREAM_SAMPLE):
    """Return [4 * N] float32, those of `philox_uniform_reference`, for the indices of `philox_words`."""
    u = philox_words(quads, seed, output_index, child_index, STREAM).to(tl.float32) * 2.0**-32 + 2.0**-33
    return tl.minimum(u, 1.0 - 2.0**-24)


@triton.jit
def gumbel_noise(quads, seed, output_index, child_index, STREAM: tl.constexpr = STREAM_SAMPLE):
    """Return [4 * N] float32, -log(-log1p(-u)) as in `gumbel_sample_reference`, for the indices of
    `philox_words`.
    """
    u = uniform_numbers(quads, seed, output_index, child_index, STREAM)
    # The GPU's own logarithm is one instruction, but coarse if its result is near 0. There, a few terms of the
    # series are exact to a float's last bit; elsewhere, 1 - u is exact.
    series = 1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * series)))
    exponential = tl.where(u < 0.125, series, -_log(1.0 - u))
    return -_log(exponential)
