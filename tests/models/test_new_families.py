"""A family of models is one file and one registry line: two toy families, added at run time, run with everything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from teachllm import LLM, EngineConfig, SamplingParams
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import Ranks
from teachllm.errors import ModelError
from teachllm.loading.loader import load_model
from teachllm.models.build import META, build_model, describe
from teachllm.models.model_config import load_model_config
from teachllm.models.registry import registered
from teachllm.models.spec import collect
from tests.checkpoints import VOCAB_SIZE
from tests.distributed.test_runner_parts import work
from tests.distributed.threads import on_ranks
from tests.engine.quantized_reference import QuantizedReference, float64_allowed
from tests.engine.test_lossless_settings import PROMPTS, WORKLOAD, check
from tests.kernels.guard import guard
from tests.models.families import references
from tests.models.families.references import ToyReference
from tests.models.flat_batch import logits_by_schedule
from tests.worker.gpu.interpreted_gpu import InterpretedRunner, interpret

COMMON = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": None},
    "rope_theta": 5000.0,  # no parser's default, nor is any setting below: a value that is not read shows
}


@dataclass(frozen=True)
class NewFamily:
    """A family that transformers need not know.

    Attributes:
        architecture, model_type: as in config.json.
        reference: its forward pass once more, see `families/references.py`.
        settings: of config.json, besides `COMMON`.
        module: where its file is; None: it is registered already, as a family of the package is.
    """

    architecture: str
    model_type: str
    reference: Callable[..., torch.Tensor]
    settings: dict[str, Any]
    module: str | None = None


FAMILIES = {
    "moved_norm": NewFamily(
        architecture="MovedNormForCausalLM",
        model_type="moved_norm",
        reference=references.moved_norm,
        settings={"rms_norm_eps": 1e-2, "hidden_act": "gelu_pytorch_tanh"},
        module="tests.models.families.moved_norm",
    ),
    "parallel_block": NewFamily(
        architecture="CohereForCausalLM",
        model_type="cohere",
        reference=references.parallel_block,
        settings={"logit_scale": 0.5, "layer_norm_eps": 1e-2, "use_qk_norm": True},
        module="tests.models.families.parallel_block",
    ),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyReference]:
    """A random checkpoint of a family, which is registered as long as it is used."""
    new, folder = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    raw = COMMON | new.settings | {"architectures": [new.architecture], "model_type": new.model_type}
    with nullcontext() if new.module is None else registered(new.module, {new.model_type: new.architecture}):
        (folder / "config.json").write_text(json.dumps(raw))
        generator = torch.Generator().manual_seed(0)
        tensors = {name: torch.randn(each.shape, generator=generator) for name, each in describe(raw).weights}
        for key, tensor in tensors.items():
            tensor.mul_(2.0 * tensor.shape[-1] ** -0.5) if "norm" not in key else tensor.mul_(0.2).add_(1.0)
        save_file(tensors, folder / "model.safetensors")
        yield ToyReference(request.param, str(folder), raw, new.reference)


SETTINGS = {
    "plain": {},
    "prefix caching, preemption, chunks": {"spare_blocks": 0},
    "n-gram drafts": {"drafts": "ngram"},
    "right and wrong drafts": {"drafts": "mixed", "async_scheduling": True},
    "no cache": {"enable_kv_cache": False, "enable_prefix_caching": False, "max_num_batched_tokens": 400},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_it_computes_what_its_own_reference_computes(family: ToyReference, settings: dict[str, Any]) -> None:
    configuration = {
        **{"enable_kv_cache": True, "enable_chunked_prefill": True, "enable_prefix_caching": True, "block_size": 8},
        **{"max_num_batched_tokens": 23, "max_num_seqs": 3, "scheduling_policy": "fcfs", "async_scheduling": False},
        "long_prefill_token_threshold": 0,
    }
    settings = dict(settings)
    spare_blocks, drafts = settings.pop("spare_blocks", 1000), settings.pop("drafts", "none")
    check(configuration | settings, WORKLOAD, "qwen3", 2, spare_blocks, drafts, 3, None, False, judge=family)


def test_its_answers_are_not_monotonous(family: ToyReference) -> None:
    assert len({token for prompt in PROMPTS[:4] for token in family.greedy(prompt, 24)}) >= 16


def test_prompts_share_blocks_and_requests_are_preempted(family: ToyReference) -> None:
    """What the settings above are for does happen."""
    config = {"block_size": 8, "max_num_batched_tokens": 23, "max_num_seqs": 3, "max_model_len": 96}
    llm = LLM(model=family.path, skip_tokenizer_init=True, num_gpu_blocks_override=13, **config)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPTS[i]} for i in (19, 23, 15)]
    family.judge_outputs(llm.generate(prompts, params))
    again = llm.generate(prompts, params)
    family.judge_outputs(again)
    assert llm.engine.core.scheduler.num_preemptions > 0 and any(output.num_cached_tokens for output in again)


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2)], ids=str)
def test_ranks_share_it(family: ToyReference, layout: Layout) -> None:
    params = {"temperature": 0.0}
    [alone] = on_ranks(Layout(), partial(work, folder=family.path, params=params))
    for request in on_ranks(layout, partial(work, folder=family.path, params=params)):
        assert request == alone


def test_each_of_two_ranks_has_half_of_every_matrix(family: ToyReference) -> None:
    whole = {name: each.num_parameters for name, each in describe(family.raw).weights if len(each.shape) > 1}
    model = load_model_config(EngineConfig(model=family.path))
    for rank in range(2):
        part = collect(build_model(model, META, ranks=Ranks(Layout(tensor=2).coords(rank))))
        assert {name: 2 * each.num_parameters for name, each in part.weights if len(each.shape) > 1} == whole


def test_every_projection_may_be_quantized_under_its_own_name(family: ToyReference) -> None:
    spec = describe(family.raw)
    matrices = [name for name, _ in spec.weights if name.endswith("proj.weight")]
    asked = [f"{name}.weight" for name in spec.projections if name != "lm_head"]
    assert sorted(asked) == sorted(matrices) and len(matrices) >= 6 * len(spec.layers)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "relu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("sliding_window", 8),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    ],
)
def test_a_config_that_asks_for_what_it_does_not_compute_is_refused(
    family: ToyReference, key: str, value: object
) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {key}={re.escape(repr(value))}: must be "):
        describe(family.raw | {key: value})


def test_its_layers_compute_the_same_with_a_gpus_kernels_interpreted(
    family: ToyReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, rotation, KV write and activations take a GPU's way; products and attention take a CPU's."""
    config = EngineConfig(model=family.path)
    description = load_model_config(config)
    model = load_model(description, config, torch.device("cpu"))
    sequences = [torch.tensor(PROMPTS[i][:14]) for i in (19, 23)]
    schedule = [[(0, 9), (1, 4)], [(0, 1), (1, 8)], [(0, 4), (1, 2)]]
    guard(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    found = logits_by_schedule(model, description, sequences, schedule, torch.float32, block_size=16)
    monkeypatch.undo()
    for ids, logits in zip(sequences, found, strict=True):
        expected = FAMILIES[family.name].reference(family.weights, family.raw, ids)
        torch.testing.assert_close(logits.double(), expected, rtol=1e-3, atol=1e-3)


def test_with_int8_weights_a_batch_computes_what_each_request_alone_does_without_a_cache(family: ToyReference) -> None:
    """In float64, where no way of adding up changes how a value is rounded to 8 bits."""
    alone = QuantizedReference(family.path, {"quantization": "int8", "enable_kv_cache": False})
    common: dict[str, Any] = {"quantization": "int8", "dtype": "float64", "skip_tokenizer_init": True}
    prompts = [{"prompt_token_ids": PROMPTS[i]} for i in (19, 23, 15, 6)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    with float64_allowed():
        llm = LLM(family.path, **common, block_size=8, max_num_batched_tokens=23, max_num_seqs=3, max_model_len=96)
        outputs = llm.generate(prompts, params)
        alone.judge_outputs(outputs)
    ids = [output.outputs[0].token_ids for output in outputs]
    assert ids != [family.greedy(PROMPTS[i], 12) for i in (19, 23, 15, 6)]  # the weights did lose something


def test_the_parallel_block_is_command_rs(family: ToyReference) -> None:
    if family.name != "parallel_block":
        pytest.skip("transformers does not know it")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(family.path, dtype=torch.float64)
    ids = torch.tensor(PROMPTS[19])
    with torch.inference_mode():
        found = references.parallel_block(family.weights, family.raw, ids)
        torch.testing.assert_close(found, theirs(ids[None]).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs this itself")
def test_a_gpus_code_and_kernels_interpreted_compute_what_a_cpu_does(family: ToyReference) -> None:
    params = {"temperature": 0.0, "max_tokens": 4}
    [expected] = on_ranks(Layout(), partial(work, folder=family.path, params=params))
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        found = on_ranks(Layout(), partial(work, folder=family.path, params=params, make_runner=InterpretedRunner))
    assert found == [expected]


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"speculative_config": {"method": "ngram"}}], ids=["plain", "n-gram drafts"])
def test_on_a_gpu_with_graphs_it_computes_what_its_own_reference_computes(
    family: ToyReference, settings: dict[str, Any]
) -> None:
    config = {"max_num_batched_tokens": 64, "max_model_len": 96, "num_gpu_blocks_override": 12, "max_num_seqs": 3}
    llm = LLM(family.path, dtype="float32", device="cuda", skip_tokenizer_init=True, **config, **settings)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for _ in range(2):  # the second time steps are replayed, and prompts are found
        family.judge_outputs(llm.generate([{"prompt_token_ids": PROMPTS[i]} for i in (19, 23, 15, 6, 7)], params))
