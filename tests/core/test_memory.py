"""The arithmetic of KV memory, by hand for models people know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from teachllm.core.memory import KVCacheSpec, MemoryPlan, format_bytes

GIB, MIB = 1024**3, 1024**2


def make_plan(budget: int, max_model_len: int = 4096, block_size: int = 16, layers: int = 28) -> MemoryPlan:
    specs = [KVCacheSpec(num_kv_heads=8, head_size=128, dtype_bytes=2)] * layers
    return MemoryPlan(budget, 1 * GIB, 512 * MIB, specs, block_size, max_model_len)


@pytest.mark.parametrize(
    ("layers", "num_kv_heads", "head_size", "per_token"),
    [(28, 8, 128, 114_688), (36, 8, 128, 147_456), (16, 8, 64, 32_768)],
    ids=["Qwen3-0.6B", "Qwen3-8B", "Llama-3.2-1B"],
)
def test_bytes_per_token_of_known_models_in_bfloat16(
    layers: int, num_kv_heads: int, head_size: int, per_token: int
) -> None:
    specs = [KVCacheSpec(num_kv_heads, head_size, 2)] * layers
    plan = MemoryPlan(1, 0, 0, specs, block_size=16, max_model_len=1)
    assert plan.bytes_per_token == per_token
    assert plan.bytes_per_block == 16 * per_token


def test_float32_takes_twice_as_much_and_a_window_as_much() -> None:
    assert KVCacheSpec(8, 128, 4).bytes_per_token == 2 * KVCacheSpec(8, 128, 2, window=4096).bytes_per_token == 8192


def test_blocks_are_what_weights_and_activations_leave() -> None:
    plan = make_plan(2 * GIB)
    assert plan.num_blocks == (512 * MIB) // 1_835_008 == 292
    assert plan.num_tokens == 4672


def test_what_a_gpu_needs_beside_them_is_taken_too_and_has_its_rows() -> None:
    plan = replace(make_plan(2 * GIB), buffers=1 * MIB, graphs=100 * MIB, libraries=27 * MIB)
    assert plan.taken == GIB + (512 + 128) * MIB
    assert plan.num_blocks == (384 * MIB) // 1_835_008 == 219
    assert [row[:2] for row in plan.rows()[3:6]] == [
        ("step buffers", "1.0 MiB"),
        ("CUDA graphs", "100.0 MiB"),
        ("libraries", "27.0 MiB"),
    ]


def test_no_budget_is_no_block_and_never_less() -> None:
    assert make_plan(1 * GIB).num_blocks == 0


def test_the_table_explains_every_figure() -> None:
    rows = make_plan(2 * GIB).rows()
    assert rows == [
        ("budget", "2.00 GiB", "what the engine may use"),
        ("weights", "1.00 GiB", "read once per step"),
        ("activations", "512.0 MiB", "the largest step's, kept free"),
        ("KV per token", "112.0 KiB", "2 x 28 layers x 8 KV heads x 128 x 2 bytes"),
        ("KV per block", "1.8 MiB", "16 tokens"),
        ("KV per sequence", "448.0 MiB", "of max_model_len=4096 tokens"),
        ("KV cache", "511.0 MiB", "292 blocks, 4672 tokens"),
        ("concurrency", "1.1x", "sequences of max_model_len that fit at once"),
    ]


def test_the_table_does_not_multiply_layers_of_different_shapes() -> None:
    specs = [KVCacheSpec(8, 128, 2), KVCacheSpec(1, 128, 2)]
    rows = MemoryPlan(GIB, 0, 0, specs, 16, 64).rows()
    assert ("KV per token", "4.5 KiB", "summed over 2 layers of different shapes") in rows


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(7, "7 B"), (1023, "1023 B"), (12 * 1024, "12.0 KiB"), (3 * MIB, "3.0 MiB"), (3 * GIB // 2, "1.50 GiB")],
)
def test_bytes_are_printed_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
