"""A record of compiled kernels holds for the settings that it was made for, and only while the kernels are there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from teachllm.config import EngineConfig
from teachllm.models.model_config import load_model_config
from teachllm.worker.gpu.memory.predicted import PredictedNeeds
from teachllm.worker.gpu.startup import compiled_record
from teachllm.worker.gpu.startup.compiled_record import CompiledRecord, Found
from teachllm_kernels.gpu_type import GPU_TYPES
from teachllm_kernels.kernel_cache import CachedKernel

FOUND = Found([CachedKernel("1a", "d1"), CachedKernel("2b", "d2")], [PredictedNeeds({"activations": 7}, 3)])


def record(folder: Path, target: str = "sm_90", **settings: Any) -> CompiledRecord:
    config = EngineConfig(model="teachlm", device="cuda", **settings)
    model = load_model_config(config, "cuda")
    return CompiledRecord(folder, config.resolve(model.max_model_len), model, None, GPU_TYPES[target])


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The keys of damaged kernels. Removing a kernel adds its key with a "-"."""
    damaged: set[str] = set()
    monkeypatch.setattr(compiled_record, "is_whole", lambda kernel: kernel.key not in damaged)
    monkeypatch.setattr(compiled_record, "forget", lambda key: damaged.add(f"-{key}"))
    return damaged


def test_a_record_is_there_for_the_same_settings_alone(tmp_path: Path, damaged: set[str]) -> None:
    assert not record(tmp_path).read()
    record(tmp_path).write(FOUND)
    same: list[dict[str, Any]] = [{}, {"seed": 3}, {"trace_path": "x"}, {"startup": "fast"}]
    assert all(record(tmp_path, **settings).read() == FOUND for settings in same)
    others: list[dict[str, Any]] = [
        {"max_num_seqs": 8},
        {"max_model_len": 64},
        {"quantization": "int8"},
        {"dtype": "float16"},
        {"speculative_config": {"method": "ngram"}},
    ]
    assert not any(record(tmp_path, **settings).read() for settings in others)
    assert not record(tmp_path, "sm_80").read()


def test_a_record_of_another_version_or_another_model_does_not_hold(
    tmp_path: Path, damaged: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path).write(FOUND)
    config = EngineConfig(model="teachlm", device="cuda")
    model = load_model_config(config, "cuda")
    other = replace(model, raw=model.raw | {"rope_theta": 5.0})
    assert not CompiledRecord(tmp_path, config, other, None, GPU_TYPES["sm_90"]).read()
    for name, value in (("torch.__version__", "9.9"), ("triton.__version__", "9.9")):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            assert not record(tmp_path).read()
    with monkeypatch.context() as patch:
        patch.setattr(compiled_record, "_digest_of_sources", lambda: "changed")
        assert not record(tmp_path).read()
    assert record(tmp_path).read()


def test_a_damaged_kernel_is_removed_so_that_it_is_compiled_again(tmp_path: Path, damaged: set[str]) -> None:
    record(tmp_path).write(FOUND)
    damaged.add("2b")
    assert not record(tmp_path).read() and damaged == {"2b"}
    record(tmp_path).remove_damaged()
    assert damaged == {"2b", "-2b"}


@pytest.mark.parametrize("content", ["", "[", "{}", "[]", "[1]", '[[["1a"]], []]', '"x"', "[[], [1]]"])
def test_a_record_that_is_damaged_itself_does_not_hold(content: str, tmp_path: Path, damaged: set[str]) -> None:
    record(tmp_path).write(FOUND)
    (file,) = (tmp_path / "teachllm").iterdir()
    assert json.loads(file.read_text())[0] == [["1a", "d1"], ["2b", "d2"]]
    file.write_text(content)
    assert not record(tmp_path).read()


def test_where_no_record_can_be_written_the_start_goes_on(tmp_path: Path) -> None:
    (tmp_path / "teachllm").write_text("")
    record(tmp_path).write(FOUND)
    assert not record(tmp_path).read()
