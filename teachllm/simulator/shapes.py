"""Model shapes to simulate: everything the engine must know of a model but its weights.

A shape is read from a config.json, as the engine reads it before it reads weights; some are known by name.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from teachllm.config import EngineConfig
from teachllm.models.model_config import ModelConfig, load_model_config

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"intermediate_size": 3072, "tie_word_embeddings": True},
    "qwen3-8b": _QWEN3
    | {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"intermediate_size": 12288, "tie_word_embeddings": False},
}


def model_shape(name: str = "teachlm", dtype: str = "auto") -> ModelConfig:
    """A model without weights, as a GPU would run it.

    Args:
        name: of `SHAPES`, "teachlm", a folder with a config.json, or a hub id.
        dtype: "auto" is the checkpoint's.

    Raises:
        ModelError: (a ValueError) there is no such model, or its architecture is not supported; in one line.
    """
    raw = SHAPES.get(name)
    if raw is None:
        return load_model_config(EngineConfig(model=name, dtype=dtype, load_format="dummy"), "cuda")
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        config = EngineConfig(model=folder, dtype=dtype, load_format="dummy")
        return replace(load_model_config(config, "cuda"), path=name)
