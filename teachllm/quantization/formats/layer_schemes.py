"""Which layers of a model are quantized, and how: what its checkpoint says, or what the user asks for.

Source: the `quantization_config` of config.json, as Hugging Face's quantizers write it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from teachllm.checkpoint.files import quantization_config
from teachllm.checkpoint.json_values import JsonObject
from teachllm.errors import ModelError
from teachllm.layers.weights.quantized_weights import Activations
from teachllm.layers.weights.scheme import UNQUANTIZED, Scheme, Schemes
from teachllm.quantization.formats import auto_round, awq, compressed_tensors, fp8, gptq, modelopt
from teachllm.quantization.formats.compressed_tensors import Packed
from teachllm.quantization.formats.on_the_fly import OnTheFly
from teachllm.quantization.formats.scaled import Scaled

Parse = Callable[[JsonObject, Container[str] | None], Callable[[str], Scheme | None]]

FORMATS: dict[str, Parse] = {
    "gptq": gptq.parse,
    "awq": awq.parse,
    "auto-round": auto_round.parse,
    "compressed-tensors": compressed_tensors.parse,
    "fp8": fp8.parse,
    "fbgemm_fp8": fp8.parse,
    "modelopt": modelopt.parse,
}
_GROUP_SIZES = (128, 64, 32)
# Of unquantized checkpoints, as they are loaded.
ON_THE_FLY: dict[str, Callable[[int], Scheme]] = {
    "fp8": lambda in_features: Scaled(torch.float8_e4m3fn, "channel", Activations.BY_TOKEN),
    "int8": lambda in_features: Scaled(torch.int8, "channel", Activations.BY_TOKEN),
    "int4": lambda in_features: Packed(4, next((n for n in _GROUP_SIZES if in_features % n == 0), _GROUP_SIZES[0])),
}
_HEAD = "lm_head"


@dataclass(frozen=True)
class Quantization:
    """Describe the quantization of a model.

    Attributes:
        name: for people: "gptq", "fp8, as it is read".
        schemes: of all of its projections.
    """

    name: str
    schemes: Schemes = field(default=UNQUANTIZED, compare=False)


def config_of(raw: Mapping[str, Any], folder: Path) -> JsonObject | None:
    """Return what a checkpoint says of itself; None: that it is not quantized.

    Args:
        raw: config.json.

    Raises:
        ModelError: a format that is not supported.
    """
    config = quantization_config(raw, folder)
    if config is None:
        return None
    method = config.text("quant_method", "unnamed")
    if method not in FORMATS:
        raise ModelError(
            f"{config.where}: quant_method={method!r} is not supported, only {', '.join(FORMATS)}: "
            "take one of these, or its unquantized checkpoint (float32, bfloat16 or float16)"
        )
    return config


def quantization_of(
    raw: Mapping[str, Any], folder: Path, method: str | None, names: Container[str] | None
) -> Quantization | None:
    """Return how a model's layers are quantized, or will be as they are loaded; None: not at all.

    Args:
        raw: config.json.
        method: quantizes an unquantized checkpoint; None: it stays.
        names: as in `of_config`.

    Raises:
        ModelError: a format, or a part of one, that is not supported.
    """
    found = config_of(raw, folder)
    if found is not None:
        return of_config(found, names)
    return None if method is None else on_the_fly(method)


def of_config(config: JsonObject, names: Container[str] | None) -> Quantization:
    """Return what a checkpoint's layers are.

    Args:
        config: of `config_of`.
        names: of its tensors; None: they are not known, and every layer that may be quantized is taken to be.

    Raises:
        ModelError: a part of the format that is not supported; a layer's, when its scheme is asked for.
    """
    method = config.text("quant_method")
    return Quantization(method, Schemes(FORMATS[method](config, names)))


def on_the_fly(method: str) -> Quantization:
    """Quantize all projections of all layers as they are loaded; the output head stays as it is."""
    scheme = OnTheFly(ON_THE_FLY[method])
    return Quantization(f"{method}, as it is read", Schemes(lambda name: None if name == _HEAD else scheme))
