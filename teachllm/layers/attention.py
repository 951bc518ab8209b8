"""Attention over the paged KV cache: write this step's K and V into their slots, then attend through the block table.

A step's batch is flat: the tokens of all its requests one after the other, prompts and decodes alike, with no
padding between them. `AttentionMetadata` says where each request's tokens lie in that flat batch and where its
K and V lie in the cache. It is passed as an argument from the runner to every layer; there is no global context.

Source: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", SOSP 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from teachllm_kernels.kv_write import kv_write_cpu
from teachllm_kernels.paged_attention import Rectangle, attend, plan_attention


@dataclass(slots=True)
class AttentionMetadata:
    """Where a flat batch of `num_tokens` tokens of `num_seqs` requests reads and writes.

    Attributes:
        query_start: [num_seqs + 1] int32, request i owns flat tokens [query_start[i], query_start[i + 1]).
        seq_lens: [num_seqs] int32, sequence length including this step's tokens.
        block_tables: [num_seqs, max_blocks] int32, logical to physical block; unused entries are 0.
        slot_mapping: [num_tokens] int64, slot that each token's K and V are written to.
        query_lens, kv_lens: `query_start` differences and `seq_lens` as Python lists, so that code on the host
            never waits for a device to learn them.
        plans: by kind of layer (heads, KV heads, window), made by the first of a kind and read by the others.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    query_lens: list[int]
    kv_lens: list[int]
    plans: dict[tuple[int, int, int | None], list[Rectangle]] = field(default_factory=dict, repr=False)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Writes k and v to their slots, then attends.

    Args:
        q: [num_tokens, num_heads, head_size].
        k, v: [num_tokens, num_kv_heads, head_size].
        kv_cache: one layer's K and V, each [num_blocks, block_size, num_kv_heads, head_size].
        scale: multiplies the dot products.
        window: a token sees itself and the `window - 1` before it; None sees all.
        soft_cap: squeezes each score into (-soft_cap, soft_cap).

    Returns:
        [num_tokens, num_heads, head_size].
    """
    k_cache, v_cache = kv_cache
    kv_write_cpu(k, v, k_cache, v_cache, metadata.slot_mapping)
    block_size, num_kv_heads = k_cache.shape[1:3]
    kind = (q.shape[1], num_kv_heads, window)
    plan = metadata.plans.get(kind)
    if plan is None:
        plan = plan_attention(metadata.block_tables, metadata.query_lens, metadata.kv_lens, block_size, *kind)
        metadata.plans[kind] = plan
    return attend(q, k_cache, v_cache, plan, scale, soft_cap)


class Attention(nn.Module):
    """One layer's attention: no weights, only its scale and how far it looks back."""

    def __init__(self, scale: float, window: int | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.window = window

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """As `paged_attention`."""
        return paged_attention(q, k, v, kv_cache, metadata, self.scale, self.window)
