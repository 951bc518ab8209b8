"""The arithmetic of KV memory, by hand for models people know."""

from __future__ import annotations

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
    plan.check()


def test_no_budget_is_no_block_and_never_less() -> None:
    assert make_plan(1 * GIB).num_blocks == 0


def test_the_table_explains_every_figure() -> None:
    rows = make_plan(2 * GIB).rows()
    assert rows == [
        ("budget", "2.00 GiB", "what the engine may use"),
        ("weights", "1.00 GiB", "read once a step"),
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


def test_too_little_memory_is_refused_with_the_table_and_the_largest_length_that_fits() -> None:
    with pytest.raises(ValueError) as error:
        make_plan(2 * GIB, max_model_len=8192).check()
    first, *table = str(error.value).splitlines()
    assert first == (
        "the KV cache would hold 4672 tokens, less than one sequence of max_model_len=8192: "
        "set max_model_len=4672 or less, or give it more memory"
    )
    assert len(table) == 8
    assert table[1].split() == ["weights", "1.00", "GiB", "read", "once", "a", "step"]


def test_no_length_is_advised_when_none_fits() -> None:
    with pytest.raises(ValueError, match=r"max_model_len=4096: give it more memory\n"):
        make_plan(1 * GIB).check()


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(7, "7 B"), (1023, "1023 B"), (12 * 1024, "12.0 KiB"), (3 * MIB, "3.0 MiB"), (3 * GIB // 2, "1.50 GiB")],
)
def test_bytes_are_printed_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
