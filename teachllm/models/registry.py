"""Which architectures run: on our own code, through transformers, or not at all, and why not.

A checkpoint names its architecture in config.json. Everything is decided from that file, before a weight is read.
"""

from __future__ import annotations

from typing import Any

# Architectures of `models/llama.py`: with one MLP in a layer, and with experts.
DENSE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
WITH_EXPERTS = ("Qwen3MoeForCausalLM", "MixtralForCausalLM")
OWN = (*DENSE, *WITH_EXPERTS)

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
_LAYER_TYPES = ("full_attention", "sliding_attention")

SUPPORTED = (
    f"supported are {', '.join(OWN)} and, through transformers, decoder-only models with plain causal grouped-query "
    "attention"
)


class ModelError(ValueError):
    """A model that cannot be run, or a checkpoint that cannot be read, in one line."""


def architecture_of(raw: dict[str, Any]) -> str:
    """The architecture that a config.json names.

    Raises:
        ModelError: it names none.
    """
    architectures = raw.get("architectures") or []
    if not architectures:
        raise ModelError(f"config.json names no architecture; {SUPPORTED}")
    return str(architectures[0])


def check_supported(raw: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuses what no setting makes run.

    Args:
        raw: config.json.
        trust_remote_code: the checkpoint may bring its own Python.

    Raises:
        ModelError: with the architecture's name, the reason and what is supported.
    """
    architecture = architecture_of(raw)
    reason = _reason_to_refuse(raw, architecture)
    if reason is not None:
        raise ModelError(f"{architecture} is not supported: it has {reason}; {SUPPORTED}")
    if raw.get("auto_map") and architecture not in OWN and not trust_remote_code:
        raise ModelError(
            f"{architecture} brings its own Python code, which would run on this machine: "
            "set trust_remote_code=True if you trust its authors"
        )


def _reason_to_refuse(raw: dict[str, Any], architecture: str) -> str | None:
    if raw.get("is_encoder_decoder"):
        return "an encoder besides its decoder"
    if raw.get("model_type") in _REFUSED_MODEL_TYPES:
        return _REFUSED_MODEL_TYPES[raw["model_type"]]
    for key, reason in _REFUSED_KEYS.items():
        if raw.get(key):
            return reason
    if raw.get("alibi"):
        return _REFUSED_MODEL_TYPES["bloom"]
    if not (architecture.endswith("ForCausalLM") or architecture.endswith("LMHeadModel")):
        return "no plain language-model head"
    for layer_type in raw.get("layer_types") or []:
        if layer_type not in _LAYER_TYPES:
            return f"layers of type {layer_type!r}"
    return None
