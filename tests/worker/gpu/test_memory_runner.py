"""A runner uses a memory prediction, and an engine on a CPU does not load what predicts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm import EngineConfig
from teachllm.layers.weights.quantized_weight_loader import Slot
from teachllm.loading.loader import finish_model
from teachllm.models.decoder import CausalLM
from teachllm.models.model_config import load_model_config
from teachllm.worker.gpu import gpu_model_runner
from teachllm.worker.gpu.gpu_model_runner import GPUModelRunner
from teachllm.worker.gpu.memory import meta_model as module
from teachllm.worker.gpu.memory.meta_model import meta_model, meta_ranks
from teachllm.worker.gpu.memory.predicted import PredictedNeeds
from teachllm_kernels.dry_run import dry_run
from tests.bench.h200_script import h200
from tests.programs import run_program
from tests.quantization.format_checkpoints import FORMATS
from tests.worker.engines import tiny
from tests.worker.gpu.imagined_gpu import HOPPER, describe
from tests.worker.gpu.interpreted_gpu import InterpretedRunner, interpret

_CPU_ENGINE = """
import sys
from teachllm import LLM
LLM("teachlm", device="cpu").generate("Hi", use_tqdm=False)
print(*(name for name in sys.modules if name.startswith("teachllm.worker.gpu.memory")))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's runner is not interpreted there")
@pytest.mark.parametrize(("unmeasured", "expected"), [(0, 5000), (7000, 7000), (3000, 5000)])
def test_activations_that_were_not_measured_have_room_too(
    unmeasured: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Measuring(InterpretedRunner):
        _measured = GPUModelRunner._measured  # type: ignore[assignment]

    interpret(monkeypatch)
    monkeypatch.setattr(gpu_model_runner, "predict_needs", lambda *engine: PredictedNeeds({}, unmeasured))
    measured = {"activations": 5000, "libraries": 100}
    monkeypatch.setattr(gpu_model_runner, "measure_needs", lambda *step: dict(measured))
    config = EngineConfig(**tiny())
    model = load_model_config(config, "cpu")
    runner = Measuring(config.resolve(model.max_model_len), model, torch.device("cpu"))
    assert (runner.memory.activations, runner.memory.libraries) == (expected, 100)


def test_an_engine_on_a_cpu_loads_nothing_that_predicts_a_gpus_memory() -> None:
    result = run_program("-c", _CPU_ENGINE)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


def test_a_quantized_output_head_is_finished_on_meta_as_by_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantization = {**FORMATS["gptq int4"].config, "lm_head": True}
    monkeypatch.setitem(h200.SHAPES, "head", h200.SHAPES["qwen3-8b"] | {"quantization_config": quantization})
    config, model = describe("head", tmp_path)
    found: list[tuple[bool, bool]] = []

    def has_slots(model: CausalLM) -> bool:
        return any(isinstance(place, Slot) for _, place in model.end_tensors())

    def finish(model: CausalLM, *more: Any) -> None:
        before = has_slots(model)
        finish_model(model, *more)
        found.append((before, has_slots(model)))

    monkeypatch.setattr(module, "finish_model", finish)
    with dry_run(HOPPER):
        meta_model(config, model, meta_ranks(config, model))
    assert found == [(True, False)]
