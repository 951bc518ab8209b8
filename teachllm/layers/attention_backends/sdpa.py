"""Long prompts by PyTorch's attention, which takes cuDNN's kernel; everything else by this project's.

cuDNN's is 1.2 times as fast (one prompt of 16,384 tokens on an H200: 580 against 475 TFLOP/s), but through PyTorch it
reads no block tables and its causal mask is a square one. A prompt from its first token on has both: K and V lie in the
batch. A prompt that goes on after a short context (a prefix hit) gets them: its K and V are gathered from the cache,
and rows of zeros stand for the queries that were computed before. With a longer context those rows cost more than
the faster kernel saves; the mask that needs none (`causal_lower_right`) makes PyTorch take FlashAttention 2 instead,
which is no faster than this project's kernel on a Hopper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from teachllm.layers.attention_backends.base import AttentionNeeds, AttentionSettings, KVCache
from teachllm.layers.attention_backends.triton import TritonBackend, attend_decodes, attend_prompts

if TYPE_CHECKING:
    from teachllm.layers.attention import AttentionMetadata

_LONG_PROMPT = 4096  # tokens of a step from which on a call of its own for each layer is worth it
_QUERIES_TO_KEYS = 0.75  # at least: of a square of keys a sixteenth is then computed in vain
_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


@dataclass(frozen=True, slots=True)
class _Part:
    """Requests of a step that one call computes.

    Attributes:
        tokens: where they lie in the flat batch.
        requests: which they are.
        query_start: [num_requests + 1] int32, from their own first token on.
        blocks: [num_blocks] int32, a long prompt's part of the cache; None: K and V lie in the batch.
        context_len: of a long prompt.
        is_long: one long prompt, for PyTorch.
    """

    tokens: slice
    requests: slice
    query_start: torch.Tensor
    blocks: torch.Tensor | None = None
    context_len: int = 0
    is_long: bool = False


class SDPABackend(TritonBackend):
    """A step's long prompts one after the other, what stands between them together."""

    name = "sdpa"

    @staticmethod
    def check(needs: AttentionNeeds) -> None:
        """Raises ValueError as `TritonBackend.check`, and where no layer could ever use PyTorch's attention."""
        TritonBackend.check(needs)
        reason = None
        if needs.dtype == "float32":
            reason = "computes in bfloat16 or float16, and this model runs in float32"
        elif None not in needs.windows:
            reason = "sees whole sequences, and every layer of this model has a window"
        elif needs.has_soft_cap:
            reason = "has no soft cap, and this model's scores have one"
        if reason is not None:
            raise ValueError(f"attention_backend='sdpa' {reason}: use attention_backend=triton")

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
        parts = _parts(metadata, kv_cache[0].shape[1])
        if settings.window is not None or settings.soft_cap is not None or not parts:
            return super().attend(q, k, v, kv_cache, metadata, settings, out)
        if len(parts) == 1 and metadata.num_decodes == 0 and out is None:
            return _attend_long(q, k, v, kv_cache, parts[0], settings)
        out = q.new_empty(q.shape) if out is None else out
        attend_decodes(q, kv_cache, metadata, settings, out)
        for part in parts:
            at = part.tokens
            if part.is_long:
                out[at] = _attend_long(q[at], k[at], v[at], kv_cache, part, settings)
                continue
            attend_prompts(q[at], kv_cache, metadata, settings, part.requests, part.query_start, out[at])
        return out


def _is_long(query_len: int, kv_len: int) -> bool:
    return query_len >= _LONG_PROMPT and query_len >= _QUERIES_TO_KEYS * kv_len


def _parts(metadata: AttentionMetadata, block_size: int) -> list[_Part]:
    """The requests behind the decodes, cut at each long prompt; made once a step, by its first layer.

    No parts without a long prompt, nor where the host does not know the lengths: what a graph holds has none either.
    """
    parts: list[_Part] | None = metadata.plans.get("parts")
    if parts is None:
        any_long = any(map(_is_long, metadata.query_lens, metadata.kv_lens))
        parts = metadata.plans["parts"] = list(_cut(metadata, block_size)) if any_long else []
    return parts


def _cut(metadata: AttentionMetadata, block_size: int) -> Iterator[_Part]:
    query_lens, kv_lens, rows = metadata.query_lens, metadata.kv_lens, metadata.rows
    assert rows is not None
    first_request = first_token = token = metadata.num_decodes

    def others(request: int) -> _Part:
        starts = metadata.query_start[first_request : request + 1]
        return _Part(slice(first_token, token), slice(first_request, request), starts - starts[0])

    for i in range(metadata.num_decodes, len(query_lens)):
        query_len, kv_len = query_lens[i], kv_lens[i]
        if _is_long(query_len, kv_len):
            if first_request < i:
                yield others(i)
            blocks = None
            if query_len < kv_len:
                row = metadata.block_tables.index_select(0, rows[i : i + 1])[0]
                blocks = row[: -(-kv_len // block_size)]
            starts = metadata.query_start[i : i + 2]
            tokens = slice(token, token + query_len)
            yield _Part(tokens, slice(i, i + 1), starts, blocks, kv_len - query_len, is_long=True)
            first_request, first_token = i + 1, token + query_len
        token += query_len
    if first_request < len(query_lens):
        yield others(len(query_lens))


def _attend_long(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, part: _Part, settings: AttentionSettings
) -> torch.Tensor:
    """One prompt's attention, [num_tokens, num_heads, head_size]."""
    if part.blocks is not None:
        kv_len = part.context_len + q.shape[0]
        k, v = (cache.index_select(0, part.blocks).flatten(0, 1)[:kv_len] for cache in kv_cache)
        padded = q.new_zeros((kv_len, *q.shape[1:]))
        padded[part.context_len :] = q
        q = padded
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, tokens, head_size]
    with sdpa_kernel(_KERNELS, set_priority=True):
        result = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=settings.scale, enable_gqa=True
        )
    return result.squeeze(0).transpose(0, 1)[part.context_len :]
