"""Reading a config.json of the Llama family.

Files of all ages are about: a key that is missing means the default of its own architecture, and rope's settings
are spelled `rope_theta` with `rope_scaling`, or since transformers 5 together as `rope_parameters`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from teachllm.layers.rotary import SCALINGS, RotaryConfig
from teachllm.models.moe_config import MoeConfig, parse_moe
from teachllm.models.registry import ModelError, architecture_of

# What each architecture means by a key that is absent, as far as it differs from Llama's.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
    "Qwen3MoeForCausalLM": {
        **{"max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 4},
        **{"moe_intermediate_size": 768, "num_experts_per_tok": 8, "norm_topk_prob": False},
        **{"num_local_experts": 128, "decoder_sparse_step": 1, "mlp_only_layers": []},
    },
    "MixtralForCausalLM": {
        **{"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        **{"num_local_experts": 8, "num_experts_per_tok": 2},
    },
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_NEEDED_BY_SCALING = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class LlamaConfig:
    """One model of the family.

    Attributes:
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        qk_norm: every head of Q and K is normalised before it is turned.
        tied: the output head is the embedding.
        windows: per layer, how many tokens back it looks, itself included; None looks at all.
        moe: its experts, where layers have them in place of one MLP of `intermediate_size`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    rotary: RotaryConfig
    windows: tuple[int | None, ...]
    moe: MoeConfig | None = None

    def experts_of(self, layer: int) -> MoeConfig | None:
        """Return what takes the place of its MLP, if anything does."""
        return self.moe if self.moe is not None and self.moe.layers[layer] else None

    @property
    def num_parameters(self) -> int:
        """Return the number that a checkpoint holds; a tied output head is not counted again."""
        ends = (1 if self.tied else 2) * self.vocab_size * self.hidden_size
        return self.num_active_parameters + self.num_idle_parameters + ends

    @property
    def num_active_parameters(self) -> int:
        """Those between embedding and output head that one token meets."""
        return sum(map(self.num_active_of, range(self.num_layers))) + self.hidden_size

    @property
    def num_idle_parameters(self) -> int:
        """Return the parameters of held experts that one token does not meet."""
        moe = self.moe
        return 0 if moe is None else moe.num_layers * (moe.num_held * self._expert_size(moe) - self._num_met(moe))

    def num_active_of(self, layer: int) -> int:
        """Those of one layer that one token meets; where some experts are held, as many as it does in the mean."""
        hidden, q_size, kv_size = self.hidden_size, self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        qkv_size, gate_up_size = q_size + 2 * kv_size, 2 * self.intermediate_size
        attention = hidden * qkv_size + q_size * hidden + self.qkv_bias * qkv_size + self.o_bias * hidden
        mlp = hidden * gate_up_size + self.intermediate_size * hidden + self.mlp_bias * (gate_up_size + hidden)
        norms, moe = 2 * hidden + self.qk_norm * 2 * self.head_size, self.experts_of(layer)
        if moe is not None:
            mlp = moe.num_experts * hidden + self._num_met(moe)  # every token meets the router
        return attention + norms + mlp

    def num_beside(self, max_len: int, holds_head_twice: bool) -> int:
        """Return the number of elements that our own model keeps beside its parameters.

        It holds a norm that all heads share once per head, and cosines and sines per position.

        Args:
            max_len: the number of positions.
            holds_head_twice: a CPU holds a tied output head by rows for look-ups and packed for logits.
        """
        norms = self.qk_norm * self.num_layers * (self.num_heads + self.num_kv_heads - 2) * self.head_size
        head = self.vocab_size * self.hidden_size if holds_head_twice else 0
        return norms + 2 * max_len * self.head_size + head

    def _num_met(self, moe: MoeConfig) -> int:
        return moe.top_k * moe.num_held * self._expert_size(moe) // moe.num_experts

    def _expert_size(self, moe: MoeConfig) -> int:
        return 3 * self.hidden_size * moe.intermediate_size


def parse(raw: dict[str, Any]) -> LlamaConfig:
    """A config.json as `LlamaConfig`.

    Raises:
        ModelError: a key is missing or has a value that the family's code does not know.
    """
    architecture = architecture_of(raw)
    given = {key: value for key, value in raw.items() if value is not None}
    values = _DEFAULTS[architecture] | given
    if "sliding_window" in raw:
        values["sliding_window"] = raw["sliding_window"]  # here null has a meaning: no window
    for key in _REQUIRED:
        if key not in values:
            raise ModelError(f"config.json of {architecture} lacks {key!r}")
    if values.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{architecture} with hidden_act={values['hidden_act']!r} is not supported, only with 'silu'")
    hidden_size, num_heads = values["hidden_size"], values["num_attention_heads"]
    num_kv_heads = values.get("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{architecture}: {num_heads} attention heads cannot share {num_kv_heads} KV heads equally")
    head_size = values.get("head_dim", hidden_size // num_heads)
    attention_bias = values.get("attention_bias", False)
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    return LlamaConfig(
        vocab_size=values["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=values["intermediate_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        norm_eps=values.get("rms_norm_eps", 1e-6),
        qkv_bias=is_qwen2 or attention_bias,
        o_bias=attention_bias and not is_qwen2,
        mlp_bias=values.get("mlp_bias", False),
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        tied=values.get("tie_word_embeddings", False),
        rotary=_rotary(values, head_size),
        windows=_windows(values, architecture),
        moe=parse_moe(values, architecture),
    )


def _rotary(values: dict[str, Any], head_size: int) -> RotaryConfig:
    parameters = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    scaling = parameters.pop("rope_type", None) or parameters.pop("type", "default")
    theta = parameters.pop("rope_theta", None) or values.get("rope_theta", 10000.0)
    if scaling not in SCALINGS:
        raise ModelError(f"rope scaling {scaling!r} is not supported, only {', '.join(SCALINGS)}")
    for key in _NEEDED_BY_SCALING[scaling]:
        if key not in parameters:
            raise ModelError(f"config.json: rope scaling {scaling!r} lacks {key!r}")
    trained_len = values.get("max_position_embeddings", 2048)
    if scaling in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", trained_len)
    return RotaryConfig(head_size, float(theta), scaling, trained_len, parameters)


def _windows(values: dict[str, Any], architecture: str) -> tuple[int | None, ...]:
    """Mistral, Mixtral: all layers. Qwen: if switched on, those of `layer_types`, or those above `max_window_layers`.

    Qwen3-MoE: if switched on, all.
    """
    num_layers, window = values["num_hidden_layers"], values.get("sliding_window")
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        return (window,) * num_layers
    if architecture == "LlamaForCausalLM" or not values.get("use_sliding_window", False):
        return (None,) * num_layers
    if architecture == "Qwen3MoeForCausalLM":
        return (window,) * num_layers
    layer_types = values.get("layer_types")
    if layer_types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    return tuple(window if i >= values.get("max_window_layers", 28) else None for i in range(num_layers))
