"""A setting that cannot work is refused in one line that names the setting to change."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from teachllm.config import EngineConfig
from teachllm.speculative_config import SpeculativeConfig


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
        ({"dtype": ["half"]}, "dtype=['half']: choose one of auto"),
        ({"generation_config": None}, "generation_config=None: must be a text"),
        ({"model": 5}, "model=5: must be a text"),
        ({"max_logprobs": "5"}, "max_logprobs='5': must be a whole number"),
        ({"max_model_len": "128"}, "max_model_len='128': must be a whole number"),
        ({"max_model_len": 128.0}, "max_model_len=128.0: must be a whole number"),
        ({"max_num_seqs": True}, "max_num_seqs=True: must be a whole number"),
        ({"nnodes": None}, "nnodes=None: must be a whole number"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization='0.9': must be a number"),
        ({"trust_remote_code": "no"}, "trust_remote_code='no': must be True or False"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no': must be True or False"),
        ({"enforce_eager": 1}, "enforce_eager=1: must be True or False"),
        ({"hf_overrides": [1]}, 'hf_overrides=[1]: must be an object, like {"max_position_embeddings": 8192}'),
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
        ({"max_step_ms": 0.0}, "max_step_ms=0.0: must be above 0, and finite"),
        ({"max_step_ms": float("inf")}, "max_step_ms=inf: must be above 0, and finite"),
        ({"max_step_ms": float("nan")}, "max_step_ms=nan: must be above 0, and finite"),
        (
            {"max_step_ms": 20.0, "enable_chunked_prefill": False},
            "max_step_ms=20.0 limits a chunk, and there are no chunks: leave it out, or set "
            "enable_chunked_prefill=True and enable_kv_cache=True",
        ),
        (
            {"async_scheduling": True, "enable_kv_cache": False},
            "async_scheduling=True needs blocks that outlive a step: set it to False, or enable_kv_cache=True",
        ),
        (
            {"batch_invariant": True, "tensor_parallel_size": 4},
            "batch_invariant=True with tensor_parallel_size=4: in which order more than two ranks are added up depends",
        ),
        ({"nnodes": 0}, "nnodes=0: must be at least 1"),
        ({"master_port": 1 << 16}, "master_port=65536: must be in 0..65535"),
        (
            {"nnodes": 3, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "nnodes=3 machines cannot have as many ranks each: tensor_parallel_size=2 x pipeline_parallel_size=2 are 4",
        ),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2},
            "nnodes=2 is for the ranks of one engine, and data_parallel_size=2 are several engines: set it to 1",
        ),
        (
            {"distributed_executor_backend": "torchrun", "tensor_parallel_size": 2, "data_parallel_size": 2},
            "distributed_executor_backend=torchrun is for the ranks of one engine, and data_parallel_size=2 are",
        ),
        (
            {"distributed_executor_backend": "torchrun", "tensor_parallel_size": 2, "nnodes": 2},
            "nnodes=2 is for ranks that join, and torchrun starts all: leave nnodes out",
        ),
        ({"max_logprobs": -2}, "max_logprobs=-2: must be 0 or more"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5: must be in (0, 1]"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization=0.0: must be in (0, 1]"),
        (
            {"enable_kv_cache": False, "enable_prefix_caching": True},
            "enable_prefix_caching=True needs a KV cache: set it to False, or enable_kv_cache=True",
        ),
        (
            {"enable_kv_cache": False, "enable_prefix_caching": False, "kv_cache_dtype": "fp8"},
            "kv_cache_dtype='fp8' needs a KV cache: set it to 'auto', or enable_kv_cache=True",
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
        (
            {"speculative_config": {"method": "ngram"}, "enable_kv_cache": False},
            "needs cached tokens to verify drafts: leave it out, or set enable_kv_cache=True",
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 8}, "max_model_len": 8},
            "num_speculative_tokens=8 drafts more than a sequence of max_model_len=8 holds: draft less, or raise",
        ),
        ({"speculative_config": "ngram"}, 'speculative_config: must be an object like {"method": "ngram"}'),
        ({"speculative_config": {}}, "speculative_config lacks a method: choose one of ngram, draft_model, eagle"),
    ],
)
def test_a_contradiction_is_one_line_that_names_the_fix(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as error:
        EngineConfig(**settings)  # type: ignore[arg-type]
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"method": "lookahead"}, "method='lookahead': choose one of ngram, draft_model, eagle, medusa, custom"),
        ({"method": 3}, "method=3 must be of type str"),
        ({"method": None}, "method=None must be of type str"),
        ({"method": "ngram", "num_tokens": 3}, "has no 'num_tokens', only method, num_speculative_tokens, model"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0: must be from 1 to 16"),
        ({"method": "ngram", "num_speculative_tokens": 17}, "num_speculative_tokens=17: must be from 1 to 16"),
        ({"method": "ngram", "num_speculative_tokens": "3"}, "num_speculative_tokens='3' must be of type int"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens=True must be of type int"),
        ({"method": "ngram", "num_speculative_tokens": 2.0}, "num_speculative_tokens=2.0 must be of type int"),
        ({"method": "ngram", "adaptive": 1}, "adaptive=1 must be of type bool"),
        ({"method": "draft_model"}, 'method=\'draft_model\' needs a model: add "model": "..."'),
        ({"method": "eagle3"}, "method='eagle' needs a model"),
        ({"method": "medusa", "model": None}, "method='medusa' needs a model"),
        ({"method": "ngram", "model": "teachlm-draft"}, "has no model: leave model='teachlm-draft' out"),
        ({"method": "custom", "model": "x"}, "method='custom' has no model: leave model='x' out"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min=0, prompt_lookup_max=4: the first must be"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "no more than the second"),
        ({"method": "ngram", "rejection_sample_method": "fast"}, "='fast': choose standard or synthetic"),
        ({"method": "ngram", "synthetic_acceptance_rate": 1.5}, "synthetic_acceptance_rate=1.5: must be in [0, 1]"),
        ({"method": "ngram", "synthetic_acceptance_rate": "1"}, "synthetic_acceptance_rate='1' must be of type float"),
        ({"method": "ngram", "speculative_token_tree": "[(0,)]"}, "method='ngram' drafts no trees: leave"),
    ],
)
def test_a_speculative_setting_that_cannot_work_is_one_line_that_names_it(given: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as error:
        EngineConfig(model="some/model", speculative_config=given)  # type: ignore[arg-type]
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ("(0,", "is no list of paths: give paths like '[(0,), (1,), (0, 0)]'"),
        ("__import__('os')", "is no list of paths"),
        ("5", "is no list of paths"),
        ("[]", "is no list of paths"),
        ("[()]", "is no list of paths"),
        ("[(0,), (-1,)]", "is no list of paths"),
        ("[(0,), (True,)]", "is no list of paths"),
        ("['00']", "is no list of paths"),
        ("[" * 100_000, "is no list of paths"),
        ("-" * 100_000 + "1", "is no list of paths"),
        ("[(0,), (0,), (0, 0)]", "names a path twice"),
        ("[(0,), (1, 0)]", "has (1, 0) without (1,), which comes before it"),
        ("[(0,), (2,), (0, 0)]", "has (2,) without (1,), which comes before it"),
        (
            "[(0,), (1,), (2,)]",
            "is 1 deep: set num_speculative_tokens to that, not to 2 (or to its number of",
        ),
        ("[(0,), (0, 0), (0, 0, 0)]", "is 3 deep: set num_speculative_tokens to that, not to 2"),
    ],
)
def test_what_is_no_tree_of_drafts_is_refused_in_one_line(tree: str, says: str) -> None:
    with pytest.raises(ValueError) as error:
        SpeculativeConfig(method="eagle", model="x", num_speculative_tokens=2, speculative_token_tree=tree)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_the_paths_of_a_tree_come_level_by_level_the_better_first() -> None:
    tree = "[(0, 1), (1, 0), (0,), (0, 0), (1,)]"
    config = SpeculativeConfig(method="medusa", model="x", num_speculative_tokens=2, speculative_token_tree=tree)
    assert config.tree == ((0,), (1,), (0, 0), (0, 1), (1, 0))
    assert SpeculativeConfig(method="medusa", model="x").tree is None


def test_a_speculative_config_is_the_same_as_a_dictionary_and_as_an_object() -> None:
    given = {"method": "eagle3", "model": "teachlm-eagle", "num_speculative_tokens": 1, "revision": None}
    config = EngineConfig(speculative_config=given)  # type: ignore[arg-type]
    assert config.speculative_config == SpeculativeConfig(
        method="eagle", model="teachlm-eagle", num_speculative_tokens=1
    )
    assert EngineConfig(speculative_config=config.speculative_config) == config


def test_drafting_as_many_tokens_as_a_sequence_holds_is_refused_when_the_models_length_is_known() -> None:
    config = EngineConfig(speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=16))
    assert config.resolve(17).max_model_len == 17
    with pytest.raises(ValueError, match="drafts more than a sequence of max_model_len=16 holds"):
        config.resolve(16)


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


def test_objects_of_any_mapping_are_settings_that_another_process_can_be_told() -> None:
    config = EngineConfig(hf_overrides=MappingProxyType({"rope_theta": 5.0}))  # type: ignore[arg-type]
    assert config.hf_overrides == {"rope_theta": 5.0} and type(config.hf_overrides) is dict


def test_a_drafter_s_model_that_is_none_is_the_embedded_one() -> None:
    config = EngineConfig(model="teachlm", speculative_config={"method": "medusa", "model": None})  # type: ignore[arg-type]
    assert config.speculative_config is not None and config.speculative_config.model == "teachlm-medusa"
