"""The spec of a model: its tensors, what each layer keeps, its sizes in numbers and bytes. It is data.

It is collected from a model that was built on the meta device, where tensors have shapes and no memory, so it cannot
say anything else than the code does. Loading, memory arithmetic, sharding, the roofline and `teachllm info` ask the
spec; none of them knows a family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from teachllm.errors import ModelError
from teachllm.layers.attention import Attention
from teachllm.layers.checkpoint_tensors import Destination, TensorDestination
from teachllm.layers.linear import Linear
from teachllm.layers.weights.quantized_weight_loader import QuantizedWeightLoader
from teachllm.layers.weights.quantized_weights import Activations
from teachllm.models.decoder import CausalLM
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
    """Describe a tensor of a checkpoint.

    Attributes:
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
    """Describe a layer: what it keeps, and its weights."""

    kept: PagedSpec
    weights: tuple[WeightSpec, ...]

    @property
    def num_active_parameters(self) -> int:
        """Return the number of parameters that one token meets, on average where experts are shared out."""
        return _num_active(self.weights)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Describe a model, or the part of it that a rank has.

    Attributes:
        layers: in their order.
        ends: the tensors outside of the layers: embedding, norm and output head.
        num_bytes: of all that it keeps in memory on a GPU: weights, quantized or not, and tables.
        num_saved_bytes: how many bytes more its linear layers would take unquantized.
        num_w8a8_parameters: of linear layers whose weight and input are both quantized.
        projections: the names of the projections that may be quantized.
    """

    layers: tuple[LayerSpec, ...]
    ends: tuple[WeightSpec, ...]
    num_bytes: int
    num_saved_bytes: int
    num_w8a8_parameters: int
    projections: tuple[str, ...]

    @property
    def weights(self) -> Iterator[WeightSpec]:
        """Yield all tensors of the checkpoint."""
        yield from self.ends
        for layer in self.layers:
            yield from layer.weights

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters that a checkpoint holds; those of a tied output head count once."""
        return sum(each.num_parameters for each in self.weights)

    @property
    def num_active_parameters(self) -> int:
        """Return the number of parameters between embedding and output head that one token meets."""
        norm = _num_active(each for each in self.ends if each.name not in (EMBEDDING, HEAD))
        return norm + sum(layer.num_active_parameters for layer in self.layers)


def collect(model: CausalLM, projections: Iterable[str] = ()) -> ModelSpec:
    """Return the spec of a model, or of a part of one, before its weights are filled.

    Args:
        model: on the meta device, in the model's dtype.
        projections: as of `ModelSpec`.

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
    return ModelSpec(
        layers=tuple(_layer(model, index) for index in model.indices),
        ends=tuple(_weights(model.end_tensors())),
        num_bytes=num_linear_bytes + sum(each.nbytes for each in tensors if id(each) not in within),
        num_saved_bytes=num_unquantized * dtype_bytes - num_linear_bytes,
        num_w8a8_parameters=sum(
            part.num_parameters for each in linears for part in each.unread() if _quantizes_rows(part)
        ),
        projections=tuple(projections),
    )


def check_declared(model: CausalLM) -> None:
    """Check that the tensors that a whole, unquantized model names fill its parameters: each once, and nothing else.

    Raises:
        ModelError: the family's code contradicts itself; one line names the tensor or the parameter.
    """
    parameters = {parameter.untyped_storage()._cdata: name for name, parameter in model.named_parameters()}
    sizes = {parameter.untyped_storage()._cdata: parameter.numel() for parameter in model.parameters()}
    filled = dict.fromkeys(sizes, 0)
    for name, place in model.checkpoint_tensors():
        if not isinstance(place, TensorDestination):
            continue
        storage, shape = place.target.untyped_storage()._cdata, tuple(place.target.shape)
        if storage not in parameters:
            raise ModelError(f"the family declares tensor {name}, and its model has no parameter that it fills")
        if shape[len(shape) - len(place.shape) :] != place.shape:
            raise ModelError(
                f"the family declares tensor {name} with shape {list(place.shape)}, and it fills {list(shape)} of "
                f"parameter {parameters[storage]}"
            )
        filled[storage] += place.target.numel()
    for storage, count in filled.items():
        if count != sizes[storage]:
            raise ModelError(
                f"the family declares tensors that fill {count} of the {sizes[storage]} values of parameter "
                f"{parameters[storage]}"
            )


def _layer(model: CausalLM, index: int) -> LayerSpec:
    modules = [each for each in model.layer(index).modules() if isinstance(each, Attention)]
    if len(modules) != 1:
        raise ModelError(f"layer {index} has {len(modules)} attentions, and there is one KV cache per layer")
    (attention,) = modules
    kept = PagedSpec(attention.num_kv_heads, attention.head_size, attention.settings.window)
    return LayerSpec(kept, tuple(_weights(model.layer_tensors(index))))


def _weights(tensors: Iterable[tuple[str, Destination]]) -> Iterator[WeightSpec]:
    for name, place in tensors:
        if isinstance(place, TensorDestination):
            yield WeightSpec(name, place.shape, place.num_elements, place.share_met)


def _num_active(weights: Iterable[WeightSpec]) -> int:
    return int(sum(each.num_parameters * each.share_met for each in weights))


def _quantizes_rows(part: QuantizedWeightLoader) -> bool:
    """Return whether a linear layer with this weight quantizes its input, too."""
    scheme = part.scheme
    if isinstance(scheme, OnTheFly):
        scheme = scheme.of_size(part.in_features)
    return isinstance(scheme, Scaled) and scheme.activations is not Activations.UNQUANTIZED
