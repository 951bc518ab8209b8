"""Fast paths of the Llama family on a GPU, which compute what `llama.py` does in fewer or smaller launches.

    attend_on_gpu      rotation and KV write are one kernel; for decodes, one kernel does these and attention
    decode_one_row     a block for a single decode is five kernels: products of one row do what is around them, too
    last_layer         the last layer computes only K and V of the tokens whose hidden states nothing reads

They stand beside the forward pass, so that it reads as the architecture's paper does. Kernels compute the norm, the
rotation and the activation of this family's own classes. A subclass of these may compute something else, so it is run
as it is written; one of `LlamaLayer` that defines its own `forward` takes no path of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, cast

import torch

from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.linear import Addend
from teachllm.models.base import Angles, AuxOut, PagedKV
from teachllm_kernels.attention.paged_decode import fused_paged_decode
from teachllm_kernels.attention.rope_kv_write import rope_kv_write_triton

if TYPE_CHECKING:
    from teachllm.models.families.llama import LlamaAttention, LlamaLayer, LlamaMLP


def attend_on_gpu(
    attention: LlamaAttention,
    qkv: torch.Tensor,
    angles: Angles,
    kv_cache: PagedKV,
    metadata: AttentionMetadata,
    last_layer_metadata: AttentionMetadata | None = None,
) -> torch.Tensor:
    """Normalize and rotate Q and K, write K and V to the cache, and attend.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_size].
        last_layer_metadata: only the tokens `metadata.logits_indices` attend, by this metadata; None: all do.

    Returns:
        [num_tokens, num_heads, head_size], or as many rows as tokens attend.
    """
    if metadata.is_fused:
        return _fused_decode(attention, qkv, angles, kv_cache, metadata)
    weight, eps = _qk_norm(attention)
    scales = attention.attention.settings.kv_scales
    rope_kv_write_triton(qkv, *angles, weight, eps, *kv_cache, metadata.slot_mapping, scales)
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if last_layer_metadata is not None and metadata.logits_indices is not None:
        q, metadata = q.index_select(0, metadata.logits_indices), last_layer_metadata
    attended: torch.Tensor = attention.attention(q, k, v, kv_cache, metadata)
    return attended


Path: TypeAlias = Callable[..., tuple[Addend, torch.Tensor | None]]  # takes and returns what `LlamaLayer.forward` does


def faster_path(
    layer: LlamaLayer, residual: torch.Tensor | None, metadata: AttentionMetadata, is_last: bool
) -> Path | None:
    """Return the path by which a block computes what it does in fewer or smaller launches; None: there is none."""
    # One decode, whose input is no sum still to be added up.
    is_one_decode = metadata.is_fused and metadata.slot_mapping.shape[0] == 1 and residual is None
    if is_one_decode and layer.fuses_one_row:
        return decode_one_row
    if is_last and metadata.logits_indices is not None:
        return last_layer
    return None


def fuses_one_row(layer: LlamaLayer) -> bool:
    """Return whether products of one row compute what is around them in this layer, too."""
    if not (layer.has_own_classes and layer.fuses_decodes):
        return False
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    products = (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp)
    return all(norm.is_known_to_kernels for norm in norms) and all(each.fuses_one_row for each in products)


def decode_one_row(
    layer: LlamaLayer,
    x: Addend,
    residual: None,
    angles: Angles,
    kv_cache: PagedKV,
    metadata: AttentionMetadata,
    aux_out: AuxOut | None = None,
) -> tuple[torch.Tensor, None]:
    """Compute the block of one decode: (hidden states, [1, hidden_size]; None)."""
    assert isinstance(x, torch.Tensor)  # a sum still to be added up has a residual
    if aux_out is not None:
        aux_out(x)
    attention, mlp = layer.self_attn, cast("LlamaMLP", layer.mlp)
    qkv = attention.qkv_proj.one_row(x, layer.input_layernorm).unflatten(-1, (-1, attention.head_size))
    attended = _fused_decode(attention, qkv, angles, kv_cache, metadata).flatten(1)
    x = attention.o_proj.one_row(attended, residual=x)
    h = mlp.gate_up_proj.one_row(x, layer.post_attention_layernorm, gated=True)
    return mlp.down_proj.one_row(h, residual=x), None


def last_layer(
    layer: LlamaLayer,
    x: Addend,
    residual: torch.Tensor | None,
    angles: Angles,
    kv_cache: PagedKV,
    metadata: AttentionMetadata,
    aux_out: AuxOut | None = None,
) -> tuple[Addend, torch.Tensor]:
    """Compute the block, continuing with the tokens `metadata.logits_indices` once all K and V are written."""
    indices = metadata.logits_indices
    assert indices is not None
    pruned = None
    if metadata.last_layer_metadata is not None and layer.fuses_decodes:
        pruned = metadata.last_layer_metadata()
    h, residual = layer.input_layernorm.quantized(x, residual, layer.self_attn.qkv_proj.input_quantization)
    if aux_out is not None:
        aux_out(residual)
    h = layer.self_attn(h, angles, kv_cache, metadata, pruned)
    h = h if pruned is not None else h.index_select(0, indices)
    x, residual = layer.self_attn.o_proj.add_to_residual(residual.index_select(0, indices), h)
    h, residual = layer.post_attention_layernorm.quantized(x, residual, layer.mlp.input_quantization)
    return layer.mlp.add_to_residual(residual, h)


def _fused_decode(
    attention: LlamaAttention, qkv: torch.Tensor, angles: Angles, kv_cache: PagedKV, metadata: AttentionMetadata
) -> torch.Tensor:
    """Norm, rotate, write K and V and attend in one launch; return [num_seqs, num_heads, head_size]."""
    settings = attention.attention.settings
    (cos, sin), (norm_weight, norm_eps), (k_cache, v_cache) = angles, _qk_norm(attention), kv_cache
    return fused_paged_decode(
        qkv,
        cos,
        sin,
        norm_weight,
        norm_eps,
        k_cache,
        v_cache,
        metadata.block_tables,
        plan=metadata.decode_plans[settings.window],
        scale=settings.scale,
        window=settings.window,
        scales=settings.kv_scales,
    )


def _qk_norm(attention: LlamaAttention) -> tuple[torch.Tensor | None, float]:
    return (None, 0.0) if attention.qk_norm is None else (attention.qk_norm.weight, attention.qk_norm.eps)
