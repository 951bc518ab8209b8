"""Predict what an engine on a GPU takes beside weights and KV, before a weight is read; no GPU computes anything."""

from __future__ import annotations

from typing import NamedTuple

import torch

from teachllm.config import EngineConfig
from teachllm.layers.attention_backends import selection
from teachllm.models.model_config import ModelConfig
from teachllm.spec_decode.load import DrafterConfig
from teachllm.worker.gpu.memory.graph_needs import graph_bytes, has_graphs
from teachllm.worker.gpu.memory.meta_runner import MetaRunner
from teachllm_kernels.dry_run import compute_capability, dry_run, gpu_type
from teachllm_kernels.selection import AS_PRODUCT, spans_of

_CODE = 128 << 20  # an assumption about the kernels that libraries and Triton load; what is measured replaces it


class PredictedNeeds(NamedTuple):
    """Hold what an engine takes, in bytes.

    Attributes:
        needs: by the names of `MemoryPlan`'s fields; the weights are `ModelConfig.weight_bytes`.
        unmeasured: activations that the largest step does not show when it runs on a GPU, see `_unmeasured`; 0: it
            shows all. `needs` has room for them.
    """

    needs: dict[str, int]
    unmeasured: int


def predict_needs(
    config: EngineConfig, model: ModelConfig, device: torch.device, drafter: DrafterConfig | None = None
) -> PredictedNeeds:
    """Predict by running steps on the meta device.

    Args:
        config: resolved for this model.
        model: one rank's part of it, if there are several.
        device: a GPU; in a dry run also the meta device.
    """
    num_tokens = config.max_num_batched_tokens
    assert num_tokens
    with dry_run(gpu_type(device)):
        runner = MetaRunner(config, model, drafter)
        largest = runner.step_bytes(num_tokens)
        unmeasured = _unmeasured(runner, num_tokens, largest)
        needs = {
            "activations": max(largest, unmeasured),
            "buffers": runner.buffer_bytes + selection.workspace_bytes(config.attention_backend),
            "graphs": graph_bytes(config, model, runner, drafter) if has_graphs(config) else 0,
            "libraries": _CODE + (2 if has_graphs(config) else 1) * _cublas_workspace_bytes(device),
        }
        return PredictedNeeds(needs, unmeasured)


def _unmeasured(runner: MetaRunner, num_tokens: int, largest: int) -> int:
    """Return the activations that the largest step does not show on a GPU, in bytes.

    It consists of padding, which a router sends to few ranks. And a step that is one token too short for kernels that
    gate has gate and up in memory, which the largest step never has, and may need more memory than that one.
    """
    gated_from, unmeasured = _gated_from(runner), largest if runner.shares_experts else 0
    if gated_from is not None and gated_from <= num_tokens:
        unmeasured = max(unmeasured, runner.step_bytes(gated_from - 1))
    return unmeasured


def _gated_from(runner: MetaRunner) -> int | None:
    """Return the fewest tokens from which long steps gate before they write, if shorter ones write gate and up."""
    borders: list[int] = []
    for operands in set(runner.gated_operands()):
        *shorter, (_, longest) = spans_of("gated", operands)
        if shorter and longest.kernel != AS_PRODUCT and shorter[-1][1].kernel == AS_PRODUCT:
            borders.append(shorter[-1][0] + 1)
    return max(borders, default=None)


def _cublas_workspace_bytes(device: torch.device) -> int:
    """Return the bytes of the workspace that PyTorch gives to cuBLAS for each stream."""
    major, _ = compute_capability(device)
    return 32 << 20 if major >= 9 else 8320 << 10
