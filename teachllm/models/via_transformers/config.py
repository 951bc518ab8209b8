"""Read config.json with transformers, and build an empty model from it."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from teachllm.checkpoint.files import read_json
from teachllm.checkpoint.json_values import JsonObject, shown
from teachllm.config import EngineConfig
from teachllm.errors import ModelError
from teachllm.models.family import MOST_LAYERS
from teachllm.models.registry import LAYER_TYPES, supported

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")
_SHARES = ("partial_rotary_factor", "rotary_pct")  # of a head's channels
_POSITIVE = ("query_pre_attn_scalar", "attention_multiplier")  # what scores are multiplied by, or divided by its root
NO_INTERFACE = "it does not use transformers' attention interface"


def read_config(folder: Path, engine_config: EngineConfig) -> Any:
    """Return transformers' configuration of a checkpoint, with the overrides of the engine's.

    Raises:
        ModelError: transformers does not know such a model, or a value is none that it can have.
    """
    overrides = engine_config.hf_overrides or {}
    raw = read_json(folder / "config.json") | dict(overrides)
    _check_values(JsonObject(raw, "config.json"))
    try:
        if overrides and "auto_map" not in raw:
            return _from_values(raw, folder)
        found = AutoConfig.from_pretrained(folder, trust_remote_code=engine_config.trust_remote_code)
        return type(found).from_dict(found.to_dict() | dict(overrides)) if overrides else found
    except Exception as error:
        keys = () if "auto_map" in raw else _without_which(raw, CONFIG_MAPPING[raw["model_type"]].from_dict)
        values = ", ".join(f"{key}={shown(raw[key])}" for key in keys)
        words = " ".join(str(error).split())[:300]
        raise ModelError(f"{folder}/config.json: {values}{': ' if values else ''}transformers gave {words}") from error


def _from_values(raw: dict[str, Any], folder: Path) -> Any:
    """Return transformers' configuration of a config.json with these values, some of which select its class."""
    with tempfile.TemporaryDirectory() as name:
        Path(name, "config.json").write_text(json.dumps(raw), encoding="utf-8")
        found = AutoConfig.from_pretrained(name)
    found.name_or_path = str(folder)
    return found


def _check_values(values: JsonObject) -> None:
    """Refuse by its key what transformers would fail at without naming it.

    Raises:
        ModelError: names file and key.
    """
    model_type = values.text("model_type")
    if model_type not in CONFIG_MAPPING and not values.has("auto_map"):
        raise values.refusal("model_type", "one of transformers'")
    names = {} if model_type not in CONFIG_MAPPING else CONFIG_MAPPING[model_type].attribute_map
    for size in SIZES:
        # Some configurations make a list of their layers.
        bounds = {"most": MOST_LAYERS} if size == "num_hidden_layers" else {}
        for key in (size, names.get(size, size)):
            if key in values:
                values.integer(key, **bounds)
    for key in _POSITIVE:
        if values.has(key):
            values.number(key, above=0)
    for key in OPTIONAL_SIZES:
        if values.has(key):
            values.integer(key)
    ropes = [values.object(key) for key in ("rope_scaling", "rope_parameters")]
    ropes += [rope.object(kind) for rope in ropes for kind in LAYER_TYPES]
    for where in (values, *ropes):  # more would be a table of cosines that is larger than its head
        for key in _SHARES:
            if where.has(key) and where.number(key, above=0) > 1:
                raise where.refusal(key, "at most 1")
    for rope in ropes:
        for key in ("rope_type", "type"):
            if key in rope and rope.text(key, "") not in ("default", *ROPE_INIT_FUNCTIONS):
                raise rope.refusal(key, f"one of default, {', '.join(ROPE_INIT_FUNCTIONS)}")


def create(config: Any, trust_remote_code: bool, implementation: str) -> Any:
    """Return a model with unfilled weights.

    Args:
        implementation: a name in transformers' table of functions for attention.

    Raises:
        ModelError: transformers has no causal language model for this configuration, or cannot make it; names the key
            of config.json that is to blame.
    """
    try:
        return _create(config, trust_remote_code, implementation)
    except Exception as error:
        name = config.architectures[0]
        # Older model code looks the name up in a table of its own.
        if isinstance(error, KeyError) and error.args == (implementation,):
            raise ModelError(f"{name} is not supported: {NO_INTERFACE}; {supported()}") from error
        key = _culprit(config, trust_remote_code, implementation)
        value = "" if key is None else f" with {key}={shown(getattr(config, key))}"
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(f"config.json: transformers cannot make a {name}{value} ({reason}); {supported()}") from error


def _create(config: Any, trust_remote_code: bool, implementation: str) -> Any:
    return AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, trust_remote_code=trust_remote_code
    )


def _culprit(config: Any, trust_remote_code: bool, implementation: str) -> str | None:
    """Return the key without which there would be a model; None: it is not one key alone."""

    def make(values: dict[str, Any]) -> None:
        with torch.device("meta"):
            _create(type(config).from_dict(values), trust_remote_code, implementation)

    return next(_without_which(config.to_diff_dict(), make), None)


def _without_which(values: dict[str, Any], make: Callable[[dict[str, Any]], object]) -> Iterator[str]:
    """Yield each key without which `make` does not fail."""
    for key in values:
        try:
            make(copy.deepcopy({name: value for name, value in values.items() if name != key}))
        except Exception:
            continue
        yield key
