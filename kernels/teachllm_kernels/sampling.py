"""A random sample per row whose noise depends on the request alone, never on its place in the batch.

Adding independent Gumbel noise to log-probabilities and taking the argmax draws from exactly that
distribution: no cumulative sum, no normalisation, one pass. The noise is not the state of a generator but a
function, Philox4x32-10, of what names the draw, so the same request gets the same tokens whatever runs beside it:

    key      64 bits   the request's seed: low word, high word
    counter  word 0    vocabulary index // 4: one call serves four neighbours, index % 4 picks its word
             word 1    output index: how many tokens of this completion were sampled before
             word 2    child index: which of the request's n completions
             word 3    stream: what the noise is for, so that no two uses ever share a number

Sources: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011; Gumbel, 1954.
"""

from __future__ import annotations

from functools import lru_cache

import torch

STREAM_SAMPLE = 0

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # of counter words 0 and 2
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # added to the key words after each round
_WORD = 0xFFFFFFFF
_LARGEST_UNIFORM = 1.0 - 2.0**-24  # the last float32 below 1: at 1 the noise would be minus infinity


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
    """Multipliers and key steps, [2] int64 each; kept, since a copy to a GPU would make every step wait for it."""
    return torch.tensor(_MULTIPLIERS, device=device), torch.tensor(_KEY_STEPS, device=device)


def philox_uniform_reference(
    seeds: torch.Tensor,
    output_indices: torch.Tensor,
    child_indices: torch.Tensor,
    vocab_size: int,
    stream: int = STREAM_SAMPLE,
) -> torch.Tensor:
    """One uniform number in (0, 1) for each row and vocabulary index.

    Args:
        seeds, output_indices, child_indices: [num_rows] int64; a seed's 64 bits are read as they are.
        stream: what the noise is for.

    Returns:
        [num_rows, vocab_size] float32. Near 0 its steps are 2^-32 fine; it is never 0 and never 1.
    """
    num_rows, num_groups = seeds.shape[0], (vocab_size + 3) // 4
    counter = torch.empty((4, num_rows, num_groups), dtype=torch.int64, device=seeds.device)
    counter[0] = torch.arange(num_groups, device=seeds.device)
    counter[1] = (output_indices & _WORD)[:, None]
    counter[2] = (child_indices & _WORD)[:, None]
    counter[3] = stream
    key = torch.stack((seeds & _WORD, (seeds >> 32) & _WORD))[:, :, None]  # [2, num_rows, 1]
    words = philox_reference(counter, key).permute(1, 2, 0).reshape(num_rows, 4 * num_groups)
    uniform = words[:, :vocab_size].float() * 2.0**-32 + 2.0**-33
    return uniform.clamp_(max=_LARGEST_UNIFORM)


def gumbel_sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    output_indices: torch.Tensor,
    child_indices: torch.Tensor,
    stream: int = STREAM_SAMPLE,
) -> torch.Tensor:
    """Draws one token per row from softmax(logits / temperature).

    Args:
        logits: [num_rows, vocab_size] float32; minus infinity is never drawn while a row has a finite logit.
        temperature: [num_rows] float32, above 0.
        seeds, output_indices, child_indices: [num_rows] int64, see the module.

    Returns:
        [num_rows] int64 token ids.
    """
    uniform = philox_uniform_reference(seeds, output_indices, child_indices, logits.shape[-1], stream)
    # -log1p(-u) is exponentially distributed; the large noises, which decide, come from small u, where u is finest.
    gumbel = -torch.log(-torch.log1p(-uniform))
    return torch.argmax(logits / temperature[:, None] + gumbel, dim=-1)


def cost(num_rows: int, vocab_size: int) -> tuple[int, int]:
    """(bytes, FLOPs): float32 logits in, one int64 id out; 70 integer operations per four ids, 6 float ones per id."""
    ids = num_rows * vocab_size
    return 4 * ids + 8 * num_rows, ids * 70 // 4 + 6 * ids
