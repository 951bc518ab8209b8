"""Build a model of any registered family, whole or a rank's part, and describe it before it is built with memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import torch

from teachllm.checkpoint.files import tensors_to_load
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import ALONE, Ranks
from teachllm.layers.dtypes import torch_dtype
from teachllm.layers.weights.scheme import UNQUANTIZED, Schemes
from teachllm.models.decoder import CausalLM
from teachllm.models.family import DecoderConfig, Part
from teachllm.models.model_config import ModelConfig
from teachllm.models.registry import architecture_of, family_of
from teachllm.models.sharding import check_shared, stage_layers
from teachllm.models.spec import ModelSpec, check_described
from teachllm.models.tensor_names import renaming
from teachllm.quantization.formats.layer_schemes import Quantization, quantization_of

META = torch.device("meta")
T = TypeVar("T")
_default_dtype = RLock()  # the process has one


def new_module(build: Callable[[], T], device: torch.device, dtype: torch.dtype) -> T:
    """Return what `build` makes, on `device`, its parameters of `dtype`."""
    with _default_dtype:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                return build()
        finally:
            torch.set_default_dtype(before)


def parse_config(raw: dict[str, Any]) -> DecoderConfig:
    """Return a config.json as its family reads it.

    Raises:
        ModelError: a key is missing or has a value that the family's code does not know.
    """
    config: DecoderConfig = family_of(architecture_of(raw)).parse(raw)
    return config


def describe(raw: dict[str, Any]) -> ModelSpec:
    """Return the spec of a whole, unquantized model in float32.

    Raises:
        ModelError: as `parse_config`, or the family's code contradicts itself.
    """
    asked: list[str] = []
    config = parse_config(raw)
    part = Part(range(config.num_layers), 1, Schemes(asked.append))
    model: CausalLM = new_module(lambda: family_of(architecture_of(raw)).build(config, part), META, torch.float32)
    return replace(check_described(model, config), projections=tuple(asked))


def build_model(
    model: ModelConfig,
    device: torch.device,
    schemes: Schemes = UNQUANTIZED,
    ranks: Ranks = ALONE,
    layers: Sequence[int] | None = None,
) -> CausalLM:
    """Build a model, or the part of one rank, without its weights.

    Args:
        model: runs on this project's code; the whole model's description, or a rank's.
        layers: the indices in the whole model of the layers to build; None: all of this rank's.

    Raises:
        ModelError: the ranks cannot share it.
    """
    config, coords = parse_config(model.raw), ranks.coords
    check_shared(config, coords.layout)
    if layers is None:
        layers = stages_of(model, coords.layout)[coords.stage]
    part = Part(layers, model.max_model_len, schemes, ranks)
    family = family_of(model.architecture)
    built: CausalLM = new_module(lambda: family.build(config, part), device, torch_dtype(model.dtype))
    return built


def stages_of(model: ModelConfig, layout: Layout) -> list[range]:
    """Return the layers of each pipeline stage of a model.

    Raises:
        ModelError: there are more stages than layers.
    """
    config = parse_config(model.raw)
    if layout.pipeline == 1:
        return [range(config.num_layers)]
    spec = described(json.dumps(model.raw, sort_keys=True))
    return stage_layers(spec, config.vocab_size * config.hidden_size, layout.pipeline)


@lru_cache(maxsize=8)
def described(raw: str) -> ModelSpec:
    """Return `describe` of a config.json's text, once for all ranks that ask."""
    return describe(json.loads(raw))


def quantization_of_model(model: ModelConfig) -> Quantization | None:
    """Return how the layers of a model are quantized; None: they are not."""
    if model.quantization is None:
        return None
    folder = Path(model.path)
    stored = tensors_to_load(folder, model.load_format)
    names = frozenset(map(renaming(stored, model.tied), stored)) if stored else None
    return quantization_of(model.raw, folder, model.quantized_as_read, names)
