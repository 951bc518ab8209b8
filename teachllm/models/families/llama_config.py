"""Reading a config.json of the Llama family: what each of its architectures means by a key, or by its absence."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from teachllm.checkpoint.json_values import JsonObject
from teachllm.layers.rotary import RotaryConfig
from teachllm.models.config_keys import read_decoder, read_head_size, read_num_layers, read_rotary, values_of
from teachllm.models.family import DecoderConfig
from teachllm.models.moe_config import NAMES, MoeConfig, parse_moe
from teachllm.models.registry import architecture_of

# What each architecture means by a key that is absent, as far as it differs from Llama's.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"eos_token_id": 2},
    "MistralForCausalLM": {
        **{"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096, "eos_token_id": 2},
    },
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
    "Qwen3MoeForCausalLM": {
        **{"max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 4},
        **{"moe_intermediate_size": 768, "num_experts_per_tok": 8, "norm_topk_prob": False},
        **{"num_local_experts": 128, "decoder_sparse_step": 1, "mlp_only_layers": []},
    },
    "MixtralForCausalLM": {
        **{"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 2},
    },
}
DENSE = tuple(name for name in _DEFAULTS if name not in NAMES)  # architectures with one MLP in each layer
# Where transformers looks for biases: its code of the other architectures reads no such key.
_READS_BIAS = {
    "attention_bias": ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    "mlp_bias": ("LlamaForCausalLM",),
}
# Architectures whose code in transformers has one kind of layer, whatever `layer_types` says.
_IGNORES_LAYER_TYPES = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM")
# The key of config.json that decides on the rows of a tensor, by the end of the tensor's name.
SIZE_KEYS = {
    "embed_tokens.weight": "vocab_size",
    "layernorm.weight": "hidden_size",
    "q_proj.weight": "num_attention_heads, head_dim",
    "k_proj.weight": "num_key_value_heads, head_dim",
    "v_proj.weight": "num_key_value_heads, head_dim",
    "mlp.gate_proj.weight": "intermediate_size",
    ".gate.weight": "num_experts or num_local_experts",
    **{f"0.{names.gate}.weight": "moe_intermediate_size or intermediate_size" for names in NAMES.values()},
}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """One model of the family.

    Attributes:
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        qk_norm: every head of Q and K is normalised before it is turned.
    """

    intermediate_size: int
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rotary: RotaryConfig

    @property
    def shared_sizes(self) -> dict[str, int]:
        """Return the sizes that tensor-parallel ranks share equally; an MLP counts if any layer has it."""
        has_mlp = self.experts is None or not all(self.experts.layers)
        return super().shared_sizes | ({"intermediate_size": self.intermediate_size} if has_mlp else {})


def parse(raw: dict[str, Any], where: str = "config.json") -> LlamaConfig:
    """Return a config.json as `LlamaConfig`.

    Args:
        where: its name, for errors.

    Raises:
        ModelError: a key is missing or has a value that the family's code does not know.
    """
    architecture = architecture_of(raw)
    values = values_of(raw, _DEFAULTS[architecture], where)
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):  # two names of one function
        raise JsonObject(raw, where).refusal("hidden_act", f"'silu' in {architecture}")
    has_bias = {key: architecture in read and values.flag(key, False) for key, read in _READS_BIAS.items()}
    return read_llama(
        values,
        windows=_windows(values, architecture, read_num_layers(values)),
        qkv_bias=has_bias["attention_bias"] or architecture == "Qwen2ForCausalLM",
        o_bias=has_bias["attention_bias"],
        mlp_bias=has_bias["mlp_bias"],
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        experts=parse_moe(values, architecture),
    )


def read_llama(
    values: JsonObject,
    *,
    windows: tuple[int | None, ...],
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    experts: MoeConfig | None = None,
) -> LlamaConfig:
    """Return the sizes of a config.json with Llama's keys, of any family whose layers are made of Llama's parts.

    Raises:
        ModelError: a key is missing or has a value that it cannot have.
    """
    rotary = read_rotary(values, read_head_size(values))
    return LlamaConfig(
        **vars(read_decoder(values, windows=windows, context_len=rotary.context_len, experts=experts)),
        intermediate_size=values.integer("intermediate_size"),
        norm_eps=values.number("rms_norm_eps", 1e-6, above=0, below=1),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        rotary=rotary,
    )


def _windows(values: JsonObject, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Return how far each layer looks back.

    With `layer_types`, the layers that it calls sliding have the window. Without, all layers of Mistral and Mixtral
    do; if it is switched on, all of Qwen3-MoE, and Qwen's from `max_window_layers` on; and no layer of Llama.
    """
    if architecture == "LlamaForCausalLM" and not values.has("layer_types"):
        return (None,) * num_layers
    is_on = not architecture.startswith("Qwen") or values.flag("use_sliding_window", False)
    given = values.integer("sliding_window", least=1 if is_on else 0) if values.has("sliding_window") else None
    window = given if is_on else None
    first = num_layers if architecture == "LlamaForCausalLM" else 0
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        first = values.integer("max_window_layers", 28, least=0)
    unlisted = tuple(window if i >= first else None for i in range(num_layers))
    kinds = values.entries("layer_types")
    if not values.has("layer_types"):
        return unlisted
    if len(kinds) != num_layers or not all(isinstance(kind, str) for kind in kinds):
        raise values.refusal("layer_types", f"one name per layer, num_hidden_layers={num_layers}")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if window is None and "sliding_attention" in kinds and architecture not in _IGNORES_LAYER_TYPES:
        raise values.refusal("layer_types", "full_attention in all layers, as no sliding_window is switched on")
    if windows != unlisted and architecture in _IGNORES_LAYER_TYPES:
        warnings.warn(
            f"{values.where}: its layer_types count here, and transformers' code of {architecture} does not read them",
            stacklevel=2,
        )
    return windows
