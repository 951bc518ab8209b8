"""Fixtures for GPUs that are imagined."""

from __future__ import annotations

import pytest
import torch

from teachllm.layers import attention
from teachllm.layers.weights import gpu_scaled_weight
from teachllm.worker.gpu import memory_needs
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm_kernels import _triton, quantize_rows, rms_norm, silu_and_mul
from teachllm_kernels.attention import rope_kv_write
from teachllm_kernels.linear import batch_invariant_gemm, hopper_gated_linear, hopper_linear
from teachllm_kernels.linear.packed import dequantize
from teachllm_kernels.linear.scaled import hopper_scaled_mm
from teachllm_kernels.moe import grouped_gemm, moe_routing
from tests.bench.h200_script import h200
from tests.thorough import THOROUGH
from tests.worker.gpu.imagined_gpu import launch_nothing


@pytest.fixture
def imagined_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that have shapes and no memory, and say that they are on a GPU."""
    launch_nothing(monkeypatch, batch_invariant_gemm, rms_norm, rope_kv_write, silu_and_mul, grouped_gemm, moe_routing)
    monkeypatch.setattr(_triton, "_has_pdl", lambda device: False)
    monkeypatch.setattr(DeviceBatch, "_on_host", lambda self, count: torch.empty(count, dtype=torch.int32))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(attention, "weak_tensor", lambda tensor: tensor)


@pytest.fixture
def imagined_hopper(imagined_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hopper_linear, memory_needs, gpu_scaled_weight):
        monkeypatch.setattr(module, "has_hopper", lambda device: True)
    monkeypatch.setattr(gpu_scaled_weight, "compute_capability", lambda device: (9, 0))
    launch_nothing(monkeypatch, hopper_gated_linear, hopper_scaled_mm, quantize_rows, dequantize)


@pytest.fixture
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizing all of them takes longest, and what a step holds does not depend on it."""
    for name in () if THOROUGH else ("qwen3-0.6b", "qwen3-8b"):
        monkeypatch.setitem(h200.SHAPES, name, h200.SHAPES[name] | {"num_hidden_layers": 2})
