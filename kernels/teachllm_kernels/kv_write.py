"""Write the K and V of this step's tokens into their slots of the paged cache.

A slot is a token's place in the cache: `block * block_size + offset`. The tokens of a step scatter to wherever the
block tables put them; attention then reads them back together with everything written before.

Source: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", SOSP 2023.
"""

from __future__ import annotations

import torch


def kv_write_reference(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes in place.

    Args:
        k, v: [num_tokens, num_kv_heads, head_size], in the cache's dtype.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_size], contiguous.
        slot_mapping: [num_tokens] int64; -1 means that the token is not written (padding).
    """
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    kv_write_cpu(k[kept], v[kept], k_cache, v_cache, slot_mapping[kept])


def kv_write_cpu(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """As `kv_write_reference`, for batches without padding: batches on a CPU have none."""
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)


def cost(num_tokens: int, num_kv_heads: int, head_size: int, dtype_bytes: int = 2) -> tuple[int, int]:
    """(bytes, FLOPs) that any implementation must spend: K and V in and out, the slots once."""
    return 4 * num_tokens * num_kv_heads * head_size * dtype_bytes + 8 * num_tokens, 0
