"""Bytes, FLOPs and the floor of a step, against numbers worked out by hand and the limits the peers were held to."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from teachllm import LLM, EngineConfig
from teachllm.bench.batch import Batch, run_batch
from teachllm.bench.floor import floor_seconds, schedule
from teachllm.bench.workloads import WORKLOADS
from teachllm.models.model_config import ModelConfig, load_model_config
from teachllm.roofline import Ceilings, StepShape, Work, step_work
from teachllm_kernels.attention import paged_attention
from teachllm_kernels.linear import dense_gemm
from tests.bench.h200_script import h200

H200 = Ceilings("NVIDIA H200", "bfloat16", 4.18e12, 4.26e12, 690e12, 579e12)
CASES = [
    (model, workload, figure)
    for model, workloads in h200.PEERS["models"].items()
    for workload, figures in workloads.items()
    for figure, peer in figures.items()
    if peer["limit"] is not None
]


@pytest.fixture
def model(tmp_path: Path):
    """A model by its name in the benchmark, described on a GPU."""

    @cache
    def load(name: str) -> ModelConfig:
        folder = h200.write_shape(name, tmp_path)
        return load_model_config(EngineConfig(model=str(folder), load_format="dummy"), "cuda")

    return load


def weights_read(model: ModelConfig) -> int:
    """Bytes that a step reads before its first token."""
    return step_work(model, StepShape([], [], num_sampled=1)).num_bytes


def test_a_token_writes_k_and_v_of_every_layer(model) -> None:
    for name, num_bytes in (("qwen3-0.6b", 114_688), ("qwen3-8b", 147_456)):
        assert (
            step_work(model(name), StepShape([1], [1], num_sampled=1)).num_bytes - weights_read(model(name))
            == num_bytes
        )


def test_decode_at_batch_1_reads_every_weight_but_the_looked_up_embedding(model) -> None:
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert weights_read(model("qwen3-8b")) == 2 * (36 * layer + 4096 + 151936 * 4096) == 15_136_811_008
    work = step_work(model("qwen3-8b"), StepShape([1], [1], num_sampled=1))
    assert work.num_bytes == 15_136_811_008 + 147_456
    assert work.seconds(H200) == pytest.approx(3.62e-3, abs=0.005e-3)
    small = model("qwen3-0.6b")
    assert weights_read(small) == 2 * small.num_parameters == 1_192_099_840  # tied: the embedding is the head


@pytest.mark.parametrize(("quantization", "counts"), [(None, 1.0), ("int4", 1.0), ("fp8", 0.5), ("int8", 0.5)])
def test_products_of_codes_take_half_as_long(tmp_path: Path, quantization: str | None, counts: float) -> None:
    settings = {"load_format": "dummy", "dtype": "bfloat16", "quantization": quantization}
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    found = load_model_config(EngineConfig(model=str(tmp_path), **settings), "cuda")
    ceilings = Ceilings("", "", read_bandwidth=1e30, copy_bandwidth=1.0, gemm_flops=1.0, attention_flops=1e30)
    work = step_work(found, StepShape([40], [40], num_sampled=40))
    assert work.matrix_flops == 2 * 40 * (found.num_active_parameters + 500 * 64)
    codes = 2 * 40 * 3 * DENSE_PROJECTIONS
    assert work.seconds(ceilings) == pytest.approx(work.matrix_flops - (1 - counts) * codes)


# Between embedding and head of a GPT-2 with two layers of 64 features: attention and MLP with biases, norms.
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 5000}
GPT2 |= {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
GPT2_BODY = 2 * (12 * 64 * 64 + (3 + 1 + 4 + 1) * 64 + 4 * 64) + 2 * 64
# Three layers with eight experts; their attention without norms of heads.
SPARSE = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3}
SPARSE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None}
SPARSE_ATTENTION, EXPERT = 64 * (4 + 2 + 2) * 16 + 4 * 16 * 64, 3 * 64 * 32
QWEN3_MOE = SPARSE | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 32}
QWEN3_MOE |= {"num_experts": 8, "num_experts_per_tok": 2}
ARIA = SPARSE | {"architectures": ["AriaTextForCausalLM"], "model_type": "aria_text", "moe_num_experts": 8}
ARIA |= {"moe_topk": 2, "moe_num_shared_experts": 1}


DENSE = SPARSE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
DENSE_PROJECTIONS = SPARSE_ATTENTION + 3 * 64 * 32


def describe(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    """A model by its config.json, in bfloat16."""
    (folder / "config.json").write_text(json.dumps(raw))
    return load_model_config(EngineConfig(model=str(folder), load_format="dummy", dtype="bfloat16"), "cuda")


@pytest.mark.parametrize(("key", "tied"), [({}, True), ({"tie_word_embeddings": False}, False)])
def test_through_transformers_a_key_that_is_absent_means_what_it_means_there(
    tmp_path: Path, key: dict[str, Any], tied: bool
) -> None:
    found = describe(tmp_path, GPT2 | key)
    assert (found.tied, found.num_active_parameters) == (tied, GPT2_BODY)
    assert found.num_parameters == GPT2_BODY + (5000 * (1 if tied else 2) + 128) * 64
    work = step_work(found, StepShape([1], [1], num_sampled=1))
    assert work.num_bytes == 2 * (GPT2_BODY + 5000 * 64 + 2 * 2 * 64)  # positions are looked up by rows too
    assert work.matrix_flops == 2 * (GPT2_BODY + 5000 * 64)


def test_of_a_mixture_of_experts_a_step_reads_and_computes_no_more_than_one_token_meets(tmp_path: Path) -> None:
    body = 3 * (SPARSE_ATTENTION + 2 * 16 + 2 * 64 + 8 * 64 + 2 * EXPERT) + 64  # with norms and the router
    found = describe(tmp_path, QWEN3_MOE)
    assert found.num_parameters == body + 3 * 6 * EXPERT + 2 * 500 * 64
    for num_tokens in (1, 40):
        work = step_work(found, StepShape([1] * num_tokens, [1] * num_tokens, num_tokens))
        assert work.num_bytes == 2 * (body + 500 * 64) + num_tokens * 3 * 2 * 2 * 16 * 2
        assert work.matrix_flops == 2 * num_tokens * (body + 500 * 64)


def test_one_expert_counts_where_a_config_has_its_own_word_for_how_many_a_token_gets(tmp_path: Path) -> None:
    body = 3 * (SPARSE_ATTENTION + 2 * 64 + 8 * 64 + EXPERT + EXPERT) + 64  # one of eight, and the one all share
    assert describe(tmp_path, ARIA).num_active_parameters == body


def test_a_step_that_samples_nothing_leaves_the_head_alone(model) -> None:
    samples, chunk = (step_work(model("qwen3-8b"), StepShape([64], [64], num_sampled=n)) for n in (1, 0))
    assert samples.num_bytes - chunk.num_bytes == 2 * 151936 * 4096
    layer = (weights_read(model("qwen3-8b")) // 2 - 151936 * 4096) / 36
    assert samples.matrix_flops - chunk.matrix_flops == pytest.approx(2 * (151936 * 4096 + layer), rel=1e-6)


def test_of_the_last_layer_only_sampled_tokens_are_computed(model) -> None:
    whole = model("qwen3-8b")
    most, one = (step_work(whole, StepShape([64], [64], num_sampled=n)) for n in (64, 1))
    head = 2 * 151936 * 4096
    assert (one.matrix_flops - head) / (most.matrix_flops - 64 * head) == pytest.approx((35 + 1 / 64) / 36, rel=1e-6)
    assert one.attention_flops / most.attention_flops == pytest.approx((35 + 1 / 64) / 36, rel=1e-6)
    assert one.num_bytes == most.num_bytes


def test_flops_are_those_of_the_kernels(model) -> None:
    small, query_lens, kv_lens = model("qwen3-0.6b"), [1, 7, 100], [300, 7, 228]
    work = step_work(small, StepShape(query_lens, kv_lens, num_sampled=108))  # one of each token
    attention = paged_attention.cost(query_lens, kv_lens, 16, 8, 128)[1]
    assert work.attention_flops == 28 * attention
    products = [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)]  # qkv, o, gate and up, down
    matrices = 28 * sum(dense_gemm.cost(108, *shape)[1] for shape in products) + dense_gemm.cost(108, 1024, 151936)[1]
    assert work.matrix_flops == pytest.approx(matrices, rel=1e-3)  # the norms' weights count as if multiplied


def test_keys_that_lie_before_the_window_cost_nothing(model) -> None:
    whole = model("qwen3-0.6b")
    windowed = replace(whole, windows=(16,) * 14 + (None,) * 14)
    step = StepShape([3, 20], [50, 20], num_sampled=23)
    seen = [min(position + 1, 16) for kv, n in ((50, 3), (20, 20)) for position in range(kv - n, kv)]
    everything = [position + 1 for kv, n in ((50, 3), (20, 20)) for position in range(kv - n, kv)]
    assert step_work(windowed, step).attention_flops == 14 * 4 * 16 * 128 * (sum(seen) + sum(everything))
    kv_bytes = step_work(windowed, step).num_bytes - weights_read(whole)
    assert kv_bytes == 14 * 4096 * ((23 + 15) + (23 + 47))  # tokens written, and old keys in reach


def test_a_shared_prefix_is_read_once(model) -> None:
    small = model("qwen3-0.6b")
    apart, together = (step_work(small, StepShape([1] * 64, [4200] * 64, 64, num_shared=n)) for n in (0, 4096))
    assert apart.num_bytes - together.num_bytes == 63 * 4096 * 114_688
    assert apart.attention_flops == together.attention_flops


def test_no_more_is_read_than_the_blocks_in_use_hold(model) -> None:
    small = model("qwen3-0.6b")
    apart, shared, roomy = (
        step_work(small, StepShape([1] * 64, [4200] * 64, 64, num_held=n)) for n in (None, 5000, 300_000)
    )
    assert apart == roomy
    assert apart.num_bytes - shared.num_bytes == (64 * 4199 - 5000) * 114_688


def test_a_step_takes_the_longer_of_moving_and_computing() -> None:
    ceilings = Ceilings("", "", read_bandwidth=100.0, copy_bandwidth=1.0, gemm_flops=10.0, attention_flops=5.0)
    assert Work(num_bytes=100, matrix_flops=4, attention_flops=2).seconds(ceilings) == 1.0
    assert Work(num_bytes=100, matrix_flops=8, attention_flops=2).seconds(ceilings) == pytest.approx(1.2)


def test_steps_give_everyone_past_its_prompt_a_token_and_prompts_the_rest() -> None:
    steps = schedule(Batch([[0] * 5, [0] * 3], [2, 3]), token_budget=4, max_num_seqs=2)
    assert [(list(s.query_lens), list(s.kv_lens), s.num_sampled) for s in steps] == [
        ([4], [4], 0),
        ([1, 3], [5, 3], 2),
        ([1, 1], [6, 4], 2),
        ([1], [5], 1),
    ]


def test_steps_are_those_the_engine_takes() -> None:
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 3, "max_model_len": 64, "enable_prefix_caching": False}
    llm = LLM("teachlm", load_format="dummy", device="cpu", skip_tokenizer_init=True, **settings)
    plans, make_plan = [], llm.engine.core.scheduler.schedule

    def recorded():
        plan = make_plan()
        plans.append(sorted((share.num_tokens, share.start + share.num_tokens) for share in plan.scheduled))
        return plan

    llm.engine.core.scheduler.schedule = recorded
    batch = Batch([[7] * n for n in (20, 3, 9, 30, 1)], [4, 6, 1, 3, 5])
    run_batch(llm, batch)
    steps = schedule(batch, token_budget=16, max_num_seqs=3)
    assert [sorted(zip(s.query_lens, s.kv_lens, strict=True)) for s in steps] == [plan for plan in plans if plan]


@pytest.mark.parametrize(("name", "workload", "figure"), CASES)
def test_the_limits_of_the_peers_table_come_out(model, name: str, workload: str, figure: str) -> None:
    """With every prompt in one step, as those limits assume; figures are given to two or three digits."""
    wanted = h200.PEERS["models"][name][workload][figure]["limit"]
    low, high = wanted if isinstance(wanted, list) else (wanted, wanted)

    def clock(batch: Batch) -> float:
        return floor_seconds(model(name), schedule(batch, 1 << 30, 256), H200)

    found = WORKLOADS[workload](clock, 151936, 0)[figure]
    # Those limits count the last layer in full, for tokens that sample nothing too: up to a 28th or a 36th more.
    spared = 1 - 1 / model(name).num_layers
    low, high = (low, high / spared) if figure.endswith("tok_s") else (low * spared, high)
    assert 0.99 * low <= found <= 1.01 * high, json.dumps([name, workload, figure, found])
