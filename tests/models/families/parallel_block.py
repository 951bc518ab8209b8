"""A family in one file: Command R's parallel block, where attention and MLP read the same norm of the hidden states.

Further: LayerNorm without a bias, a rotary embedding that turns neighbouring channels, a norm of Q and K with a weight
per head, and a scale of the logits. `docs/extending/model.md` walks through this file.

Source: Cohere's Command R+, 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from teachllm.distributed.ranks import ShardSpec
from teachllm.distributed.shards import ALL, Shard
from teachllm.layers.attention import Attention, AttentionMetadata, write_kv
from teachllm.layers.checkpoint_tensors import TensorDestination, destination
from teachllm.layers.linear import Linear
from teachllm.layers.rotary import RotaryConfig, inverse_frequencies
from teachllm.layers.weights.scheme import Schemes
from teachllm.models.base import Angles, PagedKV
from teachllm.models.config_keys import (
    expect,
    read_decoder,
    read_full_attention,
    read_head_size,
    read_rotary,
    values_of,
)
from teachllm.models.decoder import CausalLM, PlainLayer
from teachllm.models.family import DecoderConfig, Family, Part

# What a config.json means by a key that it lacks, as transformers' `CohereConfig` says.
_DEFAULTS = {
    **{"max_position_embeddings": 8192, "eos_token_id": 255001, "tie_word_embeddings": True, "use_qk_norm": False},
    **{"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 500000.0},
}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(DecoderConfig):
    """One model of the family."""

    intermediate_size: int
    norm_eps: float
    logit_scale: float
    rotary: RotaryConfig

    @property
    def shared_sizes(self) -> dict[str, int]:
        """Return the sizes that tensor-parallel ranks share equally."""
        return super().shared_sizes | {"intermediate_size": self.intermediate_size}


def parse(raw: dict[str, Any]) -> ParallelConfig:
    """Return a config.json as `ParallelConfig`.

    Raises:
        ModelError: it asks for something that this family's code does not compute.
    """
    values = values_of(raw, _DEFAULTS)
    expect(values, "hidden_act", "silu")
    expect(values, "attention_bias", False)
    expect(values, "mlp_bias", False)
    expect(values, "use_qk_norm", True)
    rotary = read_rotary(values, read_head_size(values))
    return ParallelConfig(
        **vars(read_decoder(values, windows=read_full_attention(values), context_len=rotary.context_len)),
        intermediate_size=values.integer("intermediate_size"),
        norm_eps=values.number("layer_norm_eps"),
        logit_scale=values.number("logit_scale"),
        rotary=rotary,
    )


class LayerNorm(nn.Module):
    """Scales what is left of a vector without its mean to unit variance, then by a learned weight.

    Args:
        shape: of the weight, [size], or [num_heads, size] where every head has its own.
        heads: which of the heads are here.
    """

    def __init__(self, *shape: int, eps: float, heads: Shard | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self._eps, self._shards = eps, () if heads is None else (heads, ALL)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same."""
        return F.layer_norm(x, x.shape[-1:], eps=self._eps) * self.weight

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, TensorDestination]]:
        """Yield the weight."""
        yield f"{path}.weight", destination(self.weight.data, *self._shards, constant=1.0)


class InterleavedRotary(nn.Module):
    """Turns channel 2i with channel 2i + 1."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: RotaryConfig, max_len: int) -> None:
        super().__init__()
        positions = torch.arange(max_len, dtype=torch.float32)[:, None]
        angles = positions * inverse_frequencies(config, positions)
        self.register_buffer("cos", angles.cos()[:, None].to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sin", angles.sin()[:, None].to(torch.get_default_dtype()), persistent=False)

    def forward(self, positions: torch.Tensor) -> Angles:
        """[num_tokens] -> (cos, sin), each [num_tokens, 1, head_size / 2]."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)

    @staticmethod
    def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Turn x, [num_tokens, num_heads, head_size]."""
        (cos, sin), even, odd = angles, x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


class ParallelAttention(nn.Module):
    """Project, normalise every head of Q and K, turn them by position, attend over the cache, project back."""

    def __init__(self, config: ParallelConfig, window: int | None, schemes: Schemes, shard: ShardSpec) -> None:
        super().__init__()
        size, heads, kv_heads = config.head_size, config.num_heads, config.num_kv_heads
        self._head_size = size
        self._heads = [shard.part.equal(heads), shard.kv_heads.equal(kv_heads), shard.kv_heads.equal(kv_heads)]
        qkv = {"q_proj": heads * size, "k_proj": kv_heads * size, "v_proj": kv_heads * size}
        rows = {"q_proj": shard.part, "k_proj": shard.kv_heads, "v_proj": shard.kv_heads}
        self.qkv_proj = Linear(config.hidden_size, qkv, schemes=schemes, rows=rows)
        self.q_norm = LayerNorm(self._heads[0], size, eps=config.norm_eps, heads=shard.part)
        self.k_norm = LayerNorm(self._heads[1], size, eps=config.norm_eps, heads=shard.kv_heads)
        self.attention = Attention(size**-0.5, self._heads[1], size, window, shard.kv_heads)
        out = {"o_proj": config.hidden_size}
        self.o_proj = Linear(heads * size, out, schemes=schemes, columns=shard.part, group=shard.group)

    def forward(self, x: torch.Tensor, angles: Angles, kv_cache: PagedKV, metadata: AttentionMetadata) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same."""
        q, k, v = self.qkv_proj(x).unflatten(-1, (-1, self._head_size)).split(self._heads, dim=1)
        q = InterleavedRotary.rotate(self.q_norm(q), angles)
        k = InterleavedRotary.rotate(self.k_norm(k), angles)
        write_kv(k, v, kv_cache, metadata, self.attention.settings.kv_scales)
        attended: torch.Tensor = self.o_proj(self.attention(q, k, v, kv_cache, metadata).flatten(1))
        return attended


class ParallelMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ParallelConfig, schemes: Schemes, shard: ShardSpec) -> None:
        super().__init__()
        size, rows = config.intermediate_size, {"gate_proj": shard.part, "up_proj": shard.part}
        gate_up = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = Linear(config.hidden_size, gate_up, schemes=schemes, is_gated=True, rows=rows)
        down = {"down_proj": config.hidden_size}
        self.down_proj = Linear(size, down, schemes=schemes, columns=shard.part, group=shard.group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same."""
        down: torch.Tensor = self.down_proj(self.gate_up_proj.gated(x))
        return down


class ParallelLayer(PlainLayer):
    """One block: x + attention(norm(x)) + mlp(norm(x)), with one norm."""

    def __init__(self, config: ParallelConfig, index: int, schemes: Schemes, shard: ShardSpec) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = ParallelAttention(config, config.windows[index], schemes.within("self_attn"), shard)
        self.mlp = ParallelMLP(config, schemes.within("mlp"), shard)

    def block(
        self, hidden: torch.Tensor, angles: Angles, kv_cache: PagedKV, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Return the hidden states after the block, [num_tokens, hidden_size]."""
        h = self.input_layernorm(hidden)
        result: torch.Tensor = hidden + self.self_attn(h, angles, kv_cache, metadata) + self.mlp(h)
        return result


class ParallelLM(CausalLM):
    """The model, whose logits are scaled."""

    logit_scale = 1.0

    def logits(self, hidden: torch.Tensor, *, sharded: bool = False, in_float32: bool = True) -> torch.Tensor:
        """Multiply hidden states by the output head, and scale."""
        return super().logits(hidden, sharded=sharded, in_float32=in_float32) * self.logit_scale


def build(config: ParallelConfig, part: Part) -> CausalLM:
    """Build a model of the family, or a part of one."""
    shard = part.shard(config)
    layers = [ParallelLayer(config, i, part.layer_schemes(i), shard) for i in part.layers]
    norm = partial(LayerNorm, config.hidden_size, eps=config.norm_eps)
    model = ParallelLM(config, part, layers, InterleavedRotary(config.rotary, part.max_len), norm)
    model.logit_scale = config.logit_scale
    return model


# The key of config.json that decides on the rows of a tensor, by the end of the tensor's name.
_SIZE_KEYS = {
    "embed_tokens.weight": "vocab_size",
    "layernorm.weight": "hidden_size",
    "q_proj.weight": "num_attention_heads",
    "k_proj.weight": "num_key_value_heads",
    "gate_proj.weight": "intermediate_size",
}
FAMILY = Family(parse, build, _SIZE_KEYS)
