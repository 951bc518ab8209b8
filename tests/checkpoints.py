"""Random tiny checkpoints of every supported family, written as real ones are, by transformers itself.

Weights are drawn so that greedy decoding wanders: with the usual tiny initial weights a model repeats one token, and
a broken KV cache would pass every comparison unseen.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB_SIZE = 512
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _rope(kind: str, **parameters: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


@dataclass(frozen=True)
class _Variant:
    """One checkpoint: transformers' model type, what differs from `_COMMON`, and the scale of its matrices."""

    model_type: str
    settings: dict[str, Any]
    gain: float


def _variant(model_type: str, gain: float = 2.0, **settings: Any) -> _Variant:
    return _Variant(model_type, settings, gain)


# Own code. Between them: GQA ratios 1, 2 and 4, one KV head for all, head sizes 32, 64, 128 and 256, tied and not.
OWN = {
    "llama2": _variant("llama", num_attention_heads=2, num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-5),
    "llama3": _variant(
        "llama",
        head_dim=64,
        num_key_value_heads=1,
        rope_parameters=_rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
    ),
    "mistral": _variant("mistral", sliding_window=24, head_dim=32),
    "qwen2": _variant("qwen2", num_attention_heads=2, num_key_value_heads=1, hidden_size=128),
    "qwen3": _variant("qwen3", head_dim=256, num_hidden_layers=2, tie_word_embeddings=True),
    "llama_yarn": _variant(
        "llama",
        head_dim=32,
        num_attention_heads=8,
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=128),
    ),
    "llama_linear": _variant(
        "llama",
        head_dim=128,
        num_attention_heads=8,
        rope_parameters=_rope("linear", factor=4.0),
        attention_bias=True,
    ),
    "llama_dynamic": _variant(
        "llama",
        head_dim=32,
        max_position_embeddings=64,
        rope_parameters=_rope("dynamic", factor=8.0),
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "qwen2_window": _variant(
        "qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3_moe": _variant(
        "qwen3_moe",
        **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [1]},
        norm_topk_prob=True,
        head_dim=32,
    ),
    "mixtral": _variant("mixtral", num_local_experts=5, sliding_window=24, num_hidden_layers=2),
}

# Through the transformers backend: windows, soft caps and a custom scale; no window; norms after; partial rotary.
TRANSFORMERS = {
    "gemma2": _variant("gemma2", head_dim=32, sliding_window=24, query_pre_attn_scalar=24, tie_word_embeddings=True),
    "phi3": _variant("phi3", sliding_window=None),
    "olmo2": _variant("olmo2"),
    "gptneox": _variant(
        "gpt_neox",
        gain=3.0,
        hidden_size=128,
        num_key_value_heads=4,
        rope_parameters=_rope("default", partial_rotary_factor=0.25),
    ),
}

ALL = OWN | TRANSFORMERS


def make_checkpoint(name: str, folder: Path | str, seed: int = 0) -> str:
    """Writes the checkpoint `name` (a key of `ALL`) to `folder`, and returns the folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for file, content in _files(name, seed).items():
        Path(folder, file).write_bytes(content)
    return str(folder)


@cache
def _files(name: str, seed: int) -> dict[str, bytes]:
    """The content of each file of a checkpoint, which many tests change a copy of."""
    with tempfile.TemporaryDirectory() as folder:
        build_model(name, seed).save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def build_config(name: str) -> PreTrainedConfig:
    """transformers' configuration of the checkpoint `name`."""
    variant = ALL[name]
    return CONFIG_MAPPING[variant.model_type](**(_COMMON | variant.settings))


def build_model(name: str, seed: int = 0) -> PreTrainedModel:
    """transformers' model of the checkpoint `name` in float32, in eval mode."""
    model = AutoModelForCausalLM.from_config(build_config(name)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                # Norm weights and biases: any values, so that forgetting one shows. Queries and keys that are
                # normalised get more, or attention is nearly uniform and forgets the order.
                parameter.add_(noise, alpha=0.2)
                if parameter_name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.mul_(2.0)
            else:
                # Embeddings small beside what the layers add: the next token depends on the whole context.
                gain = 0.2 if parameter.shape[0] == VOCAB_SIZE else ALL[name].gain
                parameter.copy_(noise * gain * parameter.shape[-1] ** -0.5)
    return model
