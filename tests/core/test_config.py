"""A setting that cannot work is refused in one line that names the setting to change."""

from __future__ import annotations

import pytest

from teachllm.config import EngineConfig


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": "int3"}, "dtype='int3': choose one of auto, float32, bfloat16, float16"),
        ({"load_format": "gguf"}, "load_format='gguf': choose one of auto, safetensors, pt, dummy"),
        ({"model_impl": "jax"}, "model_impl='jax': choose one of auto, teachllm, transformers"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo': choose one of fcfs, priority, static"),
        (
            {"attention_backend": "flash"},
            "attention_backend='flash': choose one of reference, triton, sdpa, flash_attn, flashinfer",
        ),
        (
            {"batch_invariant": True, "attention_backend": "sdpa"},
            "attention_backend='sdpa' has none: set attention_backend=triton, or batch_invariant=False",
        ),
        ({"block_size": 0}, "block_size=0: must be at least 1"),
        ({"max_model_len": 0}, "max_model_len=0: must be at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be at least 1"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens=-1: must be at least 1"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override=0: must be at least 1"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0: must be at least 1"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1: must be 0 or more"),
        (
            {"long_prefill_token_threshold": 8, "enable_chunked_prefill": False},
            "long_prefill_token_threshold=8 limits a chunk, and there are no chunks: set it to 0, or set "
            "enable_chunked_prefill=True and enable_kv_cache=True",
        ),
        (
            {"async_scheduling": True, "enable_kv_cache": False},
            "async_scheduling=True needs blocks that outlive a step: set it to False, or enable_kv_cache=True",
        ),
        ({"max_logprobs": -1}, "max_logprobs=-1: must be 0 or more"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5: must be in (0, 1]"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization=0.0: must be in (0, 1]"),
        (
            {"enable_kv_cache": False, "enable_prefix_caching": True},
            "enable_prefix_caching=True needs a KV cache: set it to False, or enable_kv_cache=True",
        ),
        (
            {"max_num_batched_tokens": 4, "max_num_seqs": 8},
            "raise the budget to 8, or set max_num_seqs=4",
        ),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 128},
            "set max_num_batched_tokens=128, or lower max_model_len",
        ),
        (
            {"enable_kv_cache": False, "max_num_batched_tokens": 64, "max_model_len": 128},
            "enable_kv_cache=False computes a whole prompt in one step",
        ),
        (
            {"block_size": 128, "max_model_len": 128, "enable_prefix_caching": True},
            "set enable_prefix_caching=False, or block_size=16",
        ),
    ],
)
def test_a_contradiction_is_one_line_that_names_the_fix(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as error:
        EngineConfig(**settings)  # type: ignore[arg-type]
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_left_open_is_filled_in_from_the_model() -> None:
    config = EngineConfig().resolve(4096)
    assert config.max_model_len == 4096
    assert config.max_num_batched_tokens == 2048
    assert config.max_num_seqs == 256
    assert config.enable_prefix_caching is True


def test_whole_prompts_get_a_budget_that_holds_them() -> None:
    assert EngineConfig(enable_chunked_prefill=False).resolve(4096).max_num_batched_tokens == 4096
    assert EngineConfig(enable_kv_cache=False).resolve(4096).max_num_batched_tokens == 4096


def test_more_sequences_raise_the_default_budget_and_a_small_budget_lowers_the_default_sequences() -> None:
    assert EngineConfig(max_num_seqs=3000).resolve(64).max_num_batched_tokens == 3000
    assert EngineConfig(max_num_batched_tokens=32).resolve(64).max_num_seqs == 32


@pytest.mark.parametrize("settings", [{"enable_kv_cache": False}, {"block_size": 64}], ids=["no cache", "contiguous"])
def test_prefix_caching_is_off_by_itself_where_it_is_impossible(settings: dict[str, object]) -> None:
    assert EngineConfig(**settings).resolve(64).enable_prefix_caching is False  # type: ignore[arg-type]


def test_a_contradiction_with_the_models_length_is_found_when_it_is_known() -> None:
    with pytest.raises(
        ValueError, match="max_model_len=128 is more than the model's context of 64: set max_model_len=64"
    ):
        EngineConfig(max_model_len=128).resolve(64)
    with pytest.raises(ValueError, match="enable_prefix_caching=False, or block_size=16"):
        EngineConfig(block_size=64, enable_prefix_caching=True).resolve(64)
    with pytest.raises(ValueError, match="set max_num_batched_tokens=64"):
        EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=32).resolve(64)


def test_a_configuration_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(AttributeError):
        EngineConfig().block_size = 32  # type: ignore[misc]
