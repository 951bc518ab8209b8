"""Attention by the flash-attn package: version 3 (`flash_attn_interface`) where it is installed, else version 2.

Version 3 takes a whole step in one call, blocks of any size. Version 2 takes blocks of a multiple of 256 tokens, and
splits the keys of decodes only when they come apart from the prompts. Both read lengths from the device, but size
their grids by the longest ones, which the host tells them: so steps run eagerly.

Source: https://github.com/Dao-AILab/flash-attention, `hopper/flash_attn_interface.py` and `flash_attn/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypedDict

import torch
import torch.nn.functional as F

from teachllm.layers.attention_backends.base import AttentionNeeds, AttentionSettings, KVCache

if TYPE_CHECKING:
    from teachllm.layers.attention import AttentionMetadata

_Function = Callable[..., torch.Tensor]  # of the package
_Attend = Callable[[torch.Tensor, KVCache, "AttentionMetadata", AttentionSettings], torch.Tensor]


class _Options(TypedDict):
    """A layer's arguments of both versions: `window_size` counts tokens to the left and right of one's own."""

    softmax_scale: float
    causal: bool
    window_size: tuple[int, int]
    softcap: float


@dataclass(slots=True)
class FlashAttnMetadata:
    """Hold what a step's first layer prepares for all of them.

    Attributes:
        tables: [num_seqs, max_blocks] int32, the block tables in the order of the batch.
        kv_start: [num_prompts + 1] int32, where the keys of each prompt begin if they lie one after the other.
    """

    tables: torch.Tensor | None = None
    kv_start: torch.Tensor | None = None


class FlashAttnBackend:
    """Sends a step to the newest version that is installed."""

    name = "flash_attn"
    in_graphs = False
    splits_decodes = False
    workspace_bytes = 0

    def __init__(self) -> None:
        if _has_version_3():
            from flash_attn_interface import flash_attn_with_kvcache

            self._attend: _Attend = partial(_attend_3, flash_attn_with_kvcache)
        else:
            from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

            self._attend = partial(_attend_2, flash_attn_with_kvcache, flash_attn_varlen_func)

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
        result = self._attend(q, kv_cache, metadata, settings)
        return result if out is None else out.copy_(result)


def _has_version_3() -> bool:
    return find_spec("flash_attn_interface") is not None


def _options(settings: AttentionSettings) -> _Options:
    window = (-1, -1) if settings.window is None else (settings.window - 1, 0)
    return {
        "softmax_scale": settings.scale,
        "causal": True,
        "window_size": window,
        "softcap": settings.soft_cap or 0.0,
    }


def _tables(metadata: AttentionMetadata) -> torch.Tensor:
    """Return `FlashAttnMetadata.tables`."""
    prepared = metadata.prepared(FlashAttnMetadata)
    if prepared.tables is None:
        assert metadata.rows is not None
        prepared.tables = metadata.block_tables.index_select(0, metadata.rows)
    return prepared.tables


def _kv_start(metadata: AttentionMetadata) -> torch.Tensor:
    """Return `FlashAttnMetadata.kv_start`."""
    prepared = metadata.prepared(FlashAttnMetadata)
    if prepared.kv_start is None:
        lens = metadata.seq_lens[metadata.num_decodes :]
        prepared.kv_start = F.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    return prepared.kv_start


def _attend_3(
    attend: _Function, q: torch.Tensor, kv_cache: KVCache, metadata: AttentionMetadata, settings: AttentionSettings
) -> torch.Tensor:
    return attend(
        q,
        *kv_cache,
        cache_seqlens=metadata.seq_lens,
        page_table=_tables(metadata),
        cu_seqlens_q=metadata.query_start,
        max_seqlen_q=max(metadata.query_lens),
        **_options(settings),
    )


def _attend_2(
    attend_decodes: _Function,
    attend_prompts: _Function,
    q: torch.Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    settings: AttentionSettings,
) -> torch.Tensor:
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
        prompts = attend_prompts(
            q[count:],
            *kv_cache,
            cu_seqlens_q=metadata.prefill_start,
            cu_seqlens_k=_kv_start(metadata),
            max_seqlen_q=max(metadata.query_lens[count:]),
            max_seqlen_k=max(metadata.kv_lens[count:]),
            block_table=tables[count:],
            **options,
        )
        parts.append(prompts)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
