"""Read the keys of config.json that most families have: sizes, heads, and how positions become angles.

Files of all ages are about: null can stand for an absent key, and rope's settings are spelled `rope_theta` with
`rope_scaling`, or since transformers 5 together as `rope_parameters`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from teachllm.checkpoint.json_values import JsonObject
from teachllm.errors import ModelError
from teachllm.layers.rotary import SCALINGS, RotaryConfig
from teachllm.models.family import MOST_LAYERS, DecoderConfig
from teachllm.models.moe_config import MoeConfig
from teachllm.models.registry import LAYER_TYPES

_MOST_POSITIONS = 1 << 24  # more than any model has
# Of these null is a value: no window, or as many KV heads as heads. Of the other keys transformers refuses null.
MAY_BE_NULL = ("num_key_value_heads", "head_dim", "sliding_window", "layer_types", "rope_scaling", "rope_parameters")
# What each scaling needs to be told, and what else it may be told; all are numbers above 0.
_SCALING_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_SCALING_TAKES = {
    "llama3": (),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),  # an mscale of 0: not given
}


def values_of(
    raw: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, where: str = "config.json"
) -> JsonObject:
    """Return a config.json to read keys from.

    Args:
        defaults: what the family means by a key that is absent.
        where: the file's name, for errors.
    """
    meant = dict(defaults or {}) | dict(raw)
    return JsonObject({key: each for key, each in meant.items() if each is not None or key not in MAY_BE_NULL}, where)


def expect(values: JsonObject, key: str, *allowed: object) -> None:
    """Check that a config.json asks for nothing else than what the family's code computes.

    Args:
        allowed: values of the key that mean what the code does; so does an absent key.

    Raises:
        ModelError: it has another value.
    """
    if values.has(key) and values.as_dict()[key] not in allowed:
        raise values.refusal(key, " or ".join(map(repr, allowed)))


def read_num_layers(values: JsonObject) -> int:
    """Return the number of layers."""
    return values.integer("num_hidden_layers", most=MOST_LAYERS)


def read_full_attention(values: JsonObject) -> tuple[int | None, ...]:
    """Return the windows of layers all of which look back to the first token.

    Raises:
        ModelError: the file asks for sliding windows, which would be another computation.
    """
    is_on = values.has("sliding_window") and values.flag("use_sliding_window", True)
    if is_on and not values.has("layer_types"):
        raise values.refusal("sliding_window", "null: all layers of this family look back to the first token")
    num_layers, kinds = read_num_layers(values), values.entries("layer_types")
    if values.has("layer_types") and kinds != ["full_attention"] * num_layers:
        raise values.refusal("layer_types", f"full_attention for each of num_hidden_layers={num_layers}")
    return (None,) * num_layers


def read_head_size(values: JsonObject) -> int:
    """Return the size of a head, which is even.

    Raises:
        ModelError: it cannot be so.
    """
    hidden_size, num_heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    head_size = values.integer("head_dim", hidden_size // num_heads, least=2)
    if head_size < 2:
        raise values.refusal("num_attention_heads", f"at most half of hidden_size={hidden_size}")
    if head_size % 2:
        raise ModelError(f"{values.where}: head_dim={head_size} is odd, and rotary embedding turns pairs of channels")
    return head_size


def read_decoder(
    values: JsonObject,
    *,
    windows: tuple[int | None, ...],
    context_len: int,
    experts: MoeConfig | None = None,
) -> DecoderConfig:
    """Return what the engine has to know of any model; a family's own configuration adds to it.

    Args:
        windows, context_len, experts: as in `DecoderConfig`.

    Raises:
        ModelError: a key is missing or has a value that it cannot have.
    """
    num_heads = values.integer("num_attention_heads")
    num_kv_heads = values.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise values.refusal("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    return DecoderConfig(
        context_len=context_len,
        vocab_size=values.integer("vocab_size"),
        hidden_size=values.integer("hidden_size"),
        num_layers=read_num_layers(values),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=read_head_size(values),
        windows=windows,
        tied=values.flag("tie_word_embeddings", False),
        # null says that there is none; silence means the family's default.
        eos_token_ids=values.token_ids("eos_token_id") if values.has("eos_token_id") else frozenset(),
        experts=experts,
    )


def read_rotary(values: JsonObject, head_size: int) -> RotaryConfig:
    """Read how positions become angles, as transformers does.

    A `rope_scaling` takes the place of the whole of `rope_parameters`, and an `original_max_position_embeddings` beside
    them counts before one inside.
    """
    scaling, parameters = values.object("rope_scaling"), values.object("rope_parameters")
    rope = scaling if scaling else parameters
    for layer_type in LAYER_TYPES:
        if rope.has(layer_type):
            raise rope.refusal(layer_type, "left out: all layers of this family turn alike")
    spelling = "rope_type" if "rope_type" in rope else "type"
    kind = rope.text(spelling, "default")
    if kind not in SCALINGS:
        raise rope.refusal(spelling, f"one of {', '.join(SCALINGS)}")
    if kind == "dynamic" and head_size == 2:  # which divides by the size less 2
        raise rope.refusal(spelling, "another one for heads of size 2")
    for where in (values, rope):
        if where.has("partial_rotary_factor") and where.number("partial_rotary_factor") != 1:
            raise where.refusal("partial_rotary_factor", "1: all channels of a head are turned")
    trained_len = values.integer("max_position_embeddings", 2048, most=_MOST_POSITIONS)
    settings = {key: rope.number(key, above=0) for key in _SCALING_NEEDS[kind]}
    for key in _SCALING_TAKES.get(kind, ()):
        if rope.has(key) and rope.number(key, above=-1 if key.startswith("mscale") else 0):
            settings[key] = rope.number(key)
    if kind == "llama3" and settings["low_freq_factor"] >= settings["high_freq_factor"]:
        raise rope.refusal("low_freq_factor", "less than high_freq_factor")
    if kind == "yarn":
        settings["truncate"] = rope.flag("truncate", True)
    if kind in _SCALING_TAKES:
        original = "original_max_position_embeddings"
        where = values if original in values else rope
        settings[original] = where.integer(original, trained_len, most=_MOST_POSITIONS)
    lowest = 1 if kind == "yarn" else 0  # which divides by the logarithm
    theta = (rope if "rope_theta" in rope else values).number("rope_theta", 10000.0, above=lowest)
    if scaling and (replaced := parameters.number("rope_theta", theta)) != theta:
        warnings.warn(
            f"{values.where}: rope_scaling takes the place of rope_parameters, so rope_theta is {theta:g} and not "
            f"{replaced:g}: write rope_theta into rope_scaling too",
            stacklevel=2,
        )
    found = RotaryConfig(head_size, float(theta), kind, trained_len, settings)
    if found.context_len > _MOST_POSITIONS:
        raise rope.refusal("factor", f"small enough for a context of at most {_MOST_POSITIONS} tokens")
    return found
