"""Attention on any host, by PyTorch's products of matrices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from teachllm.layers.attention_backends.base import AttentionNeeds, AttentionSettings, KVCache
from teachllm_kernels.attention.paged_attention import Rectangle, attend, plan_attention

if TYPE_CHECKING:
    from teachllm.layers.attention import AttentionMetadata


@dataclass(slots=True)
class ReferenceMetadata:
    """Hold the plans of a step, by what layers differ in: (query heads, KV heads, window)."""

    plans: dict[tuple[int, int, int | None], list[Rectangle]] = field(default_factory=dict)


class ReferenceBackend:
    """Takes everything. Its plan depends on the batch alone, so that all layers of a kind share it."""

    name = "reference"
    in_graphs = False
    splits_decodes = False
    workspace_bytes = 0

    @staticmethod
    def check(needs: AttentionNeeds) -> None:
        """There is nothing that it cannot compute."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        settings: AttentionSettings,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k_cache, v_cache = kv_cache
        block_size, num_kv_heads = k_cache.shape[1:3]
        kind = (q.shape[1], num_kv_heads, settings.window)
        plans = metadata.prepared(ReferenceMetadata).plans
        plan = plans.get(kind)
        if plan is None:
            plan = plan_attention(
                metadata.block_tables,
                metadata.query_lens,
                metadata.kv_lens,
                block_size,
                num_heads=q.shape[1],
                num_kv_heads=num_kv_heads,
                window=settings.window,
                trees=metadata.trees,
            )
            plans[kind] = plan
        result = attend(q, k_cache, v_cache, plan, settings.scale, settings.soft_cap, settings.kv_scales)
        return result if out is None else out.copy_(result)


REFERENCE = ReferenceBackend()
