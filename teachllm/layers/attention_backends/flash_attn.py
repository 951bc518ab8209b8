"""Attention by the flash-attn package: version 3 (`flash_attn_interface`) where it is installed, else version 2.

Version 3 takes a whole step in one call, blocks of any size. Version 2 takes blocks of a multiple of 256 tokens, and
splits the keys of decodes only when they come apart from the prompts. Both read lengths from the device, but size
their grids by the longest ones, which the host tells them: so steps run eagerly.

Source: https://github.com/Dao-AILab/flash-attention, `hopper/flash_attn_interface.py` and `flash_attn/`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from teachllm.layers.attention_backends.base import AttentionNeeds, AttentionSettings, KVCache

if TYPE_CHECKING:
    from teachllm.layers.attention import AttentionMetadata


class FlashAttnBackend:
    """Sends a step to the newest version that is installed."""

    name = "flash_attn"
    in_graphs = False
    splits_decodes = False
    workspace_bytes = 0

    def __init__(self) -> None:
        if _has_version_3():
            from flash_attn_interface import flash_attn_with_kvcache

            self._attend: Any = _attend_3
            self._functions: tuple[Any, ...] = (flash_attn_with_kvcache,)
        else:
            from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

            self._attend = _attend_2
            self._functions = (flash_attn_with_kvcache, flash_attn_varlen_func)

    @staticmethod
    def check(needs: AttentionNeeds) -> None:
        """Raise ValueError if the package is missing or does not support these heads, this dtype or this block size."""
        reason = None
        if needs.has_quantized_kv:
            reason = "is not told the scales of a quantized KV cache: set kv_cache_dtype=auto, or"
        elif not _has_version_3() and find_spec("flash_attn") is None:
            reason = "needs a package that is not installed: pip install flash-attn, or"
        elif needs.dtype == "float32":
            reason = "computes in bfloat16 or float16: set dtype=bfloat16, or"
        elif needs.head_size % 8 or needs.head_size > 256:
            reason = f"takes heads of a multiple of 8 up to 256, not of {needs.head_size}:"
        elif not _has_version_3() and needs.block_size % 256:
            reason = f"is version 2 here, which takes no blocks of {needs.block_size} tokens: set block_size=256, or"
        if reason is not None:
            raise ValueError(f"attention_backend='flash_attn' {reason} use attention_backend=triton")

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
        result = self._attend(self._functions, q, kv_cache, metadata, settings)
        return result if out is None else out.copy_(result)


def _has_version_3() -> bool:
    return find_spec("flash_attn_interface") is not None


def _options(settings: AttentionSettings) -> dict[str, Any]:
    """Return a layer's arguments of both versions: `window_size` counts tokens to the left and right of one's own."""
    window = (-1, -1) if settings.window is None else (settings.window - 1, 0)
    return {
        "softmax_scale": settings.scale,
        "causal": True,
        "window_size": window,
        "softcap": settings.soft_cap or 0.0,
    }


def _tables(metadata: AttentionMetadata) -> torch.Tensor:
    """[num_seqs, max_blocks] int32, the block tables in the order of the batch; made once per step."""
    tables: torch.Tensor | None = metadata.plans.get("tables")
    if tables is None:
        assert metadata.rows is not None
        tables = metadata.plans["tables"] = metadata.block_tables.index_select(0, metadata.rows)
    return tables


def _attend_3(
    functions: tuple[Any], q: torch.Tensor, kv_cache: KVCache, metadata: AttentionMetadata, settings: AttentionSettings
) -> torch.Tensor:
    return functions[0](
        q,
        *kv_cache,
        cache_seqlens=metadata.seq_lens,
        page_table=_tables(metadata),
        cu_seqlens_q=metadata.query_start,
        max_seqlen_q=max(metadata.query_lens),
        **_options(settings),
    )


def _attend_2(
    functions: tuple[Any, Any],
    q: torch.Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    settings: AttentionSettings,
) -> torch.Tensor:
    attend_decodes, attend_prompts = functions
    tables, count, options = _tables(metadata), metadata.num_decodes, _options(settings)
    parts = []
    if count:
        decoded = attend_decodes(
            q[:count].unsqueeze(1),  # [num_seqs, 1, num_heads, head_size]
            *kv_cache,
            cache_seqlens=metadata.seq_lens[:count],
            block_table=tables[:count],
            **options,
        )
        parts.append(decoded.squeeze(1))
    if count < len(metadata.query_lens):
        lens = metadata.plans.get("kv_start")
        if lens is None:
            lens = F.pad(metadata.seq_lens[count:].cumsum(0, dtype=torch.int32), (1, 0))
            metadata.plans["kv_start"] = lens
        prompts = attend_prompts(
            q[count:],
            *kv_cache,
            cu_seqlens_q=metadata.prefill_start,
            cu_seqlens_k=lens,
            max_seqlen_q=max(metadata.query_lens[count:]),
            max_seqlen_k=max(metadata.kv_lens[count:]),
            block_table=tables[count:],
            **options,
        )
        parts.append(prompts)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
