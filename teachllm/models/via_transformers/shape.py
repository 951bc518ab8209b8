"""What the engine must know of a model that runs through transformers' code, before its weights are read."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from teachllm.checkpoint.files import StoredTensor, tensors_to_load, wrong_shape
from teachllm.checkpoint.json_values import JsonObject
from teachllm.config import EngineConfig
from teachllm.errors import ModelError
from teachllm.models.registry import architecture_of, check_features, supported
from teachllm.models.shape import Shape
from teachllm.models.tensor_names import HEAD
from teachllm.models.via_transformers.config import NO_INTERFACE, OPTIONAL_SIZES, SIZES, create, read_config
from teachllm.models.via_transformers.model import TransformersModel, register
from teachllm.models.via_transformers.rehearsal import IMPLEMENTATION, attention_modules, rehearse


def shape(folder: Path, engine_config: EngineConfig) -> Shape:
    """Return what the engine must know of a checkpoint, and whether its model can run here at all.

    Raises:
        ModelError: transformers does not know the model, or it does not use plain causal grouped-query attention.
    """
    register()
    trust_remote_code = engine_config.trust_remote_code
    config = read_config(folder, engine_config)
    name = architecture_of(config.to_dict())
    check_features(config.to_dict(), name)
    for key in (*SIZES, *OPTIONAL_SIZES):
        if not isinstance(value := _single(config, key), int) and not (value is None and key in OPTIONAL_SIZES):
            raise ModelError(f"{name} is not supported: its configuration has no single {key}; {supported()}")
    stored = tensors_to_load(folder, engine_config.load_format)
    _check_num_layers(config, stored)
    with torch.device("meta"):
        model = create(config, trust_remote_code, IMPLEMENTATION).eval()
    _check_sizes(model, stored)
    if not (model._supports_attention_backend and model._can_set_attn_implementation()):
        raise ModelError(f"{name} is not supported: {NO_INTERFACE}; {supported()}")
    attentions = attention_modules(model)
    if len(attentions) != config.num_hidden_layers or not all(m.is_causal for m in attentions):
        raise ModelError(f"{name} is not supported: it needs one causal self-attention per layer; {supported()}")
    num_layers = config.num_hidden_layers
    found = rehearse(model, num_layers)
    num_kv_heads, head_size = found.kv_shape or _kv_shape(config, attentions[0])
    # What the rehearsal did not reach is as the modules say, until `load_transformers_model` looks again.
    windows = dict(enumerate(_windows(config, attentions))) | found.windows
    if any(window is not None and window < 1 for window in windows.values()):
        raise _refusal(config, "sliding_window", "a whole number from 1")
    shape = Shape(
        context_len=_context_len(config),
        vocab_size=config.vocab_size,
        hidden_size=_hidden_size(model, config),
        num_layers=num_layers,
        num_attention_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        windows=tuple(windows[layer] for layer in range(num_layers)),
        tied=_is_tied(model),
        eos_token_ids=JsonObject(config.to_dict(), "config.json").token_ids("eos_token_id"),
        num_parameters=_num_parameters(model, stored),
        num_active_parameters=_num_active(model, config),
        estimated_width=_estimated_width(config),
    )
    _check_head(model, shape)
    return shape


def _check_num_layers(config: Any, stored: Collection[str]) -> None:
    """Refuse more layers than the names of tensors count, before that many are made."""
    numbers = [int(number) for name in stored for number in re.findall(r"\.(\d+)\.", name)]
    if numbers and config.num_hidden_layers > max(numbers) + 1:
        most = f"at most {max(numbers) + 1}, as no tensor of its weights has a higher number"
        raise _refusal(config, "num_hidden_layers", most)


def _refusal(config: Any, key: str, must_be: str) -> ModelError:
    """Return the error for a value, by the name that config.json has for it."""
    return JsonObject(config.to_dict(), "config.json").refusal(config.attribute_map.get(key, key), must_be)


def _check_sizes(model: Any, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse a stored tensor of another shape than the model's, before there is memory for the model's."""
    prefix = f"{model.base_model_prefix}."
    for name, tensor in model.state_dict().items():
        for each in (name, name.removeprefix(prefix)):  # a model saved without its head has no prefix
            if each in stored and stored[each].shape != tuple(tensor.shape):
                raise ModelError(wrong_shape(each, stored[each].file, stored[each].shape, tensor.shape))


def _check_head(model: Any, shape: Shape) -> None:
    try:
        TransformersModel(model, shape).logits(torch.empty(1, shape.hidden_size, device="meta"))
    except Exception as error:
        name = type(model).__name__
        raise ModelError(
            f"{name} is not supported: its output head does not run alone ({error}); {supported()}"
        ) from error


def _is_tied(model: Any) -> bool:
    """Ask the model whether it is tied: a key that config.json lacks means another thing to each architecture."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _num_parameters(model: Any, stored: Mapping[str, StoredTensor]) -> int:
    """Return the number of the stored parameters, or of the model's where none are stored; a tied head counts once."""
    if not stored:
        return sum(p.numel() for p in model.parameters())
    repeated = stored[HEAD].num_elements if HEAD in stored and _is_tied(model) else 0
    return sum(tensor.num_elements for tensor in stored.values()) - repeated


def _hidden_size(model: Any, config: Any) -> int:
    """Return the width of what the output head reads, which some models project to another one than their layers'."""
    head = model.get_output_embeddings()
    return int(config.hidden_size if head is None else head.weight.shape[1])


def _num_active(model: Any, config: Any) -> int:
    """Do the same as `Shape.num_active_parameters`.

    Experts lie stacked in tensors of three dimensions, or below a module called `experts`. What is not stacked there
    (a list of modules) is divided by its rows, which are more than the experts, so it counts for less than it is.
    """
    per_token = getattr(config, "num_experts_per_tok", None) or 1
    looked_up = (m for m in model.modules() if isinstance(m, nn.Embedding) or m is model.get_output_embeddings())
    apart = {id(p) for module in looked_up for p in module.parameters()}
    count = 0
    for name, p in model.named_parameters():
        if id(p) not in apart:
            is_expert = p.dim() > 2 or "experts" in name.split(".")
            num_experts = p.shape[:1].numel() if is_expert else 1
            count += min(per_token, num_experts) * (p.numel() // num_experts)
    return count


def _single(config: Any, key: str) -> Any:
    """Return what the configuration of all layers has; None if it lacks it, "different" if layers differ."""
    try:
        return getattr(config, key, None)
    except Exception:  # transformers raises an error of its own where layers differ
        return "different"


def _kv_shape(config: Any, attention: Any) -> tuple[int, ...]:
    """Return the number of KV heads and their size, as the attention has them or else as config.json does."""
    num_heads = config.num_attention_heads
    usual = {"num_key_value_heads": num_heads, "head_dim": config.hidden_size // num_heads}
    return tuple(getattr(attention, key, None) or getattr(config, key, None) or usual[key] for key in usual)


def _windows(config: Any, attentions: Sequence[Any]) -> tuple[int | None, ...]:
    """Return what each layer's attention says, or else what config.json says of it."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    listed = [window if kind == "sliding_attention" else None for kind in layer_types]
    return tuple(getattr(each, "sliding_window", said) for each, said in zip(attentions, listed, strict=True))


def _estimated_width(config: Any) -> int:
    """Estimate the width as for a gated MLP whose gate, up and product exist at once beside the residual stream."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if isinstance(inner, list):  # one size per layer
        inner = max(inner)
    return 4 * config.hidden_size + 3 * inner


def _context_len(config: Any) -> int:
    """Return `max_position_embeddings`, or less where rope changes with the longest text of a batch.

    Such a rope (dynamic, longrope) makes one request's values depend on the requests that it is batched with,
    except below the length at which it starts to change.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))]  # one, or one per type of layer
    starts = [each["original_max_position_embeddings"] for each in ropes if each.get("rope_type") == "longrope"]
    return min([config.max_position_embeddings, *starts])
