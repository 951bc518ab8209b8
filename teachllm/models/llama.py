"""The Llama family (lesson 00): Llama 2 and 3, Mistral and Mixtral, Qwen2 and 2.5, Qwen3 and Qwen3-MoE.

They share one block (norm, attention, norm, gated MLP, both added to a residual stream) and differ in details that
`llama_config.py` lists: Qwen2 has biases on Q, K and V, Qwen3 normalises every head of Q and K, Mistral and some Qwen2
look back only so far, mixtures have experts in the MLP's place (`moe.py`). The forward pass works on a step's flat
batch of tokens, see `layers/attention.py`.

Source: Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023, and the families' reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from teachllm.distributed.ranks import ALONE, WHOLE, Ranks, ShardSpec
from teachllm.layers.attention import Attention, AttentionMetadata, write_kv
from teachllm.layers.embedding import Embedding
from teachllm.layers.linear import Addend, Destination, Linear, Rows
from teachllm.layers.norm import InputQuantization, RMSNorm
from teachllm.layers.rotary import Rotary
from teachllm.layers.weights.quantized_weight_loader import QuantizedWeightLoader
from teachllm.layers.weights.scheme import UNQUANTIZED, Schemes
from teachllm.models.base import Angles, AuxOut, PagedKV
from teachllm.models.llama_config import LlamaConfig
from teachllm.models.llama_fast_paths import attend_on_gpu, decode_one_row, is_one_decode, last_layer
from teachllm.models.moe import SparseMLP
from teachllm.models.moe_config import MoeConfig
from teachllm.models.sharding import of_rank, stage_layers
from teachllm_kernels.comm.one_shot_all_reduce import DeferredAllReduce


class LlamaAttention(nn.Module):
    """Project, rotate by position, attend over the cache; the block projects back and adds to the residual.

    Args:
        input_size: of what is projected, if not the model's hidden size.
        schemes: how its projections are quantized.
        shard: which of the heads `config` counts.
    """

    def __init__(
        self,
        config: LlamaConfig,
        window: int | None,
        input_size: int | None = None,
        schemes: Schemes = UNQUANTIZED,
        shard: ShardSpec = WHOLE,
    ) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        rows = {"q_proj": shard.part, "k_proj": shard.kv_heads, "v_proj": shard.kv_heads}
        self._kv_shard = shard.kv_heads
        self.qkv_proj = Linear(input_size or config.hidden_size, parts, config.qkv_bias, schemes, rows=rows)
        out = {"o_proj": config.hidden_size}
        self.o_proj = Linear(q_size, out, config.o_bias, schemes, columns=shard.part, group=shard.group)
        # One weight for all heads of Q and one for those of K, repeated per head so that one call does both.
        heads = (config.num_heads + config.num_kv_heads, config.head_size)
        self.qk_norm = RMSNorm(*heads, eps=config.norm_eps) if config.qk_norm else None
        self.attention = Attention(config.head_size**-0.5, window)

    def forward(
        self,
        x: torch.Tensor,
        angles: Angles,
        kv_cache: PagedKV,
        metadata: AttentionMetadata,
        last_layer_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, num_heads * head_size]: all but the last projection.

        With `last_layer_metadata` only the tokens with logits attend: [num_logits, num_heads * head_size].
        """
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_size))  # [num_tokens, heads + 2 * kv_heads, head_size]
        if qkv.is_cuda:
            return attend_on_gpu(self, qkv, angles, kv_cache, metadata, last_layer_metadata).flatten(1)
        qk, v = qkv.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.qk_norm is not None:
            qk, _ = self.qk_norm(qk)
        q, k = Rotary.rotate(qk, angles).split([self.num_heads, self.num_kv_heads], dim=1)
        write_kv(k, v, kv_cache, metadata, self.attention.settings.kv_scales)
        y: torch.Tensor = self.attention(q, k, v, kv_cache, metadata)
        return y.flatten(1)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Destination]]:
        """(name, destination) of every tensor that a checkpoint holds for this module."""
        yield from self.qkv_proj.parts()
        yield from self.o_proj.parts()
        yield from self.attention.checkpoint_tensors(self.num_kv_heads, self._kv_shard)
        if self.qk_norm is not None:
            q_weight, k_weight = self.qk_norm.weight.data.split([self.num_heads, self.num_kv_heads])
            yield "q_norm.weight", q_weight
            yield "k_norm.weight", k_weight


class LlamaMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); the block applies down and adds to the residual."""

    def __init__(self, config: LlamaConfig, schemes: Schemes = UNQUANTIZED, shard: ShardSpec = WHOLE) -> None:
        super().__init__()
        size = config.intermediate_size
        parts = {"gate_proj": size, "up_proj": size}
        rows, out = dict.fromkeys(parts, shard.part), {"down_proj": config.hidden_size}
        self.gate_up_proj = Linear(config.hidden_size, parts, config.mlp_bias, schemes, is_gated=True, rows=rows)
        self.down_proj = Linear(size, out, config.mlp_bias, schemes, columns=shard.part, group=shard.group)

    def forward(self, x: Rows) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, intermediate_size]: all but the last projection."""
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

    def checkpoint_tensors(self) -> Iterator[tuple[str, Destination]]:
        """(name, destination) of every tensor that a checkpoint holds for this module."""
        yield from self.gate_up_proj.parts()
        yield from self.down_proj.parts()


class LlamaLayer(nn.Module):
    """One block. The residual stream travels beside the activations, so that norms can add to it.

    Args:
        experts: in place of one MLP.
    """

    def __init__(
        self,
        config: LlamaConfig,
        window: int | None,
        schemes: Schemes = UNQUANTIZED,
        shard: ShardSpec = WHOLE,
        experts: MoeConfig | None = None,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = LlamaAttention(config, window, schemes=schemes.within("self_attn"), shard=shard)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp: LlamaMLP | SparseMLP
        if experts is None:
            self.mlp, self._mlp_name = LlamaMLP(config, schemes.within("mlp"), shard), "mlp"
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
        """(x, residual), whose sum is the residual stream -> the same after this block.

        Args:
            x, residual: [num_tokens, hidden_size], not both None; x in any form that `Linear.add_to_residual` gives it.
            is_last: continue with the tokens that have logits alone as soon as K and V of the others are written.
            aux_out: is given the residual stream as it comes in, [num_tokens, hidden_size], which is changed later.
        """
        if is_one_decode(self, residual, metadata):
            return decode_one_row(self, x, angles, kv_cache, metadata, aux_out), None
        if is_last and metadata.logits_indices is not None:
            return last_layer(self, x, residual, angles, kv_cache, metadata, aux_out)
        h, residual = self.input_layernorm.quantized(x, residual, self.self_attn.qkv_proj.input_quantization)
        if aux_out is not None:
            aux_out(residual)
        h = self.self_attn(h, angles, kv_cache, metadata)
        x, residual = self.self_attn.o_proj.add_to_residual(residual, h)
        h, residual = self.post_attention_layernorm.quantized(x, residual, self.mlp.input_quantization)
        return self.mlp.add_to_residual(residual, h)

    @property
    def fuses_one_row(self) -> bool:
        """Return whether its products of one row do what is around them, too."""
        layers = (self.self_attn.qkv_proj, self.self_attn.o_proj, self.mlp)
        return all(layer.fuses_one_row for layer in layers)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Destination]]:
        """(name, destination) of every tensor that a checkpoint holds for this module."""
        yield "input_layernorm.weight", self.input_layernorm.weight.data
        yield "post_attention_layernorm.weight", self.post_attention_layernorm.weight.data
        for prefix, module in (("self_attn", self.self_attn), (self._mlp_name, self.mlp)):
            for name, destination in module.checkpoint_tensors():
                yield f"{prefix}.{name}", destination

    def is_elsewhere(self, name: str) -> bool:
        """Return whether a tensor of this layer is another rank's."""
        kind, _, rest = name.partition(".")
        return kind == self._mlp_name and isinstance(self.mlp, SparseMLP) and self.mlp.is_elsewhere(rest)


class LlamaForCausalLM(nn.Module):
    """The model from token ids to logits; of several ranks, the part of one.

    Args:
        max_len: positions to prepare, at most the model's context.
        schemes: how its projections are quantized.
        ranks: that share it. The first stage embeds, the last one has the output head; what lies between two is the
            residual stream.

    Attributes:
        fuses_decodes: on a GPU, attention does what comes before it too, where `AttentionMetadata.is_fused` says so.
        hidden_size: of the residual stream.
        experts: those that some of its layers have.
        is_tied: the output head is the embedding.
    """

    implementation = "teachllm"
    fuses_decodes = True

    def __init__(self, config: LlamaConfig, max_len: int, schemes: Schemes = UNQUANTIZED, ranks: Ranks = ALONE) -> None:
        super().__init__()
        coords, shard = ranks.coords, ranks.shard_spec(config.num_kv_heads)
        own, self._indices = of_rank(config, coords), stage_layers(config, coords.layout.pipeline)[coords.stage]
        self.hidden_size, self._num_all_layers, self.is_tied = own.hidden_size, config.num_layers, config.tied
        embedding = partial(Embedding, config.vocab_size, own.hidden_size, rows=shard.part, group=shard.group)
        self.embed_tokens = embedding() if coords.is_first_stage else None
        self.rotary = Rotary(own.rotary, max_len)
        self.experts = config.moe
        self._layers = [
            LlamaLayer(own, window, schemes.within(f"model.layers.{index}"), shard, config.experts_of(index))
            for index, window in zip(self._indices, own.windows, strict=True)
        ]
        self.layers = nn.ModuleList(self._layers)
        self.norm = RMSNorm(own.hidden_size, eps=own.norm_eps) if coords.is_last_stage else None
        self.lm_head = None
        self._quantized_head = None
        if coords.is_last_stage:
            self.lm_head = self.embed_tokens if config.tied and self.embed_tokens else embedding()
            head = None if config.tied else schemes("lm_head")
            if head is not None:
                size, like = (config.vocab_size, own.hidden_size), self.lm_head.weight
                self._quantized_head = QuantizedWeightLoader(head, "lm_head", *size, like, rows=self.lm_head.own)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[PagedKV],
        metadata: AttentionMetadata,
        aux_hidden_states: Mapping[int, AuxOut] | None = None,
        receive: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute one step, as `Model` says. Of tokens without logits the last layer computes no more than K and V."""
        angles = self.rotary(positions)
        x: Addend
        residual: torch.Tensor | None
        if receive is not None:
            x, residual = receive(), None
        else:
            assert self.embed_tokens is not None
            x, residual = self.embed_tokens(input_ids), None
        aux_hidden_states = aux_hidden_states or {}
        for index, layer, kv_cache in zip(self._indices, self._layers, kv_caches, strict=True):
            is_last = index == self._num_all_layers - 1
            x, residual = layer(x, residual, angles, kv_cache, metadata, is_last, aux_hidden_states.get(index))
        if self.norm is None:
            return added_up(x, residual)
        hidden, _ = self.norm(x, residual)
        return hidden

    def logits(self, hidden: torch.Tensor, *, sharded: bool = False, in_float32: bool = True) -> torch.Tensor:
        """Multiply hidden states by the output head, as `Model` says."""
        assert self.lm_head is not None
        logits = self.lm_head.logits(hidden, in_float32=in_float32)
        return logits if sharded else self.lm_head.gathered(logits)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Destination]]:
        """(name, destination) of every tensor of the checkpoint; a destination may be a slice of a merged one."""
        if self.embed_tokens is not None:
            yield "model.embed_tokens.weight", self.embed_tokens.destination
        for index, layer in zip(self._indices, self._layers, strict=True):
            for name, destination in layer.checkpoint_tensors():
                yield f"model.layers.{index}.{name}", destination
        if self.norm is None or self.lm_head is None:
            return
        yield "model.norm.weight", self.norm.weight.data
        if self._quantized_head is not None:
            yield from ((f"lm_head.{name}", slot) for name, slot in self._quantized_head.slots.items())
        elif self.lm_head is not self.embed_tokens:
            yield "model.embed_tokens.weight" if self.is_tied else "lm_head.weight", self.lm_head.destination

    def is_elsewhere(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint is another stage's, or said twice."""
        kind, _, rest = name.removeprefix("model.").partition(".")
        if kind == "layers":
            index, _, rest = rest.partition(".")
            if not index.isdigit() or int(index) >= self._num_all_layers:
                return False
            return int(index) not in self._indices or self._layers[int(index) - self._indices.start].is_elsewhere(rest)
        if kind == "lm_head":
            return self.is_tied or self.lm_head is None
        if kind == "embed_tokens":
            return self.embed_tokens is None and not (self.is_tied and self.lm_head is not None)
        return kind == "norm" and self.norm is None

    def execute_dummy_step(self) -> None:
        """An empty step: what its experts have to do for replicas that have tokens."""
        for layer in self._layers:
            if isinstance(layer.mlp, SparseMLP):
                layer.mlp.execute_dummy_step()

    def count_load(self) -> torch.Tensor:
        """[layers with experts, num_experts] int64, of the whole model: from now on it counts the tokens that each of
        its experts gets; rows of other stages' layers stay zero."""
        assert self.experts is not None
        device = self.rotary.cos.device
        load = torch.zeros((self.experts.num_layers, self.experts.num_experts), dtype=torch.int64, device=device)
        for index, layer in zip(self._indices, self._layers, strict=True):
            if isinstance(layer.mlp, SparseMLP):
                layer.mlp.load = load[sum(self.experts.layers[:index])]
        return load

    def finish(self) -> None:
        """Dequantize a quantized output head that was read."""
        # With load_format="dummy" nothing was read, and the head holds random values already.
        if self._quantized_head is not None and self._quantized_head.is_begun:
            assert self.lm_head is not None
            self.lm_head.own_weight.copy_(self._quantized_head.quantized_weight().dequantize(self.lm_head.weight.dtype))
            self._quantized_head = None


def added_up(x: Addend, residual: torch.Tensor | None) -> torch.Tensor:
    """The residual stream of what a layer returns, see `LlamaLayer.forward`."""
    x = x.sum() if isinstance(x, DeferredAllReduce) else x
    if x is None or residual is None:
        left = residual if x is None else x
        assert left is not None
        return left
    whole = x.sum(0) if x.dim() > residual.dim() else x
    return (residual + whole).to(residual.dtype)
