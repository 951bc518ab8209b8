"""The Llama family: Llama 2 and 3, Mistral and Mixtral, Qwen2 and 2.5, Qwen3 and Qwen3-MoE.

They share one block (norm, attention, norm, gated MLP, both added to a residual stream) and differ in details that
`llama_config.py` lists: Qwen2 has biases on Q, K and V, Qwen3 normalises every head of Q and K, Mistral and some Qwen2
look back only so far, mixtures have experts in the MLP's place (`moe.py`). What a GPU does in fewer launches stands in
`llama_fast_paths.py`.

Source: Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023, and the families' reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial

import torch
from torch import nn

from teachllm.distributed.ranks import ShardSpec
from teachllm.layers.attention import Attention, AttentionMetadata, write_kv
from teachllm.layers.checkpoint_tensors import Destination, checkpoint_tensors, joined
from teachllm.layers.linear import Addend, Linear, Rows
from teachllm.layers.norm import InputQuantization, QKNorm, RMSNorm
from teachllm.layers.rotary import Rotary
from teachllm.layers.weights.scheme import Schemes
from teachllm.models.base import Angles, AuxOut, PagedKV
from teachllm.models.decoder import CausalLM, DecoderLayer
from teachllm.models.families.llama_config import SIZE_KEYS, LlamaConfig, parse
from teachllm.models.families.llama_fast_paths import attend_on_gpu, faster_path, fuses_one_row
from teachllm.models.family import Family, Part
from teachllm.models.moe import SparseMLP


class LlamaAttention(nn.Module):
    """Project, rotate by position, attend over the cache; the block projects back and adds to the residual.

    Args:
        input_size: of what is projected, if not the model's hidden size.
        schemes: how its projections are quantized.
        shard: which of the heads are here.

    Attributes:
        num_heads, num_kv_heads: of what is here.
    """

    def __init__(
        self,
        config: LlamaConfig,
        window: int | None,
        *,
        schemes: Schemes,
        shard: ShardSpec,
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.num_heads = shard.part.equal(config.num_heads)
        self.num_kv_heads = shard.kv_heads.equal(config.num_kv_heads)
        q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        rows = {"q_proj": shard.part, "k_proj": shard.kv_heads, "v_proj": shard.kv_heads}
        self.qkv_proj = Linear(input_size or config.hidden_size, parts, config.qkv_bias, schemes, rows=rows)
        out = {"o_proj": config.hidden_size}
        self.o_proj = Linear(q_size, out, config.o_bias, schemes, columns=shard.part, group=shard.group)
        heads = (self.num_heads, self.num_kv_heads, config.head_size)
        self.qk_norm = QKNorm(*heads, eps=config.norm_eps, names=("q_norm", "k_norm")) if config.qk_norm else None
        self.attention = Attention(config.head_size**-0.5, *heads[1:], window, shard.kv_heads)

    def forward(
        self,
        x: torch.Tensor,
        angles: Angles,
        kv_cache: PagedKV,
        metadata: AttentionMetadata,
        last_layer_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, num_heads * head_size]: all but the last projection.

        With `last_layer_metadata` only the tokens with logits attend: [num_logits, num_heads * head_size].
        """
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_size))  # [num_tokens, heads + 2 * kv_heads, head_size]
        if not qkv.is_cpu and self.fuses_decodes:
            return attend_on_gpu(self, qkv, angles, kv_cache, metadata, last_layer_metadata).flatten(1)
        qk, v = qkv.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.qk_norm is not None:
            qk, _ = self.qk_norm(qk)
        q, k = Rotary.rotate(qk, angles).split([self.num_heads, self.num_kv_heads], dim=1)
        write_kv(k, v, kv_cache, metadata, self.attention.settings.kv_scales)
        y: torch.Tensor = self.attention(q, k, v, kv_cache, metadata)
        return y.flatten(1)

    @cached_property
    def fuses_decodes(self) -> bool:
        """Return whether a kernel computes its norm of Q and K together with rotation and the KV write."""
        return self.qk_norm is None or self.qk_norm.is_known_to_kernels


class LlamaMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); the block applies down and adds to the residual."""

    def __init__(self, config: LlamaConfig, *, schemes: Schemes, shard: ShardSpec) -> None:
        super().__init__()
        size = config.intermediate_size
        parts = {"gate_proj": size, "up_proj": size}
        rows, out = dict.fromkeys(parts, shard.part), {"down_proj": config.hidden_size}
        self.gate_up_proj = Linear(config.hidden_size, parts, config.mlp_bias, schemes, is_gated=True, rows=rows)
        self.down_proj = Linear(size, out, config.mlp_bias, schemes, columns=shard.part, group=shard.group)

    def forward(self, x: Rows) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, intermediate_size]: all but the last projection."""
        return self.gate_up_proj.gated(x)

    def add_to_residual(self, residual: torch.Tensor, x: Rows) -> tuple[Addend, torch.Tensor]:
        """Return what `RMSNorm` adds up to residual + MLP of x, as `Linear.add_to_residual`."""
        return self.down_proj.add_to_residual(residual, self(x))

    @property
    def input_quantization(self) -> InputQuantization | None:
        """Return the same as `Linear`."""
        return self.gate_up_proj.input_quantization

    @property
    def fuses_one_row(self) -> bool:
        """Return the same as `Linear`."""
        return self.gate_up_proj.fuses_one_row and self.down_proj.fuses_one_row


class LlamaLayer(DecoderLayer):
    """One block. The residual stream travels beside the activations, so that norms can add to it.

    Args:
        index: its index in the model, which decides on its window and on experts in place of one MLP.
    """

    def __init__(self, config: LlamaConfig, index: int, *, schemes: Schemes, shard: ShardSpec) -> None:
        super().__init__()
        window, experts = config.windows[index], config.experts_of(index)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = LlamaAttention(config, window, schemes=schemes.within("self_attn"), shard=shard)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp: LlamaMLP | SparseMLP
        if experts is None:
            self.mlp, self._mlp_name = LlamaMLP(config, schemes=schemes.within("mlp"), shard=shard), "mlp"
        else:
            self.mlp, self._mlp_name = SparseMLP(config.hidden_size, experts, shard), experts.names.block

    def forward(
        self,
        x: Addend,
        residual: torch.Tensor | None,
        angles: Angles,
        kv_cache: PagedKV,
        metadata: AttentionMetadata,
        is_last: bool = False,
        aux_out: AuxOut | None = None,
    ) -> tuple[Addend, torch.Tensor | None]:
        """Implement `DecoderLayer.forward`, here or by a faster path that computes the same."""
        faster = faster_path(self, residual, metadata, is_last)
        if faster is not None:
            return faster(self, x, residual, angles, kv_cache, metadata, aux_out)
        h, residual = self.input_layernorm.quantized(x, residual, self.self_attn.qkv_proj.input_quantization)
        if aux_out is not None:
            aux_out(residual)
        h = self.self_attn(h, angles, kv_cache, metadata)
        x, residual = self.self_attn.o_proj.add_to_residual(residual, h)
        h, residual = self.post_attention_layernorm.quantized(x, residual, self.mlp.input_quantization)
        return self.mlp.add_to_residual(residual, h)

    @property
    def fuses_decodes(self) -> bool:
        """Return the same as its attention."""
        return self.self_attn.fuses_decodes

    @cached_property
    def fuses_one_row(self) -> bool:
        """Return whether products of one row compute what is around them, too; asked when its weights are filled."""
        return fuses_one_row(self)

    @property
    def has_own_classes(self) -> bool:
        """Return whether it is made of this file's own classes; a subclass may compute something else."""
        return type(self.self_attn) is LlamaAttention and type(self.mlp) in (LlamaMLP, SparseMLP)

    @property
    def sparse_mlp(self) -> SparseMLP | None:
        """Return its router and experts; None: it has one MLP."""
        return self.mlp if isinstance(self.mlp, SparseMLP) else None

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, Destination]]:
        """Yield the tensors of its modules, under the name that the family's checkpoints have for the MLP."""
        for name, module in self.named_children():
            yield from checkpoint_tensors(module, joined(path, self._mlp_name if module is self.mlp else name))


def build(config: LlamaConfig, part: Part) -> CausalLM:
    """Build a model of the family, or a part of one, without its weights."""
    shard = part.shard(config)
    layers = [LlamaLayer(config, i, schemes=part.layer_schemes(i), shard=shard) for i in part.layers]
    norm = partial(RMSNorm, config.hidden_size, eps=config.norm_eps)
    return CausalLM(config, part, layers, Rotary(config.rotary, part.max_len), norm)


FAMILY = Family(parse, build, SIZE_KEYS)
