"""What is predicted before a weight is read is what the GPU's own code allocates, and what a GPU then uses."""

from __future__ import annotations

import gc
import random
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from teachllm import LLM, EngineConfig, SamplingParams
from teachllm.bench.batch import Batch, random_ids, run_batch
from teachllm.core.memory import MemoryPlan, NotEnoughMemoryError
from teachllm.core.scheduler_output import NewRow
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import ALONE, Ranks
from teachllm.layers import attention
from teachllm.layers.attention_backends import selection
from teachllm.layers.attention_backends.triton import TritonBackend
from teachllm.layers.dense_weight import DenseWeight
from teachllm.layers.embedding import Embedding
from teachllm.layers.linear import Linear
from teachllm.layers.moe import Experts
from teachllm.models.llama import LlamaForCausalLM
from teachllm.models.llama_config import parse
from teachllm.models.loader import finish, new_module
from teachllm.models.model_config import ModelConfig, load_model_config
from teachllm.models.model_of_rank import model_of_rank
from teachllm.quantization import gpu_scaled_weight
from teachllm.quantization.formats.scheme import UNQUANTIZED
from teachllm.quantization.layer_schemes import on_the_fly
from teachllm.sampling.sampler import Sampler
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.spec_decode.draft_model import DraftModel
from teachllm.spec_decode.eagle import Eagle, EagleHead
from teachllm.spec_decode.eagle_config import EagleConfig
from teachllm.spec_decode.load import load_drafter_config
from teachllm.spec_decode.tree import DraftTree
from teachllm.worker.gpu import memory_needs
from teachllm.worker.gpu.attention_inputs import GPUAttention
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.gpu_model_runner import GPUModelRunner
from teachllm.worker.gpu.gpu_sampling import GPUSampling
from teachllm.worker.gpu.launched_step import logprobs_of
from teachllm.worker.gpu.memory_needs import (
    SAMPLED_AT_ONCE,
    activation_bytes,
    buffer_bytes,
    compare,
    graph_bytes,
    has_graphs,
    num_recordings,
    sampling_bytes,
    ungated_bytes,
)
from teachllm.worker.kv_cache import (
    allocate_kv_cache,
    allocate_layers,
    attention_needs,
    drafter_needs,
    kv_cache_specs,
    plan_memory,
)
from teachllm.worker.prompt_logprobs import PromptLogprobs
from teachllm.worker.spec_decode.gpu_drafting import GPUDrafting
from teachllm_kernels import _triton, rms_norm, silu_and_mul
from teachllm_kernels.attention import rope_kv_write
from teachllm_kernels.attention.decode_plan import DecodePlan
from teachllm_kernels.linear import batch_invariant_gemm, hopper_gated_linear, hopper_linear
from teachllm_kernels.linear.hopper_gated_linear import FROM_ROWS
from teachllm_kernels.linear.packed import dequantize
from teachllm_kernels.linear.scaled import hopper_scaled_mm, quantize_rows
from teachllm_kernels.moe import grouped_gemm, moe_routing
from teachllm_kernels.sampling import random_sample
from tests.bench.h200_script import h200
from tests.distributed.one_of_two import OneOfTwo
from tests.live_bytes import LiveBytes
from tests.thorough import THOROUGH

NOWHERE = torch.device("meta")


class NoLaunch:
    """Stands for a kernel where there is no GPU: what is allocated around it is what counts here."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


@pytest.fixture
def imagined_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that have shapes and no memory, and say that they are on a GPU."""
    for module in (batch_invariant_gemm, rms_norm, rope_kv_write, silu_and_mul, grouped_gemm):
        monkeypatch.setattr(module, f"_{module.__name__.rpartition('.')[2]}", NoLaunch())
    for kernel in ("_route", "_group", "_combine"):
        monkeypatch.setattr(moe_routing, kernel, NoLaunch())
    monkeypatch.setattr(_triton, "_has_pdl", lambda device: False)
    monkeypatch.setattr(DeviceBatch, "_on_host", lambda self, count: torch.empty(count, dtype=torch.int32))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(attention, "borrowed", lambda tensor: tensor)


def describe(name: str, folder: Path, **settings: Any) -> tuple[EngineConfig, ModelConfig]:
    """A benchmark's model on a GPU with the benchmark's settings."""
    config = EngineConfig(**h200.engine_settings(h200.write_shape(name, folder), "cuda") | settings)
    model = load_model_config(config, "cuda")
    return config.resolve(model.max_model_len), model


def make_runner(config: EngineConfig, model: ModelConfig, tree: DraftTree | None = None, ranks: Ranks = ALONE) -> Any:
    """A runner as far as its largest step goes."""
    assert config.max_num_seqs and config.max_model_len and config.max_num_batched_tokens
    runner: Any = GPUModelRunner.__new__(GPUModelRunner)
    runner._device, runner._backend = NOWHERE, TritonBackend()
    runner._ranks, runner._columns = ranks, Columns(model.vocab_size, ranks.tensor)
    sizes = (config.max_num_seqs, config.max_model_len, config.block_size, config.max_num_batched_tokens)
    runner._batch = DeviceBatch(*sizes, NOWHERE, tree)
    runner._attention = GPUAttention(attention_needs(config, model), runner._backend, runner._batch, 1)
    runner._drafting = None
    schemes = UNQUANTIZED if config.quantization is None else on_the_fly(config.quantization).schemes
    shape, length = parse(model.raw), model.max_model_len
    runner.model = new_module(lambda: LlamaForCausalLM(shape, length, schemes, ranks), NOWHERE, torch.bfloat16)
    return runner


def quantize_weights(model: torch.nn.Module) -> None:
    """As the loader does of what it has read."""
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.fill_randomly(None)
    finish(model, NOWHERE)


def fix_products(model: torch.nn.Module, config: EngineConfig) -> None:
    """As the loader does, if they are to be."""
    for module in model.modules():
        if isinstance(module, DenseWeight | Embedding | Experts):
            module.is_fixed = config.batch_invariant


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


@pytest.mark.parametrize("settings", [{}, {"batch_invariant": True}], ids=["fastest", "batch invariant"])
@pytest.mark.parametrize("name", list(EXPERTS))
@pytest.mark.usefixtures("imagined_gpu")
def test_experts_weights_and_activations_are_counted_too(
    name: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(h200.SHAPES, name, h200.SHAPES["qwen3-0.6b"] | EXPERTS[name])
    config, model = describe(name, tmp_path, max_num_seqs=8, **settings)
    runner = make_runner(config, model)
    fix_products(runner.model, config)
    tensors = [*runner.model.parameters(), *runner.model.buffers()]
    assert sum(tensor.nbytes for tensor in tensors) == model.weight_bytes
    with LiveBytes() as live:
        runner._largest_step(allocate_kv_cache(model, 1, 16, NOWHERE), sampling_bytes(config, model))
    assert live.peak == pytest.approx(activation_bytes(config, model, NOWHERE), rel=1e-3)


@pytest.fixture
def imagined_hopper(imagined_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hopper_linear, memory_needs, gpu_scaled_weight):
        monkeypatch.setattr(module, "has_hopper", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for module in (hopper_gated_linear, hopper_scaled_mm, quantize_rows, dequantize):
        monkeypatch.setattr(module, f"_{module.__name__.rpartition('.')[2]}", NoLaunch())


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


@pytest.fixture
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizing all of them takes longest, and what a step holds does not depend on it."""
    for name in () if THOROUGH else ("qwen3-0.6b", "qwen3-8b"):
        monkeypatch.setitem(h200.SHAPES, name, h200.SHAPES[name] | {"num_hidden_layers": 4})


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 1024, "max_num_seqs": 8}], ids=["many", "few"])
@pytest.mark.parametrize("method", [None, "fp8", "int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"])
@pytest.mark.usefixtures("imagined_hopper", "few_layers")
def test_what_one_of_two_ranks_takes_is_predicted_too(
    name: str, method: str | None, settings: dict[str, Any], tmp_path: Path
) -> None:
    config, whole = describe(name, tmp_path, tensor_parallel_size=2, quantization=method, **settings)
    place, group = Layout(2).coords(0), OneOfTwo()
    model = model_of_rank(whole, place)
    runner = make_runner(config, whole, ranks=Ranks(place, group, group, group))
    if method is not None:
        quantize_weights(runner.model)
    caches = allocate_kv_cache(model, 1, config.block_size, NOWHERE)
    with LiveBytes() as live:
        runner._largest_step(caches, sampling_bytes(config, model))
    assert live.peak == pytest.approx(activation_bytes(config, model, NOWHERE), rel=1e-3)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"])
@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 1024, "max_num_seqs": 8}], ids=["many", "few"])
@pytest.mark.usefixtures("imagined_hopper", "few_layers")
def test_what_a_quantized_model_takes_is_predicted_too(
    settings: dict[str, Any], method: str, name: str, tmp_path: Path
) -> None:
    config, model = describe(name, tmp_path, quantization=method, **settings)
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


def test_sampling_with_every_parameter_stays_within_its_bound() -> None:
    vocab_size, num_rows, max_len = 20000, 8, 300
    sampler = Sampler(num_rows, vocab_size, torch.device("cpu"))
    params = SamplingParams(
        **{"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "logprobs": 5},
        **{"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    )
    sampler.open_rows([(row, NewRow([1, 2], 2, params, 0, 3, frozenset(), ())) for row in range(num_rows)])
    logits, lengths = torch.randn(num_rows, vocab_size), torch.full((num_rows,), max_len)
    token_ids = torch.zeros(num_rows, max_len, dtype=torch.int32)
    with LiveBytes() as live:
        sampler.sample(logits + 0, list(range(num_rows)), lengths, token_ids)
    bound = num_rows * (memory_needs._LOGITS_COPIES * 4 * vocab_size + memory_needs._BYTES_OF_HISTORY * max_len)
    assert 0.7 * bound < live.peak < bound


def test_scoring_a_prompt_stays_within_the_bound_of_sampling_even_for_one_request() -> None:
    vocab_size, num_tokens = 20000, 2 * SAMPLED_AT_ONCE
    config, model_config = EngineConfig(device="cuda", max_num_seqs=1).resolve(300), SimpleNamespace(vocab_size=20000)
    head = torch.randn(vocab_size, 8)
    scores = PromptLogprobs(lambda hidden: (hidden @ head.T).float(), Sampler(1, vocab_size, torch.device("cpu")))
    token_ids = torch.zeros(1, 300, dtype=torch.int32)
    row = NewRow([1] * num_tokens, num_tokens, SamplingParams(prompt_logprobs=5), 0, 0, frozenset(), ())
    scores.open_rows([(0, row)])
    share: Any = SimpleNamespace(start=0, num_tokens=num_tokens)
    with LiveBytes() as live:
        (entries,) = scores.score([share], [0], [0], torch.randn(num_tokens, 8), token_ids)
    assert entries is not None and len(entries) == num_tokens - 1
    bound = sampling_bytes(config, model_config)  # type: ignore[arg-type]
    assert 0.9 * bound < live.peak < bound


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


@pytest.mark.parametrize("num_rows", [1, 3, 256])
def test_the_samplers_workspaces_are_counted(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    monkeypatch.setattr(random_sample, "_scan", NoLaunch())
    monkeypatch.setattr(random_sample, "_pick", NoLaunch())
    logits = torch.empty(num_rows, 151936, device=NOWHERE)
    floats, ints = torch.empty(num_rows, 3, device=NOWHERE), torch.empty(num_rows, 4, device=NOWHERE).long()
    rows = torch.zeros(num_rows, dtype=torch.int32, device=NOWHERE)
    heat, top_p, min_p = floats.unbind(1)
    top_k, seed, child, index = ints.unbind(1)
    with LiveBytes() as live:
        sampled = random_sample.sample_triton(
            *(logits, rows, heat, top_k, top_p, min_p, seed, child, index), any_random=True, any_filtered=True
        )
    assert sampled.shape == (num_rows,)
    assert (
        0.9 * random_sample.workspace_bytes(num_rows, 151936)
        < live.peak
        <= random_sample.workspace_bytes(num_rows, 151936)
    )


def test_rows_that_ask_for_more_are_sampled_a_few_at_a_time_and_get_what_they_would_together() -> None:
    num_rows, vocab_size, cpu = 2 * SAMPLED_AT_ONCE + 5, 300, torch.device("cpu")
    batch = DeviceBatch(num_rows, 40, 16, num_rows, cpu)
    sampler = Sampler(num_rows, vocab_size, cpu)
    for row in range(num_rows):
        params = SamplingParams(temperature=0.9, presence_penalty=0.5, top_k=50, logprobs=row % 3 or None)
        sampler.open_rows([(row, NewRow([row, 2], 2, params, 0, row, frozenset(), ()))])
    batch.positions.fill_(1)
    batch.sample_rows[:num_rows] = torch.arange(num_rows - 1, -1, -1)
    rows, logits = list(range(num_rows - 1, -1, -1)), torch.randn(num_rows, vocab_size)
    together = sampler.sample(logits.clone(), rows, torch.full((num_rows,), 2), batch.token_ids)
    outputs = GPUSampling(batch, sampler, None, None, Columns(vocab_size)).any(
        logits.clone(), rows, num_rows, [0] * num_rows
    )
    ids = torch.cat([output.token_ids for output in outputs])
    logprobs = logprobs_of(outputs)
    assert logprobs is not None and ids.equal(together.token_ids) and logprobs == together.logprobs
    assert batch.token_ids[rows, batch.num_known[rows] - 1].equal(ids.int())
    assert len({*ids.tolist()}) > 10 and sum(entry is None for entry in logprobs) == len(range(0, num_rows, 3))


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["draft_model", "eagle", "medusa"])
def test_the_embedded_drafters_take_what_was_predicted(method: str) -> None:
    speculation = {"method": method, "model": f"teachlm-{method.removesuffix('_model')}"}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="memory is not as predicted")
        LLM("teachlm", device="cuda", speculative_config=speculation, gpu_memory_utilization=0.3).close()


@pytest.mark.gpu
def test_an_engine_that_was_closed_leaves_its_memory_to_the_next(tmp_path: Path) -> None:
    h200.write_shape("qwen3-0.6b", tmp_path)
    num_blocks = list[int]()
    gc.collect()
    gc.disable()  # what refers to itself stays until somebody collects it
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="memory is not as predicted")
            for _ in range(2):
                llm = LLM(**h200.engine_settings(tmp_path / "qwen3-0.6b", "cuda"))
                num_blocks.append(llm.engine.core.executor._runner.memory.num_blocks)  # type: ignore[attr-defined]
                llm.close()
                del llm
    finally:
        gc.enable()
    assert num_blocks[1] == pytest.approx(num_blocks[0], rel=0.02)


@pytest.mark.gpu
def test_a_step_that_does_not_fit_is_refused_with_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_out(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("no more")

    monkeypatch.setattr(GPUModelRunner, "_largest_step", run_out)
    h200.write_shape("qwen3-0.6b", tmp_path)
    with pytest.raises(NotEnoughMemoryError, match="the largest step does not fit: set a smaller max_num_batched_tok"):
        LLM(**h200.engine_settings(tmp_path / "qwen3-0.6b", "cuda"))


@pytest.mark.gpu
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
    assert 0 < used < graph_bytes(config, model)


def _pool_bytes() -> int:
    """Of all graphs' pools."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))
