"""Reading a config.json of the Llama family.

Files of all ages are about: a key that is missing means the default of its own architecture, and rope's settings
are spelled `rope_theta` with `rope_scaling`, or since transformers 5 together as `rope_parameters`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from teachllm.checkpoint.json_values import JsonObject
from teachllm.errors import ModelError
from teachllm.layers.rotary import SCALINGS, RotaryConfig
from teachllm.models.family import MOST_LAYERS, DecoderConfig
from teachllm.models.moe_config import NAMES, parse_moe
from teachllm.models.registry import LAYER_TYPES, architecture_of

# Of these null is a value: no window, or as many KV heads as heads. Of the other keys transformers refuses null.
MAY_BE_NULL = ("num_key_value_heads", "head_dim", "sliding_window", "layer_types", "rope_scaling", "rope_parameters")
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
_MOST_POSITIONS = 1 << 24  # more than any model has
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
    meant = _DEFAULTS[architecture] | raw
    given = {key: value for key, value in meant.items() if value is not None or key not in MAY_BE_NULL}
    values = JsonObject(given, where)
    has_eos = raw.get("eos_token_id", 0) is not None  # null says that there is none, silence means the default
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):  # two names of one function
        raise JsonObject(raw, where).refusal("hidden_act", f"'silu' in {architecture}")
    hidden_size, num_heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    num_kv_heads = values.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise values.refusal("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    head_size = values.integer("head_dim", hidden_size // num_heads, least=2)
    if head_size < 2:
        raise values.refusal("num_attention_heads", f"at most half of hidden_size={hidden_size}")
    if head_size % 2:
        raise ModelError(f"{where}: head_dim={head_size} is odd, and rotary embedding turns pairs of channels")
    has_bias = {key: architecture in read and values.flag(key, False) for key, read in _READS_BIAS.items()}
    num_layers = values.integer("num_hidden_layers", most=MOST_LAYERS)
    rotary = _rotary(values, head_size)
    return LlamaConfig(
        context_len=rotary.context_len,
        vocab_size=values.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=values.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        norm_eps=values.number("rms_norm_eps", 1e-6, above=0, below=1),
        qkv_bias=has_bias["attention_bias"] or architecture == "Qwen2ForCausalLM",
        o_bias=has_bias["attention_bias"],
        mlp_bias=has_bias["mlp_bias"],
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        tied=values.flag("tie_word_embeddings", False),
        eos_token_ids=values.token_ids("eos_token_id") if has_eos else frozenset(),
        rotary=rotary,
        windows=_windows(values, architecture, num_layers),
        experts=parse_moe(values, architecture),
    )


def _rotary(values: JsonObject, head_size: int) -> RotaryConfig:
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


def _windows(values: JsonObject, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Return how far each layer looks back.

    With `layer_types`, the layers that it calls sliding have the window. Without, all layers of Mistral and Mixtral
    do; if it is switched on, all of Qwen3-MoE, and those of Qwen from `max_window_layers` on; and no layer of Llama.
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
