"""A GPU's ModelRunner on a machine that has none: its kernels in Triton's interpreter, CUDA's calls as if answered.

What the host of a GPU runs is all there: device rows, padded steps, plans in flight, what a graph holds. A recorded
graph runs its calls again, by the addresses and numbers that it was recorded with. Products are PyTorch's, and what
only a GPU has (fused decodes, pieces of mixed steps, time) is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from teachllm.core.memory import MemoryPlan
from teachllm.engine import make_core
from teachllm.layers import attention
from teachllm.layers.attention_backends.triton import TritonBackend
from teachllm.layers.embedding import Embedding
from teachllm.models.decoder import CausalLM
from teachllm.sampling import sampler
from teachllm.spec_decode.step_times import Prior
from teachllm.worker.gpu import gpu_model_runner
from teachllm.worker.gpu.attention_inputs import GPUAttention
from teachllm.worker.gpu.cuda_graphs import Graphs
from teachllm.worker.gpu.gpu_model_runner import GPUModelRunner
from teachllm.worker.gpu.memory.predicted import PredictedNeeds
from teachllm.worker.gpu.startup.compile_process import Compiling
from teachllm_kernels.attention import decode_plan
from teachllm_kernels.attention.kv_write import kv_write_triton
from tests.kernels.guard import guard
from tests.thorough import times

INTERPRETED = torch.device("cpu", 0)  # in place of a GPU; a CPU's own runner has no index


class _Stands:
    """For an event or a stream."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def elapsed_time(self, end: _Stands) -> float:
        return 1.0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


class _Graphs(Graphs):
    def capture(self, key: Hashable, run: Callable[[], Any]) -> bool:
        run()  # as it is warmed up, on padding alone
        self._full[key] = run  # type: ignore[assignment]
        return True

    def capture_pieces(self, key: Hashable, run: Any) -> bool:
        self._failed.add(key)
        return False

    def replay(self, key: Hashable) -> Any:
        return self._full[key]()  # type: ignore[operator]


class InterpretedRunner(GPUModelRunner):
    def __init__(self, config: Any, model: Any, device: torch.device, *more: Any, **by_name: Any) -> None:
        super().__init__(replace(config, startup="fast"), model, INTERPRETED, *more, **by_name)

    def _measured(self, predicted: MemoryPlan, *measured: Any) -> MemoryPlan:
        return predicted

    def prepare(self, sizes: Sequence[int], is_adaptive: bool) -> Prior | None:
        return super().prepare(sizes, True) if self.records_ahead else None

    records_ahead = False  # it takes longer than a test

    def close(self) -> None:
        self._graphs.clear()  # what the tests have frozen stays so


def interpret(patch: pytest.MonkeyPatch) -> None:
    """From now on an engine with device="cpu" computes as on a GPU."""
    cuda = {
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "mem_get_info": lambda device=None: (8 << 30, 16 << 30),
        "memory_allocated": lambda device=None: 0,
        "current_stream": _Stands,
        "graph_pool_handle": lambda: 0,
        "Stream": _Stands,
        "Event": _Stands,
    }
    guard(patch)
    for name, value in cuda.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(attention, "kv_write_cpu", kv_write_triton)
    patch.setattr(Embedding, "_raw_logits", Embedding._float32_logits)
    patch.setattr(CausalLM, "fuses_decodes", False)
    # A launch is as large as the GPU, its work as small as a test.
    patch.setattr(decode_plan, "_MULTIPROCESSORS", times(2, 8))
    patch.setattr(GPUAttention, "kernel_of", lambda attention, num_seqs: "paged_decode")
    patch.setattr(gpu_model_runner, "select_backend", lambda *needs: TritonBackend())
    patch.setattr(gpu_model_runner, "Graphs", _Graphs)
    patch.setattr(gpu_model_runner, "start_compiling", lambda *engine: Compiling(None, None))
    patch.setattr(gpu_model_runner, "predict_needs", lambda *engine: PredictedNeeds({}, 0))  # a CPU's plan estimates
    patch.setattr(sampler, "draws_by_kernel", lambda device: device == INTERPRETED)
    patch.setattr(make_core, "ModelRunner", InterpretedRunner)
    patch.setattr(make_core, "NgramDrafter", lambda *lengths: None)  # a GPU searches its own rows
