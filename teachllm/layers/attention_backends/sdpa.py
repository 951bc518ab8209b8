"""Long prompts by PyTorch's attention, which takes cuDNN's kernel; everything else by this project's.

On an H200 cuDNN's is 1.2 times as fast as `paged_prefill.py` (and, for one long prompt, as fast as `hopper_prefill.py`,
which takes the place of both there, see `selection.py`; on other cards it has not been measured). But through PyTorch
it reads no block tables, and its causal mask is a square one: it can only take a prompt from its first token on, whose
K and V lie in the batch. And cuDNN makes a plan for every length that it meets, which takes longer than the faster
kernel saves in a whole prompt (benchmarks/NOTES.md). So it gets round lengths alone, of which there are few, so that
they come again.
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
_ROUND = 1024  # a length is, if this divides it
_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


@dataclass(frozen=True, slots=True)
class _Part:
    """Requests of a step that one call computes.

    Attributes:
        tokens: where they lie in the flat batch.
        requests: which they are.
        query_start: [num_requests + 1] int32, from their own first token on.
        is_long: one long prompt, for PyTorch.
    """

    tokens: slice
    requests: slice
    query_start: torch.Tensor
    is_long: bool = False


@dataclass(slots=True)
class SDPAMetadata:
    """Hold the parts of a step, made by its first layer; None: they are not made yet."""

    parts: list[_Part] | None = None


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
        elif needs.has_quantized_kv:
            reason = "attends to a prompt's K and V as they were before kv_cache_dtype rounded them"
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
        parts = _parts(metadata)
        if settings.window is not None or settings.soft_cap is not None or not parts:
            return super().attend(q, k, v, kv_cache, metadata, settings, out)
        if len(parts) == 1 and metadata.num_decodes == 0 and out is None:
            return _attend_long(q, k, v, settings.scale)
        out = q.new_empty(q.shape) if out is None else out
        attend_decodes(q, kv_cache, metadata, settings, out)
        for part in parts:
            at = part.tokens
            if part.is_long:
                out[at] = _attend_long(q[at], k[at], v[at], settings.scale)
                continue
            attend_prompts(q[at], kv_cache, metadata, settings, part.requests, part.query_start, out[at])
        return out


def _is_long(query_len: int, kv_len: int) -> bool:
    return query_len == kv_len >= _LONG_PROMPT and query_len % _ROUND == 0


def _parts(metadata: AttentionMetadata) -> list[_Part]:
    """The requests behind the decodes, cut at each long prompt; made once per step, by its first layer.

    No parts without a long prompt, nor where the host does not know the lengths: what a graph holds has none either.
    """
    prepared = metadata.prepared(SDPAMetadata)
    if prepared.parts is None:
        any_long = any(map(_is_long, metadata.query_lens, metadata.kv_lens))
        prepared.parts = list(_cut(metadata)) if any_long else []
    return prepared.parts


def _cut(metadata: AttentionMetadata) -> Iterator[_Part]:
    query_lens, kv_lens = metadata.query_lens, metadata.kv_lens
    first_request, first_token = metadata.num_decodes, metadata.first_prompt_token
    token = first_token

    def others(request: int) -> _Part:
        starts = metadata.query_start[first_request : request + 1]
        return _Part(slice(first_token, token), slice(first_request, request), starts - starts[0])

    for i in range(metadata.num_decodes, len(query_lens)):
        if _is_long(query_lens[i], kv_lens[i]):
            if first_request < i:
                yield others(i)
            starts, tokens = metadata.query_start[i : i + 2], slice(token, token + query_lens[i])
            yield _Part(tokens, slice(i, i + 1), starts, is_long=True)
            first_request, first_token = i + 1, tokens.stop
        token += query_lens[i]
    if first_request < len(query_lens):
        yield others(len(query_lens))


def _attend_long(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One prompt's attention from its first token on, [num_tokens, num_heads, head_size]."""
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, tokens, head_size]
    with sdpa_kernel(_KERNELS, set_priority=True):
        result = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return result.squeeze(0).transpose(0, 1)
