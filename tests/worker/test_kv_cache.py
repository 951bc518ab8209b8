"""How many blocks this machine gets, for each way of saying it, and what is said when they are too few."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from teachllm import EngineConfig
from teachllm.core.memory import MemoryPlan
from teachllm.models.model_config import ModelConfig, load_model_config
from teachllm.worker import memory_plan
from teachllm.worker.kv_cache import allocate_kv_cache, kv_cache_specs
from teachllm.worker.memory_plan import plan_memory
from tests.worker.engines import make_llm, random_ids, tiny

CPU = torch.device("cpu")
BYTES_PER_TOKEN = 2 * 2 * 2 * 256 * 4  # K and V, 2 layers, 2 KV heads of 256, float32


def load(**changes: Any) -> tuple[EngineConfig, ModelConfig]:
    config = EngineConfig(**tiny(**({"num_gpu_blocks_override": None} | changes)))
    model = load_model_config(config)
    return config.resolve(model.max_model_len), model


def plan(**changes: Any) -> MemoryPlan:
    return plan_memory(*load(**changes), CPU)


def test_blocks_can_be_given_by_number_even_fewer_than_one_sequence_needs() -> None:
    for count in (1, 7, 1000):
        assert plan(num_gpu_blocks_override=count).num_blocks == count


@pytest.mark.parametrize(
    ("name", "given", "fits"),
    [
        ("num_gpu_blocks_override", 51, 50),
        ("kv_cache_memory_bytes", 60 * 16 * BYTES_PER_TOKEN, 50 * 16 * BYTES_PER_TOKEN),
    ],
)
def test_more_than_the_machine_has_shows_the_table_and_what_fits(
    monkeypatch: pytest.MonkeyPatch, name: str, given: int, fits: int
) -> None:
    whole = plan()
    free = whole.weights + whole.activations + 50 * whole.bytes_per_block
    monkeypatch.setattr(memory_plan, "_free_ram", lambda: free)
    with pytest.raises(
        ValueError, match=f"^{name}={given} does not fit into the .*: set {name}={fits} or less\n"
    ) as refused:
        plan(**{name: given})
    assert "\n  weights " in str(refused.value) and "\n  KV cache " in str(refused.value)
    assert plan(**{name: fits}).num_blocks == 50
    monkeypatch.setattr(memory_plan, "_free_ram", lambda: 1000)
    with pytest.raises(ValueError, match="take a smaller model or a machine with more memory"):
        plan(**{name: given})


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_bytes_given_become_as_many_whole_blocks_as_fit(block_size: int) -> None:
    per_block = block_size * BYTES_PER_TOKEN
    for num_bytes, blocks in (
        (300 * per_block, 300),
        (301 * per_block - 1, 300),
        (96 * BYTES_PER_TOKEN, 96 // block_size),
    ):
        assert plan(kv_cache_memory_bytes=num_bytes, block_size=block_size).num_blocks == blocks


def test_a_cpu_by_default_holds_what_the_settings_can_use_and_at_most_a_gibibyte() -> None:
    assert plan(max_num_seqs=8).num_blocks == 8 * 6  # 8 sequences of 96 tokens
    assert plan(max_num_seqs=8, block_size=96, max_model_len=96).num_blocks == 8
    most = plan(max_num_seqs=5000, max_num_batched_tokens=5000)
    assert most.num_blocks == (1 << 30) // (16 * BYTES_PER_TOKEN)


def test_a_cpu_holds_one_sequence_even_if_that_is_more_than_a_gibibyte() -> None:
    config, model = load(max_model_len=None, max_num_seqs=1)
    long = replace(config, max_model_len=100_000)
    assert plan_memory(long, model, CPU).num_tokens >= 100_000


def test_the_share_of_free_memory_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    config, model = load(max_num_seqs=64)
    whole = plan_memory(config, model, CPU)
    free = whole.weights + whole.activations + 50 * whole.bytes_per_block
    monkeypatch.setattr(memory_plan, "_free_ram", lambda: free)
    assert plan_memory(replace(config, gpu_memory_utilization=1.0), model, CPU).num_blocks == 50
    less = plan_memory(replace(config, gpu_memory_utilization=0.999), model, CPU)
    assert less.budget == int(free * 0.999) and less.num_blocks < 50


@pytest.mark.parametrize(
    "sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}]
)
def test_main_memory_is_divided_among_all_processes(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]) -> None:
    config, model = load(max_num_seqs=64)
    whole = plan_memory(config, model, CPU)
    free = whole.taken + 50 * whole.bytes_per_block
    monkeypatch.setattr(memory_plan, "_free_ram", lambda: 2 * free)
    several = replace(config, gpu_memory_utilization=1.0, **sizes)  # type: ignore[arg-type]
    assert plan_memory(several, model, CPU).num_blocks == 50
    with pytest.raises(ValueError, match="num_gpu_blocks_override=50 or less"):
        plan_memory(replace(several, num_gpu_blocks_override=51), model, CPU)


def test_free_memory_is_read_from_this_machine() -> None:
    assert 1 << 26 < memory_plan._free_ram() < 1 << 50


def test_too_little_memory_shows_the_table_and_the_longest_sequence_that_fits() -> None:
    num_bytes = 5 * 16 * BYTES_PER_TOKEN + 17
    with pytest.raises(ValueError) as refused:
        plan(kv_cache_memory_bytes=num_bytes)
    message = str(refused.value)
    assert message.startswith("the KV cache would hold 80 tokens, less than one sequence of max_model_len=96: ")
    for row in ("weights", "activations", "KV per token", "KV per block", "KV cache"):
        assert re.search(rf"^  {row} +[\d.]+ [KMG]?i?B  ", message, re.MULTILINE), row
    [length] = re.findall(r"set max_model_len=(\d+) or less", message)
    llm = make_llm(kv_cache_memory_bytes=num_bytes, max_model_len=int(length), num_gpu_blocks_override=None)
    assert len(llm.generate([random_ids(79)], use_tqdm=False)[0].outputs[0].token_ids) == 1
    with pytest.raises(ValueError):
        plan(kv_cache_memory_bytes=num_bytes, max_model_len=int(length) + 1)


def test_the_length_that_the_message_names_fits_also_when_the_machine_is_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, model = load()
    whole = plan_memory(config, model, CPU)
    free = whole.weights + whole.activations + 3 * whole.bytes_per_block + 5
    monkeypatch.setattr(memory_plan, "_free_ram", lambda: free)
    with pytest.raises(ValueError, match="set max_model_len=48 or less, or raise gpu_memory_utilization, or free"):
        plan(gpu_memory_utilization=1.0)
    assert plan(gpu_memory_utilization=1.0, max_model_len=48).num_tokens == 48


def test_memory_that_holds_no_block_at_all_names_no_length() -> None:
    with pytest.raises(ValueError, match="would hold 0 tokens") as refused:
        plan(kv_cache_memory_bytes=100)
    assert "set max_model_len" not in str(refused.value)
    [fits] = re.findall(r"set kv_cache_memory_bytes=(\d+) or more", str(refused.value))
    assert plan(kv_cache_memory_bytes=int(fits)).num_tokens == 96
    with pytest.raises(ValueError, match="would hold 80 tokens"):
        plan(kv_cache_memory_bytes=int(fits) - 1)


@pytest.mark.parametrize("missing", [0, 1])  # nothing is left for a KV cache, or less than that
def test_weights_that_do_not_fit_are_named(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, model = load()
    whole = plan_memory(config, model, CPU)
    monkeypatch.setattr(memory_plan, "_free_ram", lambda: whole.taken - missing)
    with pytest.raises(
        ValueError, match=r"^weights \(.*B\) and what a step needs \(.*B\) do not fit into the .*B that"
    ):
        plan(gpu_memory_utilization=1.0)


def test_it_is_refused_before_any_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model(*_: Any) -> None:
        raise AssertionError("read a weight")

    monkeypatch.setattr("teachllm.worker.cpu.model_runner.load_model", load_model)
    with pytest.raises(ValueError, match="the KV cache would hold"):
        make_llm(num_gpu_blocks_override=None, kv_cache_memory_bytes=1000)


def test_tensors_are_as_large_as_the_plan_says_and_zero() -> None:
    config, model = load()
    caches = allocate_kv_cache(model, 5, config.block_size, CPU)
    assert len(caches) == model.num_layers
    assert all(tensor.shape == (5, 16, 2, 256) and not tensor.any() for pair in caches for tensor in pair)
    num_bytes = sum(tensor.nbytes for pair in caches for tensor in pair)
    assert num_bytes == 5 * 16 * BYTES_PER_TOKEN == 5 * plan().bytes_per_block


def test_each_layer_declares_its_window() -> None:
    _, model = load(model=EngineConfig(**tiny("mistral")).model)
    assert [spec.window for spec in kv_cache_specs(model)] == [24] * 3
    assert {spec.dtype_bytes for spec in kv_cache_specs(replace(model, dtype="bfloat16"))} == {2}
