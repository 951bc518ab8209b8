"""Read what a checkpoint recommends: settings for sampling, and the tokens that end a sequence.

The recommendation lies in generation_config.json. A user may take it from another folder, leave it alone, or replace
some of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from teachllm.checkpoint.files import read_json, read_json_if_any
from teachllm.checkpoint.json_values import JsonObject
from teachllm.config import EngineConfig
from teachllm.errors import ModelError
from teachllm.sampling_params import SamplingParams

_FILE = "generation_config.json"
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_INTEGERS = (("top_k", "top_k", -1), ("max_new_tokens", "max_tokens", 1))  # key, name in SamplingParams, least
_KEYS = (*_NUMBERS, *(key for key, _, _ in _INTEGERS), "do_sample")


def read_generation_config(config: EngineConfig, folder: Path) -> JsonObject:
    """Return the recommendation for a checkpoint in `folder`; an empty one if there is none.

    Raises:
        ModelError: the file cannot be read, or another folder was named and has none.
    """
    if config.generation_config in ("auto", "vllm"):  # the ids that end a sequence count with vLLM's, too
        return _given(read_json_if_any(folder / _FILE), _FILE)
    named = Path(config.generation_config).expanduser() / _FILE
    if not named.is_file():
        raise ModelError(f"generation_config={config.generation_config!r}: must be auto, vllm or a folder with {_FILE}")
    return _given(read_json(named), _FILE)


def generation_defaults(config: EngineConfig, recommended: JsonObject) -> dict[str, float | int]:
    """Return the settings of requests that do not name them, by the names of `SamplingParams`.

    Raises:
        ModelError: no request can have what is recommended.
    """
    replacing = _given(config.override_generation_config or {}, "override_generation_config")
    for key in replacing:
        if key not in _KEYS:
            raise ModelError(f"{replacing.where} has no {key!r}: choose from {', '.join(_KEYS)}")
    recommended = _given({}, _FILE) if config.generation_config == "vllm" else recommended
    if not replacing:
        return _defaults(recommended)
    _defaults(replacing)  # so that an error names where the value is from
    return _defaults(recommended.replaced_by(replacing))


def _given(values: Mapping[str, Any], where: str) -> JsonObject:
    return JsonObject({key: value for key, value in values.items() if value is not None}, where)


def _defaults(recommended: JsonObject) -> dict[str, float | int]:
    """One that says not to sample recommends temperature 0."""
    found: dict[str, Any] = {name: recommended.number(name) for name in _NUMBERS if recommended.has(name)}
    for key, name, least in _INTEGERS:
        if recommended.has(key):
            found[name] = recommended.integer(key, least=least)
    if not recommended.flag("do_sample", True):
        found["temperature"] = 0.0
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ModelError(f"{recommended.where}: {error}") from None
    return found
