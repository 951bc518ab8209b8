"""Write the K and V of this step's tokens into their slots of the paged cache.

A slot is a token's place in the cache: `block * block_size + offset`. The tokens of a step scatter to wherever the
block tables put them; attention then reads them back together with everything written before.

Source: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", SOSP 2023.
"""

from __future__ import annotations

import torch

from teachllm_kernels._triton import gdc_launch_dependents, gdc_wait, launch_options, tl, triton

_BLOCK = 1024


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


@triton.jit
def _kv_write(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    written = (column < size) & (slot >= 0)
    tl.store(k_cache + slot * size + column, tl.load(k + token * k_stride + column, mask=written), mask=written)
    tl.store(v_cache + slot * size + column, tl.load(v + token * v_stride + column, mask=written), mask=written)


def kv_write_triton(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """As `kv_write_reference`; a token's heads lie side by side, tokens may lie apart."""
    num_tokens, num_kv_heads, head_size = k.shape
    size = num_kv_heads * head_size
    _kv_write[(num_tokens, triton.cdiv(size, _BLOCK))](
        *(k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0), size),
        BLOCK=_BLOCK,
        **launch_options(k.device),
    )


def cost(num_tokens: int, num_kv_heads: int, head_size: int, dtype_bytes: int = 2) -> tuple[int, int]:
    """(bytes, FLOPs) that any implementation must spend: K and V in and out, the slots once."""
    return 4 * num_tokens * num_kv_heads * head_size * dtype_bytes + 8 * num_tokens, 0
