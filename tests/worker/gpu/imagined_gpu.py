"""A GPU that is imagined: tensors have shapes and no memory, and what is allocated around a kernel is what counts."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from teachllm import EngineConfig
from teachllm.distributed.ranks import ALONE, Ranks
from teachllm.layers.attention_backends.triton import TritonBackend
from teachllm.layers.embedding import Embedding
from teachllm.layers.linear import Linear
from teachllm.layers.moe import Experts
from teachllm.layers.weights.dense_weight import DenseWeight
from teachllm.layers.weights.scheme import UNQUANTIZED
from teachllm.loading.loader import finish
from teachllm.models.build import NOWHERE, build_model
from teachllm.models.model_config import ModelConfig, load_model_config
from teachllm.quantization.formats.layer_schemes import on_the_fly
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.spec_decode.tree import DraftTree
from teachllm.worker.gpu.attention_inputs import GPUAttention
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.gpu_model_runner import GPUModelRunner
from teachllm.worker.kv_cache import (
    attention_needs,
)
from tests.bench.h200_script import h200


class NoLaunch:
    """Stands for a kernel where there is no GPU: what is allocated around it is what counts here."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


def launch_nothing(patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Have none of the modules' kernels do anything."""
    for module in modules:
        kernels = [name for name, each in vars(module).items() if hasattr(each, "fn") and hasattr(each, "__getitem__")]
        assert kernels, module
        for name in kernels:
            patch.setattr(module, name, NoLaunch())


def describe(name: str, folder: Path, **settings: Any) -> tuple[EngineConfig, ModelConfig]:
    """A benchmark's model on a GPU with the benchmark's settings."""
    config = EngineConfig(**h200.engine_settings(h200.write_shape(name, folder), "cuda") | settings)
    model = load_model_config(config, "cuda")
    return config.resolve(model.max_model_len), model


def make_runner(config: EngineConfig, model: ModelConfig, tree: DraftTree | None = None, ranks: Ranks = ALONE) -> Any:
    """A runner as far as its largest step goes."""
    assert config.max_num_seqs and config.max_model_len and config.max_num_batched_tokens
    runner: Any = GPUModelRunner.__new__(GPUModelRunner)
    runner._device, runner._backend = NOWHERE, TritonBackend()
    runner._ranks, runner._columns = ranks, Columns(model.vocab_size, ranks.tensor)
    sizes = (config.max_num_seqs, config.max_model_len, config.block_size, config.max_num_batched_tokens)
    runner._batch = DeviceBatch(*sizes, NOWHERE, tree)
    runner._attention = GPUAttention(attention_needs(config, model), runner._backend, runner._batch, 1)
    runner._drafting = None
    schemes = UNQUANTIZED if config.quantization is None else on_the_fly(config.quantization).schemes
    runner.model = build_model(model, NOWHERE, schemes, ranks)
    return runner


def quantize_weights(model: torch.nn.Module) -> None:
    """As the loader does of what it has read."""
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.fill_randomly(None)
    finish(model, NOWHERE)


def fix_products(model: torch.nn.Module, config: EngineConfig) -> None:
    """As the loader does, if they are to be."""
    for module in model.modules():
        if isinstance(module, DenseWeight | Embedding | Experts):
            module.is_fixed = config.batch_invariant
