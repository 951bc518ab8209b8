"""Which architectures run: on our own code, through transformers, or not at all, and why not.

A checkpoint names its architecture in config.json. Everything is decided from that file, before a weight is read.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from teachllm.checkpoint.json_values import JsonObject
from teachllm.errors import ModelError

if TYPE_CHECKING:
    from teachllm.models.family import Family

# The family of each architecture, as the module that has its `FAMILY`; and each architecture by its model_type, which
# decides in transformers what class reads a checkpoint, whatever `architectures` says.
_MODULES: dict[str, str] = {}
_OWN_TYPES: dict[str, str] = {}


def register(module: str, architectures: Mapping[str, str]) -> None:
    """Add a family of models.

    Args:
        module: has the family as `FAMILY`; it is imported when the first of its models is.
        architectures: the family's, by `model_type` of config.json.

    Raises:
        ValueError: an architecture or a model_type is registered already.
    """
    for model_type, architecture in architectures.items():
        for name, known in ((architecture, _MODULES), (model_type, _OWN_TYPES)):
            if name in known:
                first = _MODULES[_OWN_TYPES.get(name, name)]
                raise ValueError(f"{name} is registered twice, by {first} and by {module}")
    _OWN_TYPES.update(architectures)
    _MODULES.update(dict.fromkeys(architectures.values(), module))


@contextmanager
def registered(module: str, architectures: Mapping[str, str]) -> Iterator[None]:
    """Add a family for as long as the context lasts. Arguments and errors are the same as in `register`."""
    register(module, architectures)
    try:
        yield
    finally:
        for model_type, architecture in architectures.items():
            del _OWN_TYPES[model_type], _MODULES[architecture]


# One line per family.
register(
    "teachllm.models.families.llama",
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "mixtral": "MixtralForCausalLM",
    },
)


def is_own(architecture: str) -> bool:
    """Return whether a registered family has this architecture, so that it runs on this project's code."""
    return architecture in _MODULES


def own_architectures() -> tuple[str, ...]:
    """Return the architectures of all registered families."""
    return tuple(_MODULES)


def family_of(architecture: str) -> Family[Any]:
    """Return the family of an architecture.

    Raises:
        ModelError: no family has it; names the families that there are.
    """
    if architecture not in _MODULES:
        raise ModelError(f"this project has no code for {architecture}, only for {', '.join(_MODULES)}")
    family: Family[Any] = importlib.import_module(_MODULES[architecture]).FAMILY
    return family


# What a config.json with any of these keys describes, and why blocks of K and V cannot hold its state.
_REFUSED_KEYS = {
    "kv_lora_rank": "latent attention (MLA), whose cache holds no K and V per head",
    "ssm_cfg": "a recurrent state",
    "mamba_d_state": "a hybrid of attention and recurrent layers",
    "mamba_d_ssm": "a hybrid of attention and recurrent layers",
    "ssm_state_size": "recurrent layers",
    "linear_num_key_heads": "a hybrid of attention and linear-attention layers",
    "linear_attn_config": "a hybrid of attention and linear-attention layers",
    "conv_L_cache": "a hybrid of attention and convolution layers",
    "lru_width": "a hybrid of attention and recurrent layers",
    "attn_layer_period": "a hybrid of attention and recurrent layers",
    "index_topk": "sparse attention, which picks the tokens that it sees",
}
_REFUSED_MODEL_TYPES = {
    "mamba": "a recurrent state",
    "mamba2": "a recurrent state",
    "falcon_mamba": "a recurrent state",
    "rwkv": "a recurrent state",
    "xlstm": "a recurrent state",
    "recurrent_gemma": "a hybrid of attention and recurrent layers",
    "jamba": "a hybrid of attention and recurrent layers",
    "zamba": "a hybrid of attention and recurrent layers",
    "zamba2": "a hybrid of attention and recurrent layers",
    "nemotron_h": "a hybrid of attention and recurrent layers",
    "minimax": "a hybrid of attention and linear-attention layers",
    "gpt_oss": "attention sinks",
    "bloom": "ALiBi, a bias on the scores by distance",
    "mpt": "ALiBi, a bias on the scores by distance",
}
LAYER_TYPES = ("full_attention", "sliding_attention")
_KINDS_OF_ATTENTION = (*LAYER_TYPES, "attention")  # the last one in configurations of hybrids


def supported() -> str:
    """Return what runs here, as the end of a refusal."""
    return (
        f"supported are {', '.join(_MODULES)} and, through transformers, decoder-only models with plain causal "
        "grouped-query attention"
    )


def architecture_of(raw: dict[str, Any]) -> str:
    """Return the architecture that a config.json names.

    A class of ours with a model type of its own is no architecture of ours: transformers reads such a checkpoint with
    that type's configuration. Its name has the type in front, as in "internlm3.LlamaForCausalLM". A checkpoint of one
    of our types that was written from the model without its head is one of a language model.

    Raises:
        ModelError: config.json names no architecture.
    """
    values = JsonObject(raw, "config.json")
    architectures = values.entries("architectures")
    model_type = values.text("model_type", "")
    own = _OWN_TYPES.get(model_type)
    if own is not None and architectures == [own.replace("ForCausalLM", "Model")]:
        return own
    if not architectures:
        raise ModelError(f"config.json names no architecture in 'architectures'; {supported()}")
    if not all(isinstance(name, str) for name in architectures):
        raise values.refusal("architectures", "a list of class names")
    if architectures[0] not in _MODULES or not model_type:
        return str(architectures[0])
    return own or f"{model_type}.{architectures[0]}"


def check_supported(raw: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuse a checkpoint that no setting makes run.

    Args:
        raw: config.json.
        trust_remote_code: the checkpoint may bring its own Python.

    Raises:
        ModelError: with the architecture's name, the reason and what is supported.
    """
    architecture = architecture_of(raw)
    check_features(raw, architecture)
    if raw.get("auto_map") and architecture not in _MODULES and not trust_remote_code:
        raise ModelError(
            f"{architecture} brings its own Python code, which would run on this machine: "
            "set trust_remote_code=True if you trust its authors"
        )


def check_features(raw: dict[str, Any], architecture: str) -> None:
    """Refuse a configuration that asks for more than attention over K and V of blocks.

    Args:
        raw: config.json, or all values of the configuration that transformers reads from it.

    Raises:
        ModelError: with the architecture's name, the reason and what is supported.
    """
    reason = _reason_to_refuse(raw, architecture)
    if reason is not None:
        raise ModelError(f"{architecture} is not supported: it has {reason}; {supported()}")


def _reason_to_refuse(raw: dict[str, Any], architecture: str) -> str | None:
    if raw.get("is_encoder_decoder"):
        return "an encoder besides its decoder"
    if raw.get("model_type") in _REFUSED_MODEL_TYPES:
        return _REFUSED_MODEL_TYPES[raw["model_type"]]
    values = JsonObject(raw, "config.json")
    kinds = values.entries("layer_types") or values.entries("layers_block_type")
    is_all_attention = bool(kinds) and all(kind in _KINDS_OF_ATTENTION for kind in kinds)
    if architecture not in _MODULES:  # whose code reads none of these
        for key, reason in _REFUSED_KEYS.items():
            if raw.get(key) and not (is_all_attention and reason.startswith("a hybrid of")):
                return reason
        if raw.get("alibi"):
            return _REFUSED_MODEL_TYPES["bloom"]
    if not (architecture.endswith("ForCausalLM") or architecture.endswith("LMHeadModel")):
        return "no plain language-model head (architectures in config.json)"
    for kind in kinds:
        if kind not in _KINDS_OF_ATTENTION:
            return f"layers of type {kind!r} (layer_types in config.json)"
    if raw.get("use_bidirectional_attention"):
        return "attention to later tokens (use_bidirectional_attention in config.json)"
    if not raw.get("is_causal", True):
        return "attention to later tokens (is_causal in config.json)"
    if isinstance(raw.get("text_config"), dict):
        return "a language model inside of a larger one"
    return None
