"""A GPU that is imagined: a dry run on meta tensors, and a benchmark's models on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from teachllm import EngineConfig
from teachllm.models.model_config import ModelConfig, load_model_config
from teachllm_kernels.gpu_type import GPU_TYPES
from tests.bench.h200_script import h200

NOWHERE = torch.device("meta")
AMPERE, HOPPER = GPU_TYPES["sm_80"], GPU_TYPES["sm_90"]


def describe(name: str, folder: Path, **settings: Any) -> tuple[EngineConfig, ModelConfig]:
    """Return a benchmark's model on a GPU with the benchmark's settings."""
    config = EngineConfig(**h200.engine_settings(h200.write_shape(name, folder), "cuda") | settings)
    model = load_model_config(config, "cuda")
    return config.resolve(model.max_model_len), model
