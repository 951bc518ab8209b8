"""What a quantized model takes on a GPU, before anything of it is read: weights, and activations at their widest.

    weights       codes and scales in place of numbers
    8-bit rows    what a product is given is there as codes, too, and as it does not add to the residual, its
                  result
    weight only   a product of many rows makes numbers of the codes first, of one projection at a time, and then is like
                  any other

Counted as the code allocates: a test holds it against that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from teachllm.distributed.layout import ALONE, RankCoords
from teachllm.distributed.ranks import Ranks
from teachllm.layers.linear import Linear
from teachllm.models.checkpoint import stored_tensors
from teachllm.models.llama import LlamaForCausalLM
from teachllm.models.llama_config import LlamaConfig, parse
from teachllm.models.model_config import ModelConfig
from teachllm.models.peak_width import peak_width
from teachllm.models.sharding import of_rank
from teachllm.quantization.formats.scaled import Scaled
from teachllm.quantization.formats.scheme import OnTheFly, QuantizedWeightLoader, Schemes
from teachllm.quantization.layer_schemes import Quantization, quantization_of
from teachllm.quantization.quantized_weights import Activations


class Dequantized(NamedTuple):
    """What is there while numbers are made of the codes of one kind of projection.

    Attributes:
        size: numbers of the largest one.
        width: numbers that a token keeps alive beside them.
        gated_width: the same where the product gates its result before it is written.
    """

    size: int
    width: int
    gated_width: int


class Needs(NamedTuple):
    """Of a model on a GPU.

    Attributes:
        saved_bytes: by which its projections are smaller than plain numbers.
        widths: peak widths that are not those of plain numbers, by their names in `Shape`.
        dequantized: of steps of many tokens.
        num_w8a8_parameters: parameters whose products are of codes on both sides.
    """

    saved_bytes: int
    widths: dict[str, int]
    dequantized: tuple[Dequantized, ...]
    num_w8a8_parameters: int


def of_model(model: ModelConfig) -> Quantization | None:
    """What the layers of a model that was described are; None: plain numbers."""
    if model.quantization is None:
        return None
    folder, is_known = Path(model.path), model.load_format not in ("dummy", "pt")
    names = frozenset(stored_tensors(folder)) if is_known else None
    return quantization_of(model.raw, folder, model.quantized_as_read, names)


def needs_of(raw: dict[str, Any], schemes: Schemes, dtype_bytes: int, coords: RankCoords = ALONE) -> Needs:
    """Of one rank's part of a model of our own family.

    Args:
        raw: config.json.
    """
    whole, sums = parse(raw), coords.layout.tensor > 1  # which are not added to the residual on the way
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
    """At the products that need most: of gate and up, and of the last one, whose result may stay apart."""
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
    """Whether x becomes codes as well."""
    scheme = part.scheme
    if isinstance(scheme, OnTheFly):
        scheme = scheme.of_size(part.in_features)
    return isinstance(scheme, Scaled) and scheme.activations is not Activations.UNQUANTIZED


def _width_with_quantized_inputs(config: LlamaConfig) -> int:
    """As `llama.peak_width`. A block keeps what it was given, result of a product and stream, until it has ended."""
    hidden, heads_size = config.hidden_size, config.num_heads * config.head_size
    attention = 7 * hidden // 2 + max(_attended(config), 3 * heads_size // 2 + hidden)  # codes are half a number
    return 2 * config.head_size + max(attention, 11 * hidden // 2 + 3 * config.intermediate_size // 2)


def _attended(config: LlamaConfig) -> int:
    """QKV, and what attention makes of it."""
    return (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_size
