"""Build a model on the meta device: modules with shapes and no memory, of as few layers as have every allocation.

What a step holds at once does not depend on how many equal layers it runs one after the other. So the model is built
with few of them (`representative_layers`), and quantized weights are laid out as the loader does.

A model whose forward pass is transformers' code is not built: its attention is not this engine's, and its activations
are estimated from its sizes (`EstimatedModel`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from teachllm.config import EngineConfig
from teachllm.distributed.group import Alone
from teachllm.distributed.layout import layout_of
from teachllm.distributed.ranks import ALONE, Ranks
from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.dtypes import torch_dtype
from teachllm.layers.linear import Linear
from teachllm.layers.weights.quantized_weight_loader import Slot
from teachllm.layers.weights.quantized_weights import Quantized
from teachllm.layers.weights.scheme import UNQUANTIZED, Scheme, Schemes, Stored
from teachllm.loading.loader import finish_model
from teachllm.models.base import AuxOut, Model, PagedKV
from teachllm.models.build import META, build_model, quantization_of_model, stages_of
from teachllm.models.decoder import DecoderLayer
from teachllm.models.model_config import ModelConfig
from teachllm.models.moe_config import MoeConfig
from teachllm.models.spec import layer_kind
from teachllm.models.stage import Stage


class MetaGroup(Alone):
    """Stand for a group of several ranks: results have their shapes, and no rank waits for another."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Allocate what all ranks send, [...] -> [size, ...]."""
        return x.new_empty((self.size, *x.shape))

    def all_to_all(self, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """Allocate the rows that all ranks send here, [sum(sends), ...] -> [sum(receives), ...]."""
        return x.new_empty((sum(receives), *x.shape[1:]))

    def send(self, x: torch.Tensor, to: int) -> None:
        """Do nothing."""

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Return what another rank would fill."""
        return x


class MetaModel(NamedTuple):
    """Hold a model on the meta device, and the indices of the layers that were built; an `EstimatedModel` has none."""

    model: Model
    layers: list[int]


def meta_model(config: EngineConfig, model: ModelConfig, ranks: Ranks) -> MetaModel:
    """Build a model on the meta device whose steps allocate what those of the whole model do.

    Args:
        model: of several ranks, what one has.
        ranks: as `meta_ranks` describes them.
    """
    if model.implementation != "teachllm":
        return MetaModel(EstimatedModel(model), [])
    quantization = quantization_of_model(model)
    schemes = UNQUANTIZED if quantization is None else _on_meta(quantization.schemes)
    whole = build_model(model, META, schemes, ranks)
    layers = representative_layers([whole.layer(index) for index in whole.indices])
    built = build_model(model, META, schemes, ranks, [whole.indices[layer] for layer in layers])
    for module in list(built.modules()):
        if isinstance(module, Linear):
            module.fill_randomly(None)
    head = {place.part for _, place in built.end_tensors() if isinstance(place, Slot)}  # none, or a quantized one
    for part in head:
        if part is not None:
            part.fill_randomly(None)
    finish_model(built, META, config.batch_invariant)
    if ranks.coords.layout.pipeline == 1:
        return MetaModel(built, layers)
    return MetaModel(Stage(built, ranks, model.hidden_size, torch_dtype(model.dtype)), layers)


def meta_ranks(config: EngineConfig, model: ModelConfig) -> Ranks:
    """Return the ranks of an engine as the first that holds these layers sees them; no shard is larger than its own.

    If replicas share experts, the ranks of all replicas are one group, whose steps run in `BalancedRouting`.
    """
    layout = layout_of(config)
    if layout.num_connected == 1:
        return ALONE
    stages = (layout.coords(stage * layout.tensor) for stage in range(layout.pipeline))
    starts = [layers.start for layers in stages_of(model, layout)]
    coords = next(each for each in stages if starts[each.stage] == model.first_layer)
    tensor = MetaGroup(layout.tensor)
    experts = tensor if layout.replicas == 1 else MetaGroup(layout.replicas * layout.tensor)
    return Ranks(coords, tensor, MetaGroup(layout.num_ranks), experts)


def _on_meta(schemes: Schemes) -> Schemes:
    """Return schemes that read no file."""

    def of(name: str) -> Scheme | None:
        """Return the scheme of one projection."""
        scheme = schemes.of(name)
        return None if scheme is None else _OnMeta(scheme)

    return Schemes(of, schemes.prefix)


@dataclass(frozen=True)
class _OnMeta:
    """Quantize as a scheme does, without a file, even where `quantize` cannot make what a file holds."""

    scheme: Scheme

    def __str__(self) -> str:
        return str(self.scheme)

    def stored(self, out_features: int, in_features: int) -> dict[str, Stored]:
        """Implement `Scheme.stored`."""
        return self.scheme.stored(out_features, in_features)

    def read(self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> Quantized:
        """Implement `Scheme.read`."""
        return self.scheme.read(tensors, out_features, in_features)

    def quantize(self, weight: torch.Tensor) -> Quantized:
        """Implement `Scheme.quantize`; calibrated scales are laid out from a file's tensors without their values."""
        try:
            return self.scheme.quantize(weight)
        except ValueError:
            num_out, num_in = weight.shape
            stored = self.stored(num_out, num_in).items()
            tensors = {name: torch.empty(each.shape, dtype=each.dtypes[0], device=META) for name, each in stored}
            return self.read(tensors, num_out, num_in)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Implement `Scheme.num_bytes`."""
        return self.scheme.num_bytes(out_features, in_features)


def representative_layers(layers: Sequence[DecoderLayer]) -> list[int]:
    """Return the fewest layers of a model that allocate in a step what all of them do.

    Layers of one kind (`layer_kind`) allocate the same. What a layer finds in memory depends on the layer before it. So
    wherever one kind follows another for the first time, both layers are taken.
    """
    kinds = [layer_kind(layer) for layer in layers]
    pairs = {pair: index for index, pair in reversed(list(enumerate(pairwise(kinds))))}
    return sorted({0, len(kinds) - 1} | {each for index in pairs.values() for each in (index, index + 1)})


class EstimatedModel:
    """Stand for a model that is not built on meta; its forward pass holds an estimated number of elements per token."""

    fuses_decodes = False
    experts: MoeConfig | None = None

    def __init__(self, model: ModelConfig) -> None:
        self.implementation = model.implementation
        self._config, self._dtype = model, torch_dtype(model.dtype)

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[PagedKV],
        metadata: AttentionMetadata,
        aux_hidden_states: Mapping[int, AuxOut] | None = None,
        receive: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Allocate what a forward pass holds, and return the hidden states among it."""
        num_tokens, hidden_size = input_ids.shape[0], self._config.hidden_size
        hidden = input_ids.new_empty((num_tokens, hidden_size), dtype=self._dtype)
        input_ids.new_empty((num_tokens, self._config.estimated_width - hidden_size), dtype=self._dtype)
        return hidden

    def logits(self, hidden: torch.Tensor, *, sharded: bool = False, in_float32: bool = True) -> torch.Tensor:
        """Allocate a row of logits for each of hidden states."""
        dtype = torch.float32 if in_float32 else self._dtype
        return hidden.new_empty((hidden.shape[0], self._config.vocab_size), dtype=dtype)

    def execute_dummy_step(self) -> None:
        """Do nothing: there are no experts."""

    def count_load(self) -> torch.Tensor:
        """Raise an error: there are no experts."""
        raise AssertionError("a model without experts has no load to count")

    def modules(self) -> Iterator[nn.Module]:
        """Yield nothing."""
        yield from ()
