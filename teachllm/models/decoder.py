"""A decoder (lesson 00): embedding, layers, a norm and an output head, whatever family its layers are of.

The forward pass works on a step's flat batch of tokens, see `layers/attention.py`. A family brings its layers and its
norm. Layers hand on two tensors, `x` and `residual`, whose sum is the hidden states, so that the next norm can add them
up as it reads. Most families need not care, see `PlainLayer`.

Source: Radford et al., "Improving Language Understanding by Generative Pre-Training", 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial

import torch
from torch import nn

from teachllm.errors import ModelError
from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.checkpoint_tensors import Destination, checkpoint_tensors
from teachllm.layers.embedding import Embedding
from teachllm.layers.linear import Addend
from teachllm.layers.norm import RMSNorm
from teachllm.layers.weights.quantized_weight_loader import QuantizedWeightLoader
from teachllm.models.base import Angles, AuxOut, PagedKV
from teachllm.models.family import DecoderConfig, Part
from teachllm.models.moe import SparseMLP
from teachllm.models.tensor_names import EMBEDDING, HEAD
from teachllm_kernels.comm.one_shot_all_reduce import DeferredAllReduce


class DecoderLayer(nn.Module):
    """One block of a decoder: hidden states in, as two tensors that add up to them, and the same out.

    A layer that is tuned defines `forward`. All others derive from `PlainLayer`, which hides the two.
    """

    @property
    def fuses_decodes(self) -> bool:
        """Return whether its attention can norm, rotate and write K and V, see `AttentionMetadata.is_fused`."""
        return False

    @property
    def sparse_mlp(self) -> SparseMLP | None:
        """Return its router and experts; None: it has none."""
        return None

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
        """Compute the block.

        Args:
            x, residual: [num_tokens, hidden_size], whose sum is the hidden states; not both None. x has any form that
                `Linear.add_to_residual` gives it.
            is_last: it is the model's last layer: only the tokens with logits are returned, if the metadata names them.
            aux_out: is given the hidden states before the layer, [num_tokens, hidden_size].
        """
        raise NotImplementedError


class PlainLayer(DecoderLayer):
    """A block that reads one tensor of hidden states and returns another, as its paper says."""

    def block(
        self, hidden: torch.Tensor, angles: Angles, kv_cache: PagedKV, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Return the hidden states after the block, [num_tokens, hidden_size], given those before it."""
        raise NotImplementedError

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
        """Implement `DecoderLayer.forward`."""
        hidden = added_up(x, residual)
        if aux_out is not None:
            aux_out(hidden)
        hidden = self.block(hidden, angles, kv_cache, metadata)
        if is_last and metadata.logits_indices is not None:
            hidden = hidden.index_select(0, metadata.logits_indices)
        return hidden, None


class CausalLM(nn.Module):
    """A language model from token ids to logits, or the part that one rank has. It satisfies `models.base.Model`.

    Args:
        part: what is built.
        layers: those of the part, in their order.
        rotary: returns the angles of a step's positions, as the layers take them.
        final_norm: makes the norm before the output head, an `RMSNorm` or a module that maps one tensor to another.

    Attributes:
        hidden_size: of the hidden states.
        experts: the experts of its mixture layers; None: it has none.
    """

    implementation = "teachllm"

    def __init__(
        self,
        config: DecoderConfig,
        part: Part,
        layers: Sequence[DecoderLayer],
        rotary: nn.Module,
        final_norm: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        if len(layers) != len(part.layers):
            raise ModelError(f"the family built {len(layers)} layers of {len(part.layers)}: {part.layers}")
        coords, shard = part.ranks.coords, part.shard(config)
        self.hidden_size, self.experts = config.hidden_size, config.experts
        self._indices, self._last, self._is_tied = part.layers, config.num_layers - 1, config.tied
        embedding = partial(Embedding, config.vocab_size, config.hidden_size, rows=shard.part, group=shard.group)
        self.embed_tokens = embedding() if coords.is_first_stage else None
        self.rotary = rotary
        self._layers = list(layers)
        self.layers = nn.ModuleList(layers)
        self.norm = final_norm() if coords.is_last_stage else None
        self.lm_head: Embedding | None = None
        self._quantized_head: QuantizedWeightLoader | None = None
        if coords.is_last_stage:
            self.lm_head = self.embed_tokens if config.tied and self.embed_tokens else embedding()
            scheme = None if config.tied else part.schemes("lm_head")
            if scheme is not None:
                size, like = (config.vocab_size, config.hidden_size), self.lm_head.weight
                self._quantized_head = QuantizedWeightLoader(scheme, "lm_head", *size, like, rows=self.lm_head.own)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the hidden states before the first layer, [num_tokens, hidden_size]; only the first stage can."""
        assert self.embed_tokens is not None
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        return hidden

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[PagedKV],
        metadata: AttentionMetadata,
        aux_hidden_states: Mapping[int, AuxOut] | None = None,
        receive: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute one step, as `Model` says."""
        angles = self.rotary(positions)
        x: Addend = self.embed(input_ids) if receive is None else receive()
        residual: torch.Tensor | None = None
        aux_hidden_states = aux_hidden_states or {}
        for index, layer, kv_cache in zip(self._indices, self._layers, kv_caches, strict=True):
            is_last, aux_out = index == self._last, aux_hidden_states.get(index)
            x, residual = layer(x, residual, angles, kv_cache, metadata, is_last, aux_out)
        if self.norm is None:
            return added_up(x, residual)
        normed: torch.Tensor
        if isinstance(self.norm, RMSNorm):
            normed, _ = self.norm(x, residual)
        else:
            normed = self.norm(added_up(x, residual))
        return normed

    def logits(self, hidden: torch.Tensor, *, sharded: bool = False, in_float32: bool = True) -> torch.Tensor:
        """Multiply hidden states by the output head, as `Model` says."""
        assert self.lm_head is not None
        logits = self.lm_head.logits(hidden, in_float32=in_float32)
        return logits if sharded else self.lm_head.gathered(logits)

    def checkpoint_tensors(self, path: str = "") -> Iterator[tuple[str, Destination]]:
        """Yield (name, destination) of every tensor of the checkpoint; a destination may be a slice of a merged one."""
        yield from self.end_tensors()
        for index in self._indices:
            yield from self.layer_tensors(index)

    @cached_property
    def fuses_decodes(self) -> bool:
        """Return whether attention can fuse norm, rotation and KV write; see `AttentionMetadata.is_fused`."""
        return all(layer.fuses_decodes for layer in self._layers)

    @property
    def indices(self) -> Sequence[int]:
        """Return the indices of its layers in the whole model, ascending."""
        return self._indices

    def layer(self, index: int) -> DecoderLayer:
        """Return one of its layers."""
        return self._layers[self._indices.index(index)]

    def layer_tensors(self, index: int) -> Iterator[tuple[str, Destination]]:
        """Yield (name, destination) of every tensor of one of its layers."""
        yield from checkpoint_tensors(self.layer(index), f"model.layers.{index}")

    def end_tensors(self) -> Iterator[tuple[str, Destination]]:
        """Yield (name, destination) of every tensor outside of the layers."""
        if self.embed_tokens is not None:
            yield from self.embed_tokens.checkpoint_tensors("model.embed_tokens")
        if self.norm is not None:
            yield from checkpoint_tensors(self.norm, "model.norm")
        if self._quantized_head is not None:
            yield from ((f"lm_head.{name}", slot) for name, slot in self._quantized_head.slots.items())
        elif self.lm_head is not None and self.lm_head is not self.embed_tokens:
            ((_, place),) = self.lm_head.checkpoint_tensors("")
            yield (EMBEDDING if self._is_tied else HEAD), place

    def execute_dummy_step(self) -> None:
        """Compute an empty step: what its experts have to do for replicas that have tokens."""
        for layer in self._layers:
            if layer.sparse_mlp is not None:
                layer.sparse_mlp.execute_dummy_step()

    def count_load(self) -> torch.Tensor:
        """Count from now on the tokens that each expert gets, as `Model` says."""
        assert self.experts is not None
        shape, device = (self.experts.num_layers, self.experts.num_experts), next(self.parameters()).device
        load = torch.zeros(shape, dtype=torch.int64, device=device)
        for index, layer in zip(self._indices, self._layers, strict=True):
            if layer.sparse_mlp is not None:
                layer.sparse_mlp.load = load[sum(self.experts.layers[:index])]
        return load

    def finish(self) -> None:
        """Dequantize a quantized output head, which has been read or drawn."""
        if self._quantized_head is not None and self._quantized_head.is_begun:
            assert self.lm_head is not None
            self.lm_head.own_weight.copy_(self._quantized_head.quantized_weight().dequantize(self.lm_head.weight.dtype))
            self._quantized_head = None

    def pack_head(self) -> None:
        """Lay the filled output head out for a CPU, where that pays."""
        if self.lm_head is not None:
            self.lm_head.pack(is_tied=self.lm_head is self.embed_tokens)


def added_up(x: Addend, residual: torch.Tensor | None) -> torch.Tensor:
    """Return the hidden states of what `DecoderLayer.forward` takes and returns, [num_tokens, hidden_size]."""
    x = x.sum() if isinstance(x, DeferredAllReduce) else x
    if x is None or residual is None:
        left = residual if x is None else x
        assert left is not None
        return left
    whole = x.sum(0) if x.dim() > residual.dim() else x
    return (residual + whole).to(residual.dtype)
