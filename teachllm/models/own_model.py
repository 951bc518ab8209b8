"""Describe a model of a registered family, before any weight is read: whole, and the part of it that a rank has."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from teachllm.checkpoint.files import StoredTensor, tensors_to_load, wrong_shape
from teachllm.distributed.layout import ALONE, RankCoords
from teachllm.distributed.ranks import Ranks
from teachllm.distributed.shards import spread
from teachllm.errors import ModelError
from teachllm.layers.weights.scheme import UNQUANTIZED
from teachllm.models.build import META, build_model, describe, parse_config, quantization_of_model
from teachllm.models.family import DecoderConfig
from teachllm.models.model_config import DTYPE_BYTES, ModelConfig
from teachllm.models.moe_config import MoeConfig
from teachllm.models.registry import architecture_of, family_of
from teachllm.models.shape import Shape
from teachllm.models.spec import ModelSpec, collect
from teachllm.models.tensor_names import has_own_head, renaming

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def describe_own(
    folder: Path, raw: dict[str, Any], load_format: str
) -> tuple[dict[str, Any], Shape, dict[str, StoredTensor]]:
    """Return (config.json, the model's shape, the stored tensors by this project's names).

    Args:
        raw: config.json, which is corrected where it says that the output head is the embedding and it is not.
        load_format: as in `EngineConfig`; with random weights there are no stored tensors.

    Raises:
        ModelError: config.json has a value that the family does not know, or sizes that are not the stored tensors'.
    """
    config, stored = parse_config(raw), tensors_to_load(folder, load_format)
    if config.tied and has_own_head(stored):
        warnings.warn(
            f"{folder}: config.json says tie_word_embeddings=true, but the stored lm_head.weight is not the embedding: "
            "the model runs with that head",
            stacklevel=4,
        )
        raw = raw | {"tie_word_embeddings": False}
        config = parse_config(raw)
        if config.tied:
            raise ModelError(f"{folder}: its lm_head.weight is not the embedding, and models of its family tie the two")
    rename = renaming(stored, config.tied)
    named = {rename(name): tensor for name, tensor in stored.items()}
    _check_num_layers(config, named)
    spec = describe(raw)
    _check_sizes(raw, spec, named)
    kept = spec.layers[0].kept
    shape = Shape(
        context_len=config.context_len,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(spec.layers),
        num_attention_heads=config.num_heads,
        num_kv_heads=kept.num_kv_heads,
        head_size=kept.head_size,
        windows=tuple(layer.kept.window for layer in spec.layers),
        tied=config.tied,
        eos_token_ids=config.eos_token_ids,
        num_parameters=spec.num_parameters,
        num_active_parameters=spec.num_active_parameters,
        experts=config.experts,
    )
    return raw, shape, named


def with_bytes(model: ModelConfig) -> ModelConfig:
    """Return the description of a whole model with the bytes that it takes on its device."""
    return _described(model, RankCoords(ALONE.layout, 0))


def model_of_rank(model: ModelConfig, coords: RankCoords) -> ModelConfig:
    """Describe what a rank has of a model: its own layers, heads, widths and bytes.

    Raises:
        ModelError: it cannot be shared equally.
    """
    if coords.layout.num_connected == 1:
        return model
    if model.implementation != "teachllm":
        raise ModelError(
            f"{model.architecture} runs through transformers' code, of which no rank can have a part: set "
            "tensor_parallel_size=1 and pipeline_parallel_size=1; data_parallel_size shares its requests"
        )
    return _described(model, coords)


def _described(model: ModelConfig, coords: RankCoords) -> ModelConfig:
    on_cpu = model.device_type == "cpu"  # which multiplies float weights
    quantization = None if on_cpu else quantization_of_model(model)
    schemes = UNQUANTIZED if quantization is None else quantization.schemes
    built = build_model(model, META, schemes, Ranks(coords))
    spec = collect(built)
    num_bytes = spec.num_bytes
    if on_cpu and built.lm_head is not None and built.lm_head is built.embed_tokens:
        num_bytes += built.lm_head.weight.nbytes  # by rows for look-ups, and packed for logits
    return replace(
        model,
        num_layers=len(spec.layers),
        first_layer=built.indices[0],
        experts=_experts(model.experts, built.indices, coords),
        windows=tuple(layer.kept.window for layer in spec.layers),
        num_attention_heads=model.num_attention_heads // coords.layout.tensor,
        num_kv_heads=spec.layers[0].kept.num_kv_heads,
        num_parameters=spec.num_parameters,
        num_active_parameters=spec.num_active_parameters,
        active_bytes=spec.num_active_parameters * DTYPE_BYTES[model.dtype] - spec.num_saved_bytes,
        weight_bytes=num_bytes,
        num_w8a8_parameters=spec.num_w8a8_parameters,
    )


def _experts(experts: MoeConfig | None, layers: Sequence[int], coords: RankCoords) -> MoeConfig | None:
    """Return what a rank has of a mixture."""
    if experts is None:
        return None
    layout = coords.layout
    return replace(
        experts,
        layers=tuple(experts.layers[i] for i in layers),
        num_held=len(spread(experts.num_experts, layout.num_expert_ranks)[coords.expert_rank]),
        intermediate_size=experts.intermediate_size // (1 if layout.spreads_experts else layout.tensor),
    )


def _check_num_layers(config: DecoderConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse more layers than the stored tensors are of, before that many are made."""
    numbers = [int(match[1]) for name in stored if (match := _LAYER.match(name))]
    if numbers and config.num_layers > max(numbers) + 1:
        folder = next(iter(stored.values())).file.parent
        raise ModelError(
            f"{folder} has the tensors of {max(numbers) + 1} layers, and config.json means {config.num_layers} "
            "(num_hidden_layers)"
        )


def _check_sizes(raw: dict[str, Any], spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse sizes that differ from the stored tensors' sizes, as far as tensors with their plain names tell.

    This comes before anything of these sizes has memory: one that is wrong by a digit asks for more than there is, and
    the error would be about memory.
    """
    keys = family_of(architecture_of(raw)).size_keys
    for name, weight in spec.weights:
        tensor = stored.get(name)
        if tensor is not None and tensor.shape[:1] != weight.shape[:1]:
            key = next((f" ({key})" for end, key in keys.items() if name.endswith(end)), "")
            raise ModelError(wrong_shape(name, tensor.file, tensor.shape, weight.shape) + key)
