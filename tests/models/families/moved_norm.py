"""A toy family in one file: attention has its norm behind it, and the MLP gates with GELU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from teachllm.distributed.ranks import ShardSpec
from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.linear import Linear
from teachllm.layers.norm import RMSNorm
from teachllm.layers.rotary import Rotary
from teachllm.layers.weights.scheme import Schemes
from teachllm.models.base import Angles, PagedKV
from teachllm.models.config_keys import expect, read_full_attention, values_of
from teachllm.models.decoder import CausalLM, PlainLayer
from teachllm.models.families.llama import LlamaAttention
from teachllm.models.families.llama_config import LlamaConfig, read_llama
from teachllm.models.family import Family, Part


def parse(raw: dict[str, Any]) -> LlamaConfig:
    """Return a config.json, which has the keys of a Llama's.

    Raises:
        ModelError: it asks for something that this family's code does not compute.
    """
    values = values_of(raw)
    expect(values, "hidden_act", "gelu_pytorch_tanh")
    expect(values, "attention_bias", False)
    expect(values, "mlp_bias", False)
    return read_llama(values, windows=read_full_attention(values))


class MovedNormMLP(nn.Module):
    """down(gelu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig, schemes: Schemes, shard: ShardSpec) -> None:
        super().__init__()
        size, rows = config.intermediate_size, {"gate_proj": shard.part, "up_proj": shard.part}
        self.gate_up_proj = Linear(config.hidden_size, dict.fromkeys(rows, size), schemes=schemes, rows=rows)
        down = {"down_proj": config.hidden_size}
        self.down_proj = Linear(size, down, schemes=schemes, columns=shard.part, group=shard.group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        down: torch.Tensor = self.down_proj(F.gelu(gate, approximate="tanh") * up)
        return down


class MovedNormLayer(PlainLayer):
    """One block: x + norm(attention(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig, index: int, schemes: Schemes, shard: ShardSpec) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, config.windows[index], schemes=schemes.within("self_attn"), shard=shard)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.pre_mlp_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MovedNormMLP(config, schemes.within("mlp"), shard)

    def block(
        self, hidden: torch.Tensor, angles: Angles, kv_cache: PagedKV, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Return the hidden states after the block, [num_tokens, hidden_size]."""
        attended = self.self_attn.o_proj(self.self_attn(hidden, angles, kv_cache, metadata))
        hidden = hidden + self.post_attention_layernorm(attended)[0]
        result: torch.Tensor = hidden + self.mlp(self.pre_mlp_layernorm(hidden)[0])
        return result


def build(config: LlamaConfig, part: Part) -> CausalLM:
    """Build a model of the family, or a part of one."""
    shard = part.shard(config)
    layers = [MovedNormLayer(config, i, part.layer_schemes(i), shard) for i in part.layers]
    norm = partial(RMSNorm, config.hidden_size, eps=config.norm_eps)
    return CausalLM(config, part, layers, Rotary(config.rotary, part.max_len), norm)


FAMILY = Family(parse, build)
