"""The KV cache as tensors: what each layer keeps, and its memory.

Per layer one tensor for K and one for V, [num_blocks, block_size, num_kv_heads, head_size]. All layers share the
block ids: block 7 of a request is block 7 in every layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from teachllm.config import EngineConfig
from teachllm.core.memory import KVCacheSpec
from teachllm.layers.attention_backends.base import AttentionNeeds
from teachllm.layers.dtypes import dtype_bytes, torch_dtype
from teachllm.models.model_config import ModelConfig
from teachllm.spec_decode.load import DrafterConfig

KVCache = list[tuple[torch.Tensor, torch.Tensor]]


def kv_cache_specs(model: ModelConfig) -> list[KVCacheSpec]:
    """Return what each layer keeps per token."""
    return [KVCacheSpec(model.num_kv_heads, model.head_size, model.kv_bytes, window) for window in model.windows]


def attention_needs(config: EngineConfig, model: ModelConfig) -> AttentionNeeds:
    """Return what the layers' attention over this cache must take."""
    return AttentionNeeds(
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size,
        dtype=model.dtype,
        block_size=config.block_size,
        windows=frozenset(model.windows),
        has_soft_cap=model.raw.get("attn_logit_softcapping") is not None,
        has_quantized_kv=model.has_quantized_kv,
    )


def drafter_needs(drafter: DrafterConfig, model: AttentionNeeds) -> AttentionNeeds:
    """Return the needs of a drafter's layers; without windows if it has none."""
    if not drafter.specs:
        return replace(model, windows=frozenset())
    spec = drafter.specs[0]
    return replace(
        model,
        num_heads=drafter.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=drafter.dtype,
        windows=frozenset(each.window for each in drafter.specs),
        has_soft_cap=False,
    )


def allocate_kv_cache(model: ModelConfig, num_blocks: int, block_size: int, device: torch.device) -> KVCache:
    """Allocate a model's tensors, zeroed, so that a slot read by mistake gives a wrong answer and never a NaN."""
    return allocate_layers(kv_cache_specs(model), model.kv_dtype, num_blocks, block_size, device)


def allocate_layers(
    specs: Sequence[KVCacheSpec], dtype: str, num_blocks: int, block_size: int, device: torch.device
) -> KVCache:
    """Allocate the tensors of any layers, zeroed."""

    def zeros(spec: KVCacheSpec) -> torch.Tensor:
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_size)
        if device.type == "cpu":  # pages that an operating system zeroes when a slot of theirs is first written
            num_bytes = math.prod(shape) * dtype_bytes(dtype)
            return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(torch_dtype(dtype)).view(shape)
        return torch.zeros(shape, dtype=torch_dtype(dtype), device=device)

    return [(zeros(spec), zeros(spec)) for spec in specs]
