"""What is predicted before a weight is read is what the GPU's own code allocates."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm import EngineConfig
from teachllm.core.memory import MemoryPlan
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import Ranks
from teachllm.layers.attention_backends import selection
from teachllm.loading.loader import new_module
from teachllm.models.model_config import load_model_config
from teachllm.models.own_model import model_of_rank
from teachllm.spec_decode.draft_model import DraftModel
from teachllm.spec_decode.eagle import Eagle, EagleHead
from teachllm.spec_decode.eagle_config import EagleConfig
from teachllm.spec_decode.load import load_drafter_config
from teachllm.spec_decode.tree import DraftTree
from teachllm.worker.gpu import memory_needs
from teachllm.worker.gpu.attention_inputs import GPUAttention
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.memory_needs import (
    activation_bytes,
    buffer_bytes,
    compare,
    graph_bytes,
    has_graphs,
    num_recordings,
    sampling_bytes,
    ungated_bytes,
)
from teachllm.worker.gpu.spec_decode.gpu_drafting import GPUDrafting
from teachllm.worker.kv_cache import (
    allocate_kv_cache,
    allocate_layers,
    attention_needs,
    drafter_needs,
    kv_cache_specs,
)
from teachllm_kernels.attention.decode_plan import DecodePlan
from teachllm_kernels.linear.hopper_gated_linear import FROM_ROWS
from tests.bench.h200_script import h200
from tests.distributed.one_of_two import OneOfTwo
from tests.live_bytes import LiveBytes
from tests.pairwise import pairwise
from tests.worker.gpu.imagined_gpu import NOWHERE, describe, fix_products, make_runner, quantize_weights


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3-0.6b", {}),
        ("qwen3-8b", {}),
        ("qwen3-0.6b", {"max_num_batched_tokens": 512}),  # where logits count for more than hidden states
        ("qwen3-0.6b", {"batch_invariant": True}),
    ],
    ids=["0.6B", "8B", "0.6B, few tokens", "0.6B, batch invariant"],
)
@pytest.mark.usefixtures("imagined_gpu")
def test_activations_and_weights_are_what_the_gpus_code_allocates(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    config, model = describe(name, tmp_path, **settings)
    runner = make_runner(config, model)
    fix_products(runner.model, config)
    tensors = [*runner.model.parameters(), *runner.model.buffers()]
    assert sum(tensor.nbytes for tensor in tensors) == model.weight_bytes
    caches = allocate_kv_cache(model, 1, config.block_size, NOWHERE)
    with LiveBytes() as live:
        held = runner._largest_step(caches, sampling_bytes(config, model))
    assert held[1].shape == (256, 151936)
    assert live.peak == pytest.approx(activation_bytes(config, model, NOWHERE), rel=1e-3)


@pytest.mark.usefixtures("imagined_gpu")
def test_a_model_whose_attention_is_wider_than_its_mlp_is_counted_too(tmp_path: Path) -> None:
    h200.SHAPES["narrow"] = h200.SHAPES["qwen3-0.6b"] | {"intermediate_size": 256, "num_hidden_layers": 3}
    try:
        config, model = describe("narrow", tmp_path, max_num_seqs=8)
    finally:
        del h200.SHAPES["narrow"]
    runner = make_runner(config, model)
    with LiveBytes() as live:
        runner._largest_step(allocate_kv_cache(model, 1, 16, NOWHERE), sampling_bytes(config, model))
    assert live.peak == pytest.approx(activation_bytes(config, model, NOWHERE), rel=1e-3)


# Of Qwen3-30B-A3B and Mixtral 8x7B, with fewer layers.
EXPERTS = {
    "many": {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128},
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 768, "hidden_size": 2048, "num_attention_heads": 32},
        **{"num_key_value_heads": 4, "num_hidden_layers": 3},
    },
    "large": {
        **{
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": 8,
            "hidden_size": 4096,
        },
        **{"num_experts_per_tok": 2, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"num_hidden_layers": 2},
    },
    "some layers": {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 128, "mlp_only_layers": [1], "num_hidden_layers": 3},
        **{"intermediate_size": 6144},
    },
}


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", list(EXPERTS))
@pytest.mark.usefixtures("imagined_gpu")
def test_experts_weights_and_activations_are_counted_too(
    name: str, batch_invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(h200.SHAPES, name, h200.SHAPES["qwen3-0.6b"] | EXPERTS[name])
    config, model = describe(name, tmp_path, max_num_seqs=8, batch_invariant=batch_invariant)
    runner = make_runner(config, model)
    fix_products(runner.model, config)
    tensors = [*runner.model.parameters(), *runner.model.buffers()]
    assert sum(tensor.nbytes for tensor in tensors) == model.weight_bytes
    with LiveBytes() as live:
        runner._largest_step(allocate_kv_cache(model, 1, 16, NOWHERE), sampling_bytes(config, model))
    assert live.peak == pytest.approx(activation_bytes(config, model, NOWHERE), rel=1e-3)


@pytest.mark.parametrize("name", list(EXPERTS))
@pytest.mark.usefixtures("imagined_hopper")
def test_experts_are_counted_on_hopper_as_elsewhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(h200.SHAPES, name, h200.SHAPES["qwen3-0.6b"] | EXPERTS[name])
    config, model = describe(name, tmp_path, max_num_seqs=8)
    runner = make_runner(config, model)
    with LiveBytes() as live:
        runner._largest_step(allocate_kv_cache(model, 1, 16, NOWHERE), sampling_bytes(config, model))
    assert live.peak == pytest.approx(activation_bytes(config, model, NOWHERE), rel=1e-3)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"])
@pytest.mark.usefixtures("imagined_hopper")
def test_on_hopper_gate_and_up_of_many_tokens_are_not_in_memory(name: str, tmp_path: Path) -> None:
    config, model = describe(name, tmp_path)
    assert config.max_num_batched_tokens
    runner = make_runner(config, model)
    caches = allocate_kv_cache(model, 1, config.block_size, NOWHERE)
    with LiveBytes() as live:
        runner._largest_step(caches, sampling_bytes(config, model))
    assert live.peak == pytest.approx(activation_bytes(config, model, NOWHERE), rel=1e-3)
    assert live.peak < 0.75 * config.max_num_batched_tokens * model.peak_width * 2


FEW = {"max_num_batched_tokens": 1024, "max_num_seqs": 8}


@pytest.mark.parametrize(
    "case",
    pairwise(method=[None, "fp8", "int8", "int4"], name=["qwen3-0.6b", "qwen3-8b"], settings=[{}, FEW]),
    ids=repr,
)
@pytest.mark.usefixtures("imagined_hopper", "few_layers")
def test_what_one_of_two_ranks_takes_is_predicted_too(case: dict[str, Any], tmp_path: Path) -> None:
    method = case["method"]
    config, whole = describe(case["name"], tmp_path, tensor_parallel_size=2, quantization=method, **case["settings"])
    place, group = Layout(2).coords(0), OneOfTwo()
    model = model_of_rank(whole, place)
    runner = make_runner(config, whole, ranks=Ranks(place, group, group, group))
    if method is not None:
        quantize_weights(runner.model)
    caches = allocate_kv_cache(model, 1, config.block_size, NOWHERE)
    with LiveBytes() as live:
        runner._largest_step(caches, sampling_bytes(config, model))
    assert live.peak == pytest.approx(activation_bytes(config, model, NOWHERE), rel=1e-3)


@pytest.mark.parametrize(
    "case", pairwise(method=["fp8", "int8", "int4"], name=["qwen3-0.6b", "qwen3-8b"], settings=[{}, FEW]), ids=repr
)
@pytest.mark.usefixtures("imagined_hopper", "few_layers")
def test_what_a_quantized_model_takes_is_predicted_too(case: dict[str, Any], tmp_path: Path) -> None:
    config, model = describe(case["name"], tmp_path, quantization=case["method"], **case["settings"])
    runner = make_runner(config, model)
    quantize_weights(runner.model)
    caches = allocate_kv_cache(model, 1, config.block_size, NOWHERE)
    with LiveBytes() as live:
        runner._largest_step(caches, sampling_bytes(config, model))
    assert live.peak == pytest.approx(activation_bytes(config, model, NOWHERE), rel=1e-3)


@pytest.mark.usefixtures("imagined_hopper")
def test_a_step_of_too_few_tokens_for_that_may_need_more(tmp_path: Path) -> None:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": FROM_ROWS + 2}
    config, model = describe("qwen3-8b", tmp_path, **settings)
    (tmp_path / "again").mkdir()
    fewer, _ = describe("qwen3-8b", tmp_path / "again", **settings | {"max_num_batched_tokens": FROM_ROWS - 1})
    caches = allocate_kv_cache(model, 1, config.block_size, NOWHERE)
    peaks = []
    for each in (config, fewer):
        runner = make_runner(each, model)
        with LiveBytes() as live:
            runner._largest_step(caches, 0)
        peaks.append(live.peak)
    assert peaks[0] < peaks[1] == pytest.approx(activation_bytes(config, model, NOWHERE), rel=1e-3)
    assert ungated_bytes(fewer, model, NOWHERE) == 0


@pytest.mark.usefixtures("imagined_gpu")
def test_buffers_are_those_of_the_runner(tmp_path: Path) -> None:
    config, model = describe("qwen3-8b", tmp_path)
    with LiveBytes() as live:
        kept = (DeviceBatch(256, 20480, 16, 16384 + 256, NOWHERE), DecodePlan.allocate(256, 32, 8, 128, NOWHERE))
    assert kept
    outputs = 4 * 4 * 256  # on the host
    assert buffer_bytes(config, model) == live.peak - outputs > 256 * 20480 * 4


def test_recordings_are_counted_by_the_largest_and_not_at_all_when_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model = describe("qwen3-8b", tmp_path)
    tensors = 512 * (2 * 128 + 2 * 4096 + 3 * 12288) * 2 + 256 * (4096 + 151936) * 2
    assert tensors < graph_bytes(config, model) < tensors + 400 * (1 << 20)
    monkeypatch.setattr(memory_needs, "_workspace_bytes", lambda device: 1000)
    needed = memory_needs.predict_needs(config, model, NOWHERE)
    for setting in ({"enforce_eager": True}, {"attention_backend": "flashinfer"}):
        without = memory_needs.predict_needs(replace(config, **setting), model, NOWHERE)
        kept = 128 << 20 if "attention_backend" in setting else 0  # flashinfer's workspace
        assert without["buffers"] == needed["buffers"] + kept
        assert without["graphs"] == 0 < needed["graphs"]
        assert without["libraries"] == needed["libraries"] - 1000


def test_every_size_of_every_kind_of_graph_is_counted() -> None:
    config = EngineConfig(device="cuda").resolve(4096)
    # Decodes of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... 256 sequences; 1 to 512 tokens, in 23 sizes, of 2, 4 or 8
    # sequences, of which at least 1, 2 or 4 are no padding and have a token each; and as many tokens of any.
    assert num_recordings(config) == 15 + (23 + 22 + 21) + 23
    small = replace(config, max_num_seqs=4, max_num_batched_tokens=4)
    assert num_recordings(small) == 3 + (3 + 2 + 1) + 3  # four prompts and the padding, of a token each


def test_only_backends_that_can_be_recorded_have_graphs() -> None:
    for name in selection._ON_A_GPU:
        assert has_graphs(EngineConfig(attention_backend=name)) == (name not in ("flash_attn", "flashinfer"))
    assert has_graphs(EngineConfig()) and has_graphs(EngineConfig(batch_invariant=True))
    assert not has_graphs(EngineConfig(enforce_eager=True))


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 2000, "max_num_seqs": 8}])
@pytest.mark.parametrize("method", ["eagle", "draft_model"])
@pytest.mark.usefixtures("imagined_gpu")
def test_a_drafters_activations_are_what_its_code_allocates(method: str, settings: dict[str, Any]) -> None:
    speculation = {"method": method, "model": f"teachlm-{method.removesuffix('_model')}"}
    options: dict[str, Any] = {"model": "teachlm", "device": "cuda", "dtype": "bfloat16"} | settings
    config = EngineConfig(speculative_config=speculation, **options)  # type: ignore[arg-type]
    model = load_model_config(config, "cuda")
    config = config.resolve(model.max_model_len)
    described = load_drafter_config(config, model, "cuda")
    assert described is not None and config.speculative_config is not None and config.max_num_batched_tokens
    runner = make_runner(config, model, DraftTree.of_config(config.speculative_config))
    caches = allocate_layers(described.specs, described.dtype, 1, config.block_size, NOWHERE)
    head, own = described.head, described.model
    if isinstance(head, EagleConfig):
        module: Any = new_module(lambda: EagleHead(head, own.max_model_len), NOWHERE, torch.bfloat16)
        drafter: Any = Eagle(module, runner.model, caches)
    else:
        module = make_runner(config, own).model
        drafter = DraftModel(module, caches, own.vocab_size, own.vocab_size)
    fix_products(module, config)
    needs = drafter_needs(described, attention_needs(config, model))
    attention_of = GPUAttention(needs, runner._backend, runner._batch, 2)
    rest = (model, runner._batch, None, attention_of)
    drafting: Any = GPUDrafting(config.speculative_config, drafter, described.tree, *rest)  # type: ignore[arg-type]
    hidden = torch.empty(config.max_num_batched_tokens, model.hidden_size, dtype=torch.bfloat16, device=NOWHERE)
    with torch.inference_mode(), LiveBytes() as live:
        drafting.largest_step(hidden)
    width = live.peak / (2 * config.max_num_batched_tokens)
    predicted = (
        described.head.peak_width(False) if isinstance(described.head, EagleConfig) else described.model.peak_width
    )
    assert width == pytest.approx(predicted, rel=2e-2)


def test_a_prediction_that_fails_is_said_in_one_line_and_a_good_one_is_not(tmp_path: Path) -> None:
    _, model = describe("qwen3-8b", tmp_path)
    plan = MemoryPlan(1 << 40, 16 << 30, 2 << 30, kv_cache_specs(model), 16, 4096)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(plan, {"weights": (16 << 30) + (500 << 20), "activations": (2 << 30) - (60 << 20)})
    with pytest.warns(UserWarning, match=r"activations take 1\.50 GiB instead of 2\.00 GiB; the KV cache gets") as said:
        compare(plan, {"weights": 16 << 30, "activations": 3 << 29})
    assert len(said) == 1 and "weights" not in str(said[0].message)
