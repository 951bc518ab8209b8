"""Attention by the flashinfer package: its batch wrappers over the paged cache, one for decodes, one for the rest.

A wrapper's `plan` divides a step's work among the processors. It runs on the host, once per step for all layers of a
kind, and wants the lengths there: so steps run eagerly.

Source: https://docs.flashinfer.ai, `BatchPrefillWithPagedKVCacheWrapper` and `BatchDecodeWithPagedKVCacheWrapper`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from teachllm.layers.attention_backends.base import AttentionNeeds, AttentionSettings, KVCache

if TYPE_CHECKING:
    from teachllm.layers.attention import AttentionMetadata

_WORKSPACE_BYTES = 128 << 20  # as its documentation recommends
_HEAD_SIZES = (64, 128, 256)


class _Wrapper(Protocol):
    """One of the package's wrappers; what `plan` takes differs between them."""

    plan: Callable[..., None]

    def run(self, q: torch.Tensor, kv_cache: KVCache, *, out: torch.Tensor) -> torch.Tensor: ...


@dataclass(slots=True)
class FlashInferMetadata:
    """Hold the kinds of layer whose wrappers have planned the step."""

    planned: set[AttentionSettings] = field(default_factory=set)


class FlashInferBackend:
    """Keeps two wrappers for each kind of layer; all share one workspace, since layers follow each other."""

    name = "flashinfer"
    in_graphs = False
    splits_decodes = False
    workspace_bytes = _WORKSPACE_BYTES

    def __init__(self) -> None:
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[AttentionSettings, tuple[_Wrapper, _Wrapper]] = {}
        self._planned: torch.cuda.Event | None = None

    @staticmethod
    def check(needs: AttentionNeeds) -> None:
        """Raise ValueError if the package is missing or does not support these heads or this dtype."""
        reason = None
        if needs.has_quantized_kv:
            reason = "is not told the scales of a quantized KV cache: set kv_cache_dtype=auto, or"
        elif find_spec("flashinfer") is None:
            reason = "needs a package that is not installed: pip install flashinfer-python, or"
        elif needs.dtype == "float32":
            reason = "computes in bfloat16 or float16: set dtype=bfloat16, or"
        elif needs.head_size not in _HEAD_SIZES:
            reason = f"takes heads of {', '.join(map(str, _HEAD_SIZES))}, not of {needs.head_size}:"
        if reason is not None:
            raise ValueError(f"attention_backend='flashinfer' {reason} use attention_backend=triton")

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
        decodes, prompts = self._wrappers_of(settings, q.device)
        planned = metadata.prepared(FlashInferMetadata).planned
        if settings not in planned:
            self._plan(decodes, prompts, q, kv_cache[0], metadata, settings)
            planned.add(settings)
        count = metadata.num_decodes
        if count:
            decodes.run(q[:count].contiguous(), kv_cache, out=out[:count])
        if count < len(metadata.query_lens):
            prompts.run(q[count:].contiguous(), kv_cache, out=out[count:])
        return out

    def _wrappers_of(self, settings: AttentionSettings, device: torch.device) -> tuple[_Wrapper, _Wrapper]:
        wrappers = self._wrappers.get(settings)
        if wrappers is None:
            from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

            if self._workspace is None:
                self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            wrappers = self._wrappers[settings] = (
                # Its decode kernels that do without tensor cores take few sizes of groups.
                BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=True),
                BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD"),
            )
        return wrappers

    def _plan(
        self,
        decodes: _Wrapper,
        prompts: _Wrapper,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        metadata: AttentionMetadata,
        settings: AttentionSettings,
    ) -> None:
        """Plan a step for one kind of layer."""
        if self._planned is not None:
            self._planned.synchronize()  # the last plan has left the pinned memory that this one is written to
        num_heads = q.shape[1]
        block_size, num_kv_heads, head_size = k_cache.shape[1:]
        options = {
            "sm_scale": settings.scale,
            "window_left": -1 if settings.window is None else settings.window - 1,
            "logits_soft_cap": settings.soft_cap or 0.0,
            "q_data_type": q.dtype,
            "kv_data_type": k_cache.dtype,
        }
        count = metadata.num_decodes
        if count:
            first_page, pages, last_len = _pages(metadata, slice(0, count), block_size)
            decodes.plan(first_page, pages, last_len, num_heads, num_kv_heads, head_size, block_size, **options)
        if count < len(metadata.query_lens):
            starts = torch.tensor([0, *np.cumsum(metadata.query_lens[count:])], dtype=torch.int32)
            first_page, pages, last_len = _pages(metadata, slice(count, None), block_size)
            prompts.plan(
                starts,
                first_page,
                pages,
                last_len,
                num_heads,
                num_kv_heads,
                head_size,
                block_size,
                causal=True,
                **options,
            )
        if not q.is_cpu:
            self._planned = torch.cuda.Event()
            self._planned.record()


def _pages(
    metadata: AttentionMetadata, requests: slice, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return flashinfer's block table: where each request's pages begin, all pages, the tokens in each last page."""
    assert metadata.rows is not None
    tables = metadata.block_tables.index_select(0, metadata.rows[requests])
    kv_lens = np.array(metadata.kv_lens[requests])
    num_pages = -(-kv_lens // block_size)
    starts = np.concatenate(([0], num_pages.cumsum()))
    width = tables.shape[1]
    at = np.arange(starts[-1]) + np.repeat(np.arange(len(kv_lens)) * width - starts[:-1], num_pages)
    pages = tables.flatten().index_select(0, torch.from_numpy(at).to(tables.device))
    last = kv_lens - (num_pages - 1) * block_size
    return torch.from_numpy(starts).int(), pages, torch.from_numpy(last).int()
