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
from teachllm.layers.embedding import Embedding
from teachllm.layers.linear import Linear
from teachllm.layers.moe import Experts
from teachllm.layers.weights.dense_weight import DenseWeight
from teachllm.layers.weights.quantized_weights import Quantized
from teachllm.layers.weights.scheme import UNQUANTIZED, Scheme, Schemes, Stored
from teachllm.loading.loader import finish
from teachllm.models.base import AuxOut, Model, PagedKV
from teachllm.models.build import META, build_model, quantization_of_model, stages_of
from teachllm.models.model_config import ModelConfig
from teachllm.models.moe_config import MoeConfig
from teachllm.models.stage import Stage


class MetaGroup(Alone):
    """Stand for a group of several ranks: results have their shapes, and no rank waits for another."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Allocate what all ranks send, [...] -> [size, ...]."""
        return x.new_empty((self.size, *x.shape))

    def send(self, x: torch.Tensor, to: int) -> None:
        """Do nothing."""

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Return what another rank would fill."""
        return x


class MetaModel(NamedTuple):
    """Hold a model on the meta device, and which of its layers were built; none of an `EstimatedModel`."""

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
    layers = representative_layers(list(whole.layers))
    built = build_model(model, META, schemes, ranks, [whole.indices[layer] for layer in layers])
    for module in list(built.modules()):
        if isinstance(module, Linear):
            module.fill_randomly(None)
    finish(built, META)
    for module in built.modules():
        if isinstance(module, DenseWeight | Embedding | Experts):
            module.is_fixed = config.batch_invariant
    if ranks.coords.layout.pipeline == 1:
        return MetaModel(built, layers)
    return MetaModel(Stage(built, ranks, model.hidden_size, torch_dtype(model.dtype)), layers)


def meta_ranks(config: EngineConfig, model: ModelConfig) -> Ranks:
    """Return the ranks of an engine as the first that holds these layers sees them; no shard is larger than its own.

    Experts of other replicas count as experts of the ranks that share its layers: how many rows other replicas send is
    the router's to say, and in a balanced batch they are as many as this rank sends.
    """
    layout = layout_of(config)
    if layout.num_connected == 1:
        return ALONE
    stages = (layout.coords(stage * layout.tensor) for stage in range(layout.pipeline))
    starts = [layers.start for layers in stages_of(model, layout)]
    coords = next(each for each in stages if starts[each.stage] == model.first_layer)
    tensor = MetaGroup(layout.tensor)
    return Ranks(coords, tensor, MetaGroup(layout.num_ranks), tensor)


def _on_meta(schemes: Schemes) -> Schemes:
    """Return schemes whose weights come from no file."""

    def of(name: str) -> Scheme | None:
        scheme = schemes.of(name)
        return None if scheme is None else _OnMeta(scheme)

    return Schemes(of, schemes.prefix)


@dataclass(frozen=True)
class _OnMeta:
    """A scheme whose weights come from no file, even where `quantize` cannot make what a file holds."""

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
        """Implement `Scheme.quantize`; of scales that are calibrated, from a file's tensors without their values."""
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


def representative_layers(layers: Sequence[nn.Module]) -> list[int]:
    """Return the fewest layers of a model that allocate in a step what all of them do.

    Layers are of one kind if their parameters have equal shapes and are quantized alike. What a layer finds in memory
    depends on the one before it. So of each two kinds that follow one another both are taken, where they first do.
    """
    kinds = [_kind(layer) for layer in layers]
    pairs = {pair: index for index, pair in reversed(list(enumerate(pairwise(kinds))))}
    return sorted({0, len(kinds) - 1} | {each for index in pairs.values() for each in (index, index + 1)})


def _kind(layer: nn.Module) -> tuple[object, ...]:
    shapes = tuple((name, tuple(each.shape)) for name, each in layer.named_parameters())
    linears = (module for module in layer.modules() if isinstance(module, Linear))
    return shapes, tuple((part.scheme, part.num_parameters) for each in linears for part in each.unread())


class EstimatedModel:
    """Stand for a model that is not built on meta: its forward pass holds an estimated number of elements per token."""

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
