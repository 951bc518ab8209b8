"""The spec of a model: its tensors, what each layer keeps, its sizes in numbers and bytes. It is data.

It is collected from a model that was built on the meta device, where tensors have shapes and no memory, so it cannot
say anything else than the code does. Loading, memory arithmetic, sharding, the roofline and `teachllm info` ask the
spec; none of them knows a family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from torch import nn

from teachllm.errors import ModelError
from teachllm.layers.attention import Attention
from teachllm.layers.checkpoint_tensors import Destination, TensorDestination, checkpoint_tensors, parent
from teachllm.layers.linear import Linear
from teachllm.layers.weights.quantized_weight_loader import QuantizedWeightLoader
from teachllm.layers.weights.quantized_weights import Activations
from teachllm.models.decoder import CausalLM, DecoderLayer
from teachllm.models.family import DecoderConfig
from teachllm.models.tensor_names import EMBEDDING, HEAD
from teachllm.quantization.formats.on_the_fly import OnTheFly
from teachllm.quantization.formats.scaled import Scaled


@dataclass(frozen=True, slots=True)
class PagedSpec:
    """Describe what a layer with attention keeps per token: K and V of its heads, in blocks."""

    num_kv_heads: int
    head_size: int
    window: int | None


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Describe a tensor of a checkpoint, or a quantized projection, which is stored in several.

    Attributes:
        name: of a layer's tensor, the name within the layer; of a projection that of its unquantized tensor.
        shape: the shape of the whole tensor.
        num_parameters: the number of its values that the model, or this rank's part of it, has.
        share_met: the share of all tokens that meet it; less than 1 for a weight of an expert.
    """

    name: str
    shape: tuple[int, ...]
    num_parameters: int
    share_met: Fraction


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Describe a layer: what it keeps, and its weights. Layers of one kind share it."""

    kept: PagedSpec
    weights: tuple[WeightSpec, ...]

    @property
    def num_parameters(self) -> int:
        """Return the number of its parameters."""
        return sum(each.num_parameters for each in self.weights)

    @property
    def num_active_parameters(self) -> int:
        """Return the number of parameters that one token meets, on average where experts are shared out."""
        return _num_active(self.weights)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Describe a model, or the part of it that a rank has.

    Attributes:
        indices, layers: of each layer, in their order, its index in the whole model and what it is.
        ends: the tensors outside of the layers: embedding, norm and output head.
        num_bytes: of all that it keeps in memory on a GPU: weights, quantized or not, and tables.
        num_saved_bytes: how many bytes more its linear layers would take unquantized.
        num_w8a8_parameters: of linear layers whose weight and input are both quantized.
        projections: the names of the projections that may be quantized.
    """

    indices: tuple[int, ...]
    layers: tuple[LayerSpec, ...]
    ends: tuple[WeightSpec, ...]
    num_bytes: int
    num_saved_bytes: int
    num_w8a8_parameters: int
    projections: tuple[str, ...]

    @property
    def weights(self) -> Iterator[tuple[str, WeightSpec]]:
        """Yield (full name, description) of all tensors of the checkpoint."""
        yield from ((each.name, each) for each in self.ends)
        for index, layer in zip(self.indices, self.layers, strict=True):
            yield from ((f"model.layers.{index}.{each.name}", each) for each in layer.weights)

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters that a checkpoint holds; a tied output head counts once."""
        return sum(each.num_parameters for each in self.ends) + sum(layer.num_parameters for layer in self.layers)

    @property
    def num_active_parameters(self) -> int:
        """Return the number of parameters between embedding and output head that one token meets."""
        norm = _num_active(each for each in self.ends if each.name not in (EMBEDDING, HEAD))
        return norm + sum(layer.num_active_parameters for layer in self.layers)


def collect(model: CausalLM, projections: Iterable[str] = ()) -> ModelSpec:
    """Return the spec of a model, or of a part of one, before its weights are filled.

    Args:
        model: on the meta device, in the model's dtype.
        projections: as in `ModelSpec`.

    Raises:
        ModelError: it has a layer with no attention, or with several.
    """
    dtype_bytes = next(model.parameters()).element_size()
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    within = {id(tensor) for linear in linears for tensor in linear.parameters()}
    tensors = [*model.parameters(), *model.buffers()]
    num_unquantized = sum(sum(each.out_features.values()) * each.in_features for each in linears)
    num_unquantized += sum(each.bias.numel() for each in linears if each.bias is not None)
    num_linear_bytes = sum(each.num_bytes(dtype_bytes) for each in linears)
    known: dict[object, LayerSpec] = {}
    layers = []
    for index in model.indices:
        layer = model.layer(index)
        kind = layer_kind(layer)
        if kind not in known:
            known[kind] = LayerSpec(_kept(layer, index), tuple(_weights(checkpoint_tensors(layer))))
        layers.append(known[kind])
    return ModelSpec(
        indices=tuple(model.indices),
        layers=tuple(layers),
        ends=tuple(_weights(model.end_tensors())),
        num_bytes=num_linear_bytes + sum(each.nbytes for each in tensors if id(each) not in within),
        num_saved_bytes=num_unquantized * dtype_bytes - num_linear_bytes,
        num_w8a8_parameters=sum(
            part.num_parameters for each in linears for part in each.unread() if _quantizes_rows(part)
        ),
        projections=tuple(projections),
    )


def layer_kind(layer: DecoderLayer) -> object:
    """Return what layers have in common that are alike: classes, shapes, formats, and what attention keeps."""
    modules = list(layer.modules())
    return (
        tuple(type(module) for module in modules),
        tuple((name, tuple(each.shape)) for name, each in layer.named_parameters()),
        tuple(
            (part.scheme, part.num_parameters) for each in modules if isinstance(each, Linear) for part in each.unread()
        ),
        tuple(_paged(module) for module in modules if isinstance(module, Attention)),
    )


def check_described(model: CausalLM, config: DecoderConfig) -> ModelSpec:
    """Check that a family's code agrees with itself, and return the spec of the whole, unquantized model.

    The tensors that the model names fill its parameters, each value once, and nothing else. Its layers keep what its
    configuration says.

    Raises:
        ModelError: one line names the tensor, the parameter or the layer.
    """
    spec = collect(model)
    known = set[object]()
    _check_filled(model.end_tensors(), model)
    for index in model.indices:
        if (kind := layer_kind(model.layer(index))) not in known:
            known.add(kind)
            _check_filled(model.layer_tensors(index), model.layer(index), f"layers.{index}.")
    for index, layer in zip(spec.indices, spec.layers, strict=True):
        said = PagedSpec(config.num_kv_heads, config.head_size, config.windows[index])
        if layer.kept != said:
            raise ModelError(f"layer {index} keeps {layer.kept}, and the family's configuration says {said}")
    return spec


def _check_filled(tensors: Iterable[tuple[str, Destination]], module: nn.Module, prefix: str = "") -> None:
    """Check that tensors fill the parameters of a module; of a `CausalLM`, those outside of its layers."""
    parameters = {
        parameter.untyped_storage()._cdata: (f"{prefix}{name}", parameter.numel())
        for name, parameter in module.named_parameters()
        if not (isinstance(module, CausalLM) and name.startswith("layers."))
    }
    filled: dict[int, list[tuple[int, int]]] = {storage: [] for storage in parameters}
    names = set[str]()
    for name, place in tensors:
        if name in names:
            raise ModelError(f"the family declares tensor {name} twice")
        names.add(name)
        if not isinstance(place, TensorDestination):
            continue
        storage, shape = place.target.untyped_storage()._cdata, tuple(place.target.shape)
        if storage not in parameters:
            raise ModelError(f"the family declares tensor {name}, and its model has no parameter that it fills")
        if shape[len(shape) - len(place.shape) :] != place.shape:
            raise ModelError(
                f"the family declares tensor {name} with shape {list(place.shape)}, and it fills {list(shape)} of "
                f"parameter {parameters[storage][0]}"
            )
        first = int(place.target.storage_offset())
        filled[storage].append((first, first + place.target.numel()))
    for storage, spans in filled.items():
        name, size = parameters[storage]
        count = sum(end - first for first, end in spans)
        if count != size:
            raise ModelError(f"the family declares tensors that fill {count} of the {size} values of parameter {name}")
        if any(end > first for (_, end), (first, _) in pairwise(sorted(spans))):
            raise ModelError(f"the family declares tensors that fill some values of parameter {name} twice")


def _kept(layer: DecoderLayer, index: int) -> PagedSpec:
    found = [_paged(module) for module in layer.modules() if isinstance(module, Attention)]
    if len(found) != 1:
        raise ModelError(f"layer {index} has {len(found)} attentions, and there is one KV cache per layer")
    return found[0]


def _paged(attention: Attention) -> PagedSpec:
    return PagedSpec(attention.num_kv_heads, attention.head_size, attention.settings.window)


def _weights(tensors: Iterable[tuple[str, Destination]]) -> Iterator[WeightSpec]:
    """Yield a weight per tensor, and one per quantized projection, which is stored in several."""
    seen = set[int]()
    for name, place in tensors:
        if isinstance(place, TensorDestination):
            yield WeightSpec(name, place.shape, place.num_elements, place.share_met)
        elif place.part is not None and id(place.part) not in seen:
            seen.add(id(place.part))
            yield WeightSpec(f"{parent(name)}.weight", place.part.shape, place.part.num_parameters, Fraction(1))


def _num_active(weights: Iterable[WeightSpec]) -> int:
    by_share: dict[Fraction, int] = {}
    for each in weights:
        by_share[each.share_met] = by_share.get(each.share_met, 0) + each.num_parameters
    return int(sum(share * count for share, count in by_share.items()))


def _quantizes_rows(part: QuantizedWeightLoader) -> bool:
    """Return whether a linear layer with this weight quantizes its input, too."""
    scheme = part.scheme
    if isinstance(scheme, OnTheFly):
        scheme = scheme.of_size(part.in_features)
    return isinstance(scheme, Scaled) and scheme.activations is not Activations.UNQUANTIZED
