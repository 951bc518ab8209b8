"""Predict what an engine on a GPU takes beside weights and KV, before a weight is read; no GPU computes anything."""

from __future__ import annotations

import torch

from teachllm.config import EngineConfig
from teachllm.layers.attention_backends import selection
from teachllm.models.model_config import ModelConfig
from teachllm.spec_decode.load import DrafterConfig
from teachllm.worker.gpu.memory.graph_needs import graph_bytes, has_graphs
from teachllm.worker.gpu.memory.meta_runner import MetaRunner
from teachllm_kernels.dry_run import compute_capability, dry_run
from teachllm_kernels.linear.hopper_gated_linear import FROM_ROWS

_CODE = 128 << 20  # kernels that libraries and Triton load, an assumption; the measured one replaces it


def predict_needs(
    config: EngineConfig, model: ModelConfig, device: torch.device, drafter: DrafterConfig | None = None
) -> dict[str, int]:
    """Return bytes by the names of `MemoryPlan`'s fields; the weights are `model.weight_bytes`.

    Args:
        config: resolved for this model.
        model: of several ranks, what one has.
        device: a GPU; in a dry run also the meta device.
    """
    num_tokens = config.max_num_batched_tokens
    assert num_tokens
    with dry_run(compute_capability(device)):
        runner = MetaRunner(config, model, drafter)
        return {
            "activations": max(runner.step_bytes(num_tokens), _short_step_bytes(runner, num_tokens)),
            "buffers": runner.buffer_bytes + selection.workspace_bytes(config.attention_backend),
            "graphs": graph_bytes(config, model, runner, drafter) if has_graphs(config) else 0,
            "libraries": _CODE + (2 if has_graphs(config) else 1) * _cublas_workspace_bytes(device),
        }


def short_step_bytes(
    config: EngineConfig, model: ModelConfig, device: torch.device, drafter: DrafterConfig | None = None
) -> int:
    """Return what the step holds that is one token too short for kernels that save memory; 0: there is none.

    From `FROM_ROWS` tokens on, gate and up of an MLP are multiplied before they are written (`hopper_gated_linear`). A
    shorter step has them in memory, which the largest one never has, and may need more than that one.
    """
    num_tokens = config.max_num_batched_tokens
    assert num_tokens
    if num_tokens < FROM_ROWS:
        return 0
    with dry_run(compute_capability(device)):
        return _short_step_bytes(MetaRunner(config, model, drafter), num_tokens)


def _short_step_bytes(runner: MetaRunner, num_tokens: int) -> int:
    return 0 if num_tokens < FROM_ROWS else runner.step_bytes(FROM_ROWS - 1)


def _cublas_workspace_bytes(device: torch.device) -> int:
    """Return PyTorch's choice for cuBLAS, for each stream."""
    major, _ = compute_capability(device)
    return 32 << 20 if major >= 9 else 8320 << 10
