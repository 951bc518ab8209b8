"""Attention over the paged KV cache (lesson 02): where a step's tokens read and write, and who computes it.

A step's batch is flat: the tokens of all its requests one after the other, prompts and decodes alike, with no
padding between them. `AttentionMetadata` says where each request's tokens lie in that flat batch and where its
K and V lie in the cache. It is passed as an argument from the runner to every layer; there is no global context.

Source: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", SOSP 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from teachllm.distributed.shards import ALL, Shard
from teachllm.layers.attention_backends.base import AttentionBackend, AttentionSettings
from teachllm.layers.attention_backends.reference import REFERENCE
from teachllm.layers.checkpoint_tensors import joined, parent
from teachllm.layers.kv_scale_slots import kv_scale_slots
from teachllm.layers.weak_tensor import weak_tensor
from teachllm.layers.weights.quantized_weight_loader import Slot
from teachllm_kernels.attention.decode_plan import DecodePlan
from teachllm_kernels.attention.kv_quantization import KVScales
from teachllm_kernels.attention.kv_write import kv_write_cpu, kv_write_triton
from teachllm_kernels.attention.paged_attention import Trees

T = TypeVar("T")


@dataclass(slots=True)
class AttentionMetadata:
    """Describe where a flat batch of `num_tokens` tokens of `num_seqs` requests reads and writes.

    Attributes:
        query_start: [num_seqs + 1] int32, request i owns flat tokens [query_start[i], query_start[i + 1]).
        seq_lens: [num_seqs] int32, sequence length including this step's tokens.
        block_tables: [num_rows, max_blocks] int32, logical to physical block; unused entries are 0.
        slot_mapping: [num_tokens] int64, slot that each token's K and V are written to; -1: not written (padding).
        query_lens, kv_lens: `query_start` differences and `seq_lens` as Python lists, so that code on the host
            never waits for a device to learn them; without padding. Empty where a CUDA graph must hold whatever they
            are.
        backend: computes attention.
        rows: [num_seqs] int32, each request's row of `block_tables`; None: they are in order.
        num_decodes: the first so many requests have one token each, or `decode_len` at most; counted on a GPU only.
        decode_len: more than 1 where drafts are verified.
        num_decode_tokens: of all decodes; None: as many as there are decodes.
        is_fused: all are decodes, of whose attention norm, rotation and KV write are a part; on a GPU only.
        prefill_start: [num_seqs - num_decodes + 1] int32, `query_start` of the others, from their own first token on.
        decode_plans: the plan of the decodes' attention, by window; on a GPU only.
        trees: of each request what its tokens see, where drafts are trees; on a CPU only.
        tree, first_place: what tokens of decodes see, the same for all, as `paged_decode_triton` takes it; on a GPU.
        logits_indices: [num_logits] int32, the tokens whose hidden states the model returns, each the last one that its
            request computes; None: all tokens.
        last_layer_metadata: makes the metadata with which the last layer's attention computes these tokens alone, as
            decodes; None: all tokens attend in it.
        outside: runs a call outside the CUDA graph that is being captured, whose memory the call borrows; None: there
            is none.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    query_lens: list[int]
    kv_lens: list[int]
    backend: AttentionBackend = REFERENCE
    rows: torch.Tensor | None = None
    num_decodes: int = 0
    decode_len: int = 1
    num_decode_tokens: int | None = None
    is_fused: bool = False
    prefill_start: torch.Tensor | None = None
    decode_plans: dict[int | None, DecodePlan] = field(default_factory=dict, repr=False)
    trees: Trees = None
    tree: torch.Tensor | None = None
    first_place: int = 0
    logits_indices: torch.Tensor | None = None
    last_layer_metadata: Callable[[], AttentionMetadata] | None = None
    outside: Callable[[Callable[[AttentionMetadata], None]], None] | None = None
    _prepared: dict[type, object] = field(default_factory=dict, init=False, repr=False)

    @property
    def first_prompt_token(self) -> int:
        """Return the index of the first flat token after those of all decodes."""
        return self.num_decodes if self.num_decode_tokens is None else self.num_decode_tokens

    def prepared(self, kind: type[T]) -> T:
        """Return what a backend prepares in its first layer for all layers of the step.

        Args:
            kind: the backend's own metadata, a class that can be made without arguments; the step has one of each kind.
        """
        found = self._prepared.get(kind)
        if found is None:
            found = self._prepared[kind] = kind()
        assert isinstance(found, kind)
        return found


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    scales: KVScales | None = None,
) -> None:
    """Write k and v, [num_tokens, num_kv_heads, head_size], into their slots of one layer's cache.

    Args:
        scales: of `AttentionSettings`.
    """
    write = kv_write_cpu if k.is_cpu else kv_write_triton
    write(k, v, *kv_cache, metadata.slot_mapping, scales)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    settings: AttentionSettings,
) -> torch.Tensor:
    """Attend, after `write_kv`.

    Args:
        q: [num_tokens, num_heads, head_size].
        k, v: [num_tokens, num_kv_heads, head_size], this step's own.
        kv_cache: one layer's K and V, each [num_blocks, block_size, num_kv_heads, head_size].
        settings: the layer's own.

    Returns:
        [num_tokens, num_heads, head_size].
    """
    if metadata.outside is None:
        return metadata.backend.attend(q, k, v, kv_cache, metadata, settings)
    out = q.new_empty(q.shape)
    weak_q, weak_k, weak_v = weak_tensor(q), weak_tensor(k), weak_tensor(v)
    weak_out = weak_tensor(out)

    def attend(now: AttentionMetadata) -> None:
        now.backend.attend(weak_q, weak_k, weak_v, kv_cache, now, settings, weak_out)

    metadata.outside(attend)
    return out


class Attention(nn.Module):
    """One layer's attention: no weights, only its scale and how far it looks back.

    Args:
        num_kv_heads, head_size: of K and V, on this rank.
        window: how many tokens back it looks, the query's own included; None: to the first one.
        kv_shard: which of the layer's KV heads these are.

    Attributes:
        k_scale, v_scale: scales that a checkpoint has for this layer's K and V in e4m3, [num_kv_heads] or one for all,
            float32; None: it has none. They are used if the engine quantizes to that dtype, see `worker/kv_scales.py`.
    """

    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def __init__(
        self, scale: float, num_kv_heads: int, head_size: int, window: int | None = None, kv_shard: Shard = ALL
    ) -> None:
        super().__init__()
        self.settings = AttentionSettings(scale, window)
        self.num_kv_heads, self.head_size, self._kv_shard = num_kv_heads, head_size, kv_shard
        for name in ("k_scale", "v_scale"):
            self.register_buffer(name, None)

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, Slot]]:
        """Yield the scales that a checkpoint may hold in the module that holds this one, and may lack."""
        keep_k, keep_v = (partial(setattr, self, name) for name in ("k_scale", "v_scale"))
        for name, slot in kv_scale_slots(self.num_kv_heads, self._kv_shard, keep_k, keep_v):
            yield joined(parent(path), name), slot

    def enable_kv_quantization(self, scales: KVScales) -> None:
        """Quantize K and V from now on, with these scales. The tensors stay; their values may change."""
        self.settings = replace(self.settings, kv_scales=scales)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Do the same as `paged_attention`."""
        return paged_attention(q, k, v, kv_cache, metadata, self.settings)
