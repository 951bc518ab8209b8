"""Predict the GPU memory of a quantized model before any of it is read: its weights, and its activations at their peak.

    weights            quantized values and scales replace the float weights
    W8A8               a linear layer holds its input quantized as well as unquantized. It does not add to the residual
                       in place, so it holds its result, too
    weight only        a linear layer of many rows first dequantizes its weight, one projection at a time; the rest is
                       as without quantization

The prediction counts what the engine allocates. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from teachllm.checkpoint.files import tensors_to_load
from teachllm.distributed.layout import ALONE, RankCoords
from teachllm.distributed.ranks import Ranks
from teachllm.layers.linear import Linear
from teachllm.layers.weights.quantized_weight_loader import QuantizedWeightLoader
from teachllm.layers.weights.quantized_weights import Activations
from teachllm.layers.weights.scheme import Schemes
from teachllm.models.llama import LlamaForCausalLM
from teachllm.models.llama_config import LlamaConfig, parse
from teachllm.models.llama_shape import peak_width
from teachllm.models.model_config import ModelConfig
from teachllm.models.sharding import of_rank
from teachllm.models.tensor_names import renaming
from teachllm.quantization.formats.layer_schemes import Quantization, quantization_of
from teachllm.quantization.formats.on_the_fly import OnTheFly
from teachllm.quantization.formats.scaled import Scaled


class Dequantized(NamedTuple):
    """Holds the memory needs of a step while it dequantizes one kind of projection.

    Attributes:
        size: elements of the largest projection of this kind.
        width: elements per token that are alive beside the dequantized weight.
        gated_width: `width` where the linear layer gates its result before writing it.
    """

    size: int
    width: int
    gated_width: int


class Needs(NamedTuple):
    """Holds the memory needs of a quantized model on a GPU.

    Attributes:
        saved_bytes: bytes that quantization saves on the projections.
        widths: peak widths that differ from the unquantized model's, by their names in `Shape`.
        dequantized: the needs of steps of many tokens, for each kind of projection that they dequantize.
        num_w8a8_parameters: parameters of linear layers whose weight and input are both quantized.
    """

    saved_bytes: int
    widths: dict[str, int]
    dequantized: tuple[Dequantized, ...]
    num_w8a8_parameters: int


def of_model(model: ModelConfig) -> Quantization | None:
    """Return how the layers of a model are quantized; None: they are not."""
    if model.quantization is None:
        return None
    folder = Path(model.path)
    stored = tensors_to_load(folder, model.load_format)
    names = frozenset(map(renaming(stored, model.tied), stored)) if stored else None
    return quantization_of(model.raw, folder, model.quantized_as_read, names)


def needs_of(raw: dict[str, Any], schemes: Schemes, dtype_bytes: int, coords: RankCoords = ALONE) -> Needs:
    """Return the memory needs of one rank's part of a model that runs on the project's own code.

    Args:
        raw: the model's config.json.
    """
    whole, sums = parse(raw), coords.layout.tensor > 1  # all-reduced results are not added to the residual in place
    config = of_rank(whole, coords)
    with torch.device("meta"):
        model = LlamaForCausalLM(whole, 1, schemes, Ranks(coords))
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    num_parameters = sum(
        sum(each.out_features.values()) * (each.in_features + (each.bias is not None)) for each in linears
    )
    saved = num_parameters * dtype_bytes - sum(each.num_bytes(dtype_bytes) for each in linears)
    weight_only = [each for each in linears if any(not quantizes_rows(part) for part in each.unread())]
    num_w8a8 = sum(part.num_parameters for each in linears for part in each.unread() if quantizes_rows(part))
    widths, dequantized = {}, tuple[Dequantized, ...]()
    if num_w8a8:
        width = max(_width_with_quantized_inputs(config), peak_width(config, is_fixed=sums) if weight_only else 0)
        widths = dict.fromkeys(("peak_width", "gated_peak_width"), width)
    if weight_only:
        dequantized = _dequantized(config, weight_only, sums)
    return Needs(saved, widths, dequantized, num_w8a8)


def _dequantized(config: LlamaConfig, linears: Sequence[Linear], sums: bool) -> tuple[Dequantized, ...]:
    """Return the needs of the projections that need the most memory while they are dequantized.

    One is gate and up. The other is down, whose result may be held apart from the residual.
    """
    size = config.intermediate_size
    result = config.hidden_size if config.mlp_bias or sums else 0
    beside = peak_width(config, is_gated=True, is_fixed=sums) - max(_attended(config), size + result)
    largest: dict[bool, int] = {}
    for each in linears:
        is_last = "down_proj" in each.out_features
        largest[is_last] = max(largest.get(is_last, 0), sum(each.out_features.values()) * each.in_features)
    widths = {False: (beside + 2 * size, beside + size), True: (beside + size + result,) * 2}
    return tuple(Dequantized(largest[is_last], *widths[is_last]) for is_last in largest)


def quantizes_rows(part: QuantizedWeightLoader) -> bool:
    """Return whether a linear layer with this weight quantizes its input, too."""
    scheme = part.scheme
    if isinstance(scheme, OnTheFly):
        scheme = scheme.of_size(part.in_features)
    return isinstance(scheme, Scaled) and scheme.activations is not Activations.UNQUANTIZED


def _width_with_quantized_inputs(config: LlamaConfig) -> int:
    """Return the peak width, as `peak_width.peak_width` does, of a model whose linear layers quantize their inputs.

    Until a block ends, its input, the result of a linear layer and the residual stay alive.
    """
    hidden, heads_size = config.hidden_size, config.num_heads * config.head_size
    attention = 7 * hidden // 2 + max(_attended(config), 3 * heads_size // 2 + hidden)  # 8-bit: half an element
    return 2 * config.head_size + max(attention, 11 * hidden // 2 + 3 * config.intermediate_size // 2)


def _attended(config: LlamaConfig) -> int:
    """Return the elements per token of QKV and of the attention output."""
    return (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_size
