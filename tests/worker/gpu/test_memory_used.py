"""What a GPU uses is what was predicted."""

from __future__ import annotations

import gc
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm import LLM
from teachllm.bench.batch import Batch, random_ids, run_batch
from teachllm.core.memory import NotEnoughMemoryError
from teachllm.spec_decode.load import load_drafter_config
from teachllm.worker.gpu.gpu_model_runner import GPUModelRunner
from teachllm.worker.gpu.memory.predicted import predict_needs
from teachllm.worker.memory_plan import plan_memory
from tests.bench.h200_script import h200
from tests.worker.gpu.imagined_gpu import describe

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"])
def test_a_gpu_uses_what_was_predicted(name: str, tmp_path: Path) -> None:
    config, model = describe(name, tmp_path, max_model_len=4096, num_gpu_blocks_override=1400)
    predicted = plan_memory(config, model, torch.device("cuda"))
    llm = LLM(
        **h200.engine_settings(tmp_path / name, "cuda") | {"max_model_len": 4096, "num_gpu_blocks_override": 1400}
    )
    found = llm.engine.core.executor._runner.memory  # type: ignore[attr-defined]
    assert found.weights == pytest.approx(predicted.weights, rel=0.02)
    assert found.activations == pytest.approx(predicted.activations, rel=0.02)
    rng = random.Random(0)
    run_batch(llm, Batch([random_ids(rng, 60, 1000) for _ in range(256)], [2] * 256))  # libraries have what they need
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run_batch(llm, Batch([random_ids(rng, 65, 1000) for _ in range(256)], [1] * 256))  # 16,640 tokens in one step
    used = torch.cuda.max_memory_allocated() - before
    llm.close()
    assert used == pytest.approx(predicted.activations, rel=0.02)


def test_what_a_draft_model_takes_is_in_the_prediction(tmp_path: Path) -> None:
    small = h200.write_shape("qwen3-0.6b", tmp_path)
    speculation = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 4}
    settings: dict[str, Any] = {"max_model_len": 4096, "num_gpu_blocks_override": 1400}
    settings["speculative_config"] = speculation
    config, model = describe("qwen3-8b", tmp_path, **settings)
    predicted = plan_memory(config, model, torch.device("cuda"), load_drafter_config(config, model, "cuda"))
    torch.cuda.empty_cache()
    before = _pool_bytes()
    llm = LLM(**h200.engine_settings(tmp_path / "qwen3-8b", "cuda") | settings)
    found, recordings = llm.engine.core.executor._runner.memory, _pool_bytes() - before  # type: ignore[attr-defined]
    llm.close()
    assert found.weights == pytest.approx(predicted.weights, rel=0.02)
    assert found.activations == pytest.approx(predicted.activations, rel=0.02)
    assert 0 < recordings < predicted.graphs


@pytest.mark.parametrize("method", ["draft_model", "eagle", "medusa"])
def test_the_embedded_drafters_take_what_was_predicted(method: str) -> None:
    speculation = {"method": method, "model": f"teachlm-{method.removesuffix('_model')}"}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="memory is not as predicted")
        LLM("teachlm", device="cuda", speculative_config=speculation, gpu_memory_utilization=0.3).close()


def test_an_engine_that_was_closed_leaves_its_memory_to_the_next(tmp_path: Path) -> None:
    h200.write_shape("qwen3-0.6b", tmp_path)
    settings = h200.engine_settings(tmp_path / "qwen3-0.6b", "cuda") | {"num_gpu_blocks_override": 2000}
    peaks = list[int]()
    gc.collect()
    gc.disable()  # what refers to itself stays until somebody collects it
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="memory is not as predicted")
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                llm = LLM(**settings)
                llm.close()
                peaks.append(torch.cuda.max_memory_reserved())
                del llm
    finally:
        gc.enable()
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)


def test_a_step_that_does_not_fit_is_refused_with_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_out(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("no more")

    monkeypatch.setattr(GPUModelRunner, "_largest_step", run_out)
    h200.write_shape("qwen3-0.6b", tmp_path)
    with pytest.raises(NotEnoughMemoryError, match="the largest step does not fit: set a smaller max_num_batched_tok"):
        LLM(**h200.engine_settings(tmp_path / "qwen3-0.6b", "cuda"))


def test_recordings_of_many_sizes_share_their_memory(tmp_path: Path) -> None:
    config, model = describe("qwen3-0.6b", tmp_path, max_model_len=4096, num_gpu_blocks_override=2000)
    torch.cuda.empty_cache()
    before = _pool_bytes()
    settings = h200.engine_settings(tmp_path / "qwen3-0.6b", "cuda")
    llm = LLM(**settings | {"max_model_len": 4096, "num_gpu_blocks_override": 2000})
    rng = random.Random(0)
    for num_prompts in (9, 9, 20, 20, 33, 33, 47, 47):  # more than a full graph of prompts takes: recorded in pieces
        run_batch(llm, Batch([random_ids(rng, 10, 1000) for _ in range(num_prompts)], [4] * num_prompts))
    assert len(llm.engine.core.executor._runner._graphs._pieces) >= 3  # type: ignore[attr-defined]
    used = _pool_bytes() - before
    llm.close()
    assert 0 < used < predict_needs(config, model, torch.device("cuda")).needs["graphs"]


def _pool_bytes() -> int:
    """Of all graphs' pools."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))
