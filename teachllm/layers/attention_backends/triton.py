"""Attention by this project's kernels: `paged_decode` and `paged_prefill`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teachllm.layers.attention_backends.base import AttentionNeeds, AttentionSettings, KVCache
from teachllm_kernels.paged_decode import paged_decode_triton
from teachllm_kernels.paged_prefill import paged_prefill_triton, tile_options

if TYPE_CHECKING:
    from teachllm.layers.attention import AttentionMetadata


class TritonBackend:
    """Decodes, which lead the batch, by `paged_decode`, what follows them by `paged_prefill`."""

    name = "triton"
    in_graphs = True
    splits_decodes = True

    @staticmethod
    def check(needs: AttentionNeeds) -> None:
        """Raises ValueError where heads are of a size, or so many on a KV head, that no kernel takes them."""
        check_heads(needs.num_heads, needs.num_kv_heads, needs.head_size, needs.dtype)

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
        out = q.new_empty(q.shape) if out is None else out
        count, rows = metadata.num_decodes, metadata.rows
        assert rows is not None
        attend_decodes(q, kv_cache, metadata, settings, out)
        if count < rows.shape[0]:
            assert metadata.prefill_start is not None
            paged_prefill_triton(
                *(q[count:], *kv_cache, metadata.block_tables, rows[count:], metadata.prefill_start),
                *(metadata.seq_lens[count:], settings.scale, settings.window, settings.soft_cap, out[count:]),
            )
        return out


def attend_decodes(
    q: torch.Tensor, kv_cache: KVCache, metadata: AttentionMetadata, settings: AttentionSettings, out: torch.Tensor
) -> None:
    """The decodes at the head of a batch, if there are any, into the head of `out`."""
    count = metadata.num_decodes
    if count:
        starts, plan = metadata.query_start[: count + 1], metadata.decode_plans[settings.window]
        where = (*kv_cache, metadata.block_tables, starts, plan)
        scale, window, soft_cap = settings.scale, settings.window, settings.soft_cap
        paged_decode_triton(q[:count], *where, scale, window, soft_cap, out=out[:count])


def check_heads(num_heads: int, num_kv_heads: int, head_size: int, dtype: str) -> None:
    """Refuses what the kernels of a GPU cannot take.

    Raises:
        ValueError: in one line, with what they can.
    """
    group, most = num_heads // num_kv_heads, tile_options(head_size, getattr(torch, dtype))["BLOCK_M"]
    if head_size % 2 or not 16 <= head_size <= 256:
        raise ValueError(f"heads of {head_size}: the GPU's attention takes even sizes from 16 to 256; use device=cpu")
    if group > most:
        fix = "use dtype=bfloat16 or device=cpu" if dtype == "float32" else "use device=cpu"
        raise ValueError(f"{group} query heads on a KV head: the GPU's attention takes up to {most} in {dtype}; {fix}")
