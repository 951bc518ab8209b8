"""Attention that gives a token the same bits whatever runs beside it and however its prompt is cut.

A split of the keys that depends on the batch, or another kernel for decodes, adds the same numbers in another order.
So every token goes through one kernel here, a decode as a chunk of one token, which takes the keys from the first on
in tiles of one size. A lone long sequence then keeps only as many processors busy as there are KV heads: the price.

Source: He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teachllm.layers.attention_backends.base import AttentionNeeds, AttentionSettings, KVCache
from teachllm.layers.attention_backends.triton import TritonBackend
from teachllm_kernels.attention.paged_prefill import paged_prefill_triton

if TYPE_CHECKING:
    from teachllm.layers.attention import AttentionMetadata


class InvariantBackend:
    """Everything by `paged_prefill` with its order of additions fixed."""

    name = "invariant"
    in_graphs = True
    splits_decodes = False
    workspace_bytes = 0

    @staticmethod
    def check(needs: AttentionNeeds) -> None:
        """Implement `TritonBackend.check`."""
        TritonBackend.check(needs)

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
        assert metadata.rows is not None
        return paged_prefill_triton(
            q,
            *kv_cache,
            block_tables=metadata.block_tables,
            rows=metadata.rows,
            query_start=metadata.query_start,
            seq_lens=metadata.seq_lens,
            scale=settings.scale,
            window=settings.window,
            soft_cap=settings.soft_cap,
            out=out,
            is_fixed=True,
            scales=settings.kv_scales,
        )
