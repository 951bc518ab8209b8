"""A quantized KV cache: the answers are those of rounded K and V, and no lossless setting changes them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from safetensors.torch import load_file, save_file

from teachllm import LLM, EngineConfig, SamplingParams
from teachllm.checkpoint.files import quantization_config
from teachllm.core.memory import format_bytes
from teachllm.errors import ModelError
from teachllm.layers.attention_backends import triton
from teachllm.quantization.formats.kv_scale_dtype import dtype_of_kv_scales
from teachllm.roofline import StepShape, step_work
from teachllm.simulator.shapes import model_shape
from teachllm.simulator.simulate import simulate
from teachllm.simulator.workload import Workload
from teachllm.worker import kv_scales
from teachllm.worker.kv_scales import TEXT, _attentions, calibration_ids, scale_of
from teachllm.worker.memory_plan import memory_table
from tests.engine.quantized_reference import (
    DTYPES,
    float64_allowed,
    logprobs_of,
    quantized_reference,
    runner_of,
    scales_of,
)
from tests.engine.reference import reference
from tests.engine.test_lossless_settings import ANYTHING, PROMPTS, check
from tests.golden.make_rounded_kv import FAMILIES, FILE, PROMPT
from tests.spec_decode.drafters import speculation
from tests.thorough import THOROUGH, times
from tests.worker.engines import make_llm, random_ids, tiny
from tests.worker.gpu.test_gpu_model_runner import SETTINGS, recorded, replayed, workload

both = pytest.mark.parametrize("kv_cache_dtype", DTYPES)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)


@both
def test_settings_do_not_change_greedy_tokens(kv_cache_dtype: str) -> None:
    @settings(max_examples=times(2, 60))
    @given(**ANYTHING)
    def run(**drawn: Any) -> None:
        assume(drawn["family"] != "gemma2" or drawn["drafts"] != "eagle")
        judge: Any = quantized_reference(drawn["family"], kv_cache_dtype)
        with float64_allowed():
            check(**drawn, judge=judge, dtype="float64", kv_cache_dtype=kv_cache_dtype)

    run()


CASES = [(family, dtype) for family in FAMILIES for dtype in DTYPES]


@pytest.mark.parametrize(("family", "kv_cache_dtype"), CASES if THOROUGH else [CASES[0], CASES[3], CASES[5], CASES[6]])
def test_answers_are_transformers_own_with_k_and_v_rounded(family: str, kv_cache_dtype: str) -> None:
    """Of every token, the prompt's own included, after the rotation; with the scales that the engine has found."""
    with float64_allowed():
        llm = make_llm(family, dtype="float64", kv_cache_dtype=kv_cache_dtype)
    [output] = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
    made, expected = output.outputs[0], json.loads(FILE.read_text())[f"{family}, {kv_cache_dtype}"]
    assert made.token_ids == expected["token_ids"]
    assert logprobs_of(made) == pytest.approx(expected["logprobs"], abs=1e-6)  # the sampler's are float32
    [output] = make_llm(family).generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
    unquantized = output.outputs[0]
    pairs = zip(unquantized.token_ids, logprobs_of(unquantized), made.token_ids, expected["logprobs"], strict=True)
    assert any(token != other or abs(value - theirs) > 1e-3 for token, value, other, theirs in pairs)  # not as without


@both
def test_float32_tokens_are_those_of_float64_up_to_a_value_that_rounds_the_other_way(kv_cache_dtype: str) -> None:
    judge = quantized_reference("qwen3", kv_cache_dtype, 0.05)
    for budget in (8, 64) if THOROUGH else (8,):
        llm = make_llm(kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=budget)
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS[: times(2, 12)]], GREEDY, use_tqdm=False)
        judge.judge_outputs(outputs)


@both
def test_a_token_takes_a_byte_for_each_number_and_the_table_says_so(kv_cache_dtype: str) -> None:
    unquantized, quantized = (runner_of(make_llm(kv_cache_dtype=each)) for each in ("auto", kv_cache_dtype))
    assert quantized.memory.bytes_per_token * 4 == unquantized.memory.bytes_per_token == 2 * 2 * 2 * 256 * 4
    assert {x.dtype for cache in quantized._kv_caches for x in cache} == {DTYPES[kv_cache_dtype]}
    table = memory_table(quantized.memory)
    assert f"{format_bytes(2 * 2 * 2 * 256)}  2 x 2 layers x 2 KV heads x 256 x 1 byte\n" in table
    sizes = [
        runner_of(make_llm(num_gpu_blocks_override=None, kv_cache_memory_bytes=1 << 20, kv_cache_dtype=each)).memory
        for each in ("auto", kv_cache_dtype)
    ]
    assert sizes[1].num_blocks == 4 * sizes[0].num_blocks


def test_the_roofline_and_the_simulator_count_a_byte_for_each_number() -> None:
    unquantized = model_shape("qwen3-8b")
    step = StepShape([1] * 8, [16_448] * 8, num_sampled=8)
    per_key = 2 * unquantized.num_layers * unquantized.num_kv_heads * unquantized.head_size
    most, least = (step_work(replace(unquantized, kv_cache_dtype=each), step).num_bytes for each in ("auto", "fp8"))
    assert most - least == 8 * 16_448 * per_key
    memory = {"kv_cache_memory_bytes": 1 << 30, "max_model_len": 4096}
    blocks = [
        json.loads(
            simulate(EngineConfig(kv_cache_dtype=each, **memory), Workload(num_requests=1), unquantized).lines[0]
        )
        for each in ("auto", "fp8", "int8")
    ]
    assert [header["num_blocks"] for header in blocks] == [n * (1 << 30) // (16 * 2 * per_key) for n in (1, 2, 2)]


def test_blocks_of_another_kv_dtype_are_other_blocks() -> None:
    roots = [
        make_llm(kv_cache_dtype=each).engine.core.scheduler.kv.cache.root for each in ("auto", "fp8", "int8", "fp8")
    ]
    assert len(set(roots)) == 3 and roots[1] == roots[3]


def test_fp8_is_e4m3_by_its_shorter_name() -> None:
    first, second = (make_llm(kv_cache_dtype=each) for each in ("fp8", "fp8_e4m3"))
    prompts = [{"prompt_token_ids": random_ids(50)}]
    few = replace(GREEDY, max_tokens=6)
    a, b = (llm.generate(prompts, few, use_tqdm=False)[0].outputs[0] for llm in (first, second))
    assert a.token_ids == b.token_ids and logprobs_of(a) == logprobs_of(b)


# -- scales ------------------------------------------------------------------------------------------------


@both
def test_scales_leave_room_above_what_was_seen_and_not_too_much(kv_cache_dtype: str) -> None:
    dtype, largest = DTYPES[kv_cache_dtype], torch.tensor([1.0, 448.0, 127.0, 3e-5, 7e4, 0.0])
    most, room = scale_of(largest, dtype) * {"fp8": 448, "int8": 127}[kv_cache_dtype], largest[:5]
    low, high = {"fp8": (2.0, 4.0), "int8": (1.25, 1.25 * (1 + 1 / 32))}[kv_cache_dtype]
    assert (most[:5] >= low * room).all() and (most[:5] <= high * room * 1.0001).all()
    assert scale_of(largest, dtype)[5] == 1.0  # of a head that is never anything


@both
def test_scales_do_not_depend_on_how_the_engine_is_set_up(kv_cache_dtype: str) -> None:
    first = scales_of(make_llm(kv_cache_dtype=kv_cache_dtype))
    others: list[dict[str, Any]] = [
        {"block_size": 96},
        {"max_num_batched_tokens": 400, "max_num_seqs": 1},
        {"num_gpu_blocks_override": 1, "block_size": 8},  # fewer slots than the text has tokens
    ]
    for other in others:
        for ours, theirs in zip(first, scales_of(make_llm(kv_cache_dtype=kv_cache_dtype, **other)), strict=True):
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def checkpoint(folder: Path, more: dict[str, torch.Tensor]) -> str:
    """The tiny model's, with further tensors below its attention: "0.k_scale" is of its first layer."""
    shutil.copytree(reference("qwen3").path, folder)
    [file] = folder.glob("*.safetensors")
    layer = "model.layers.{}.self_attn.{}"
    save_file(load_file(file) | {layer.format(*name.split(".", 1)): x for name, x in more.items()}, file)
    return str(folder)


GIVEN = {"k": torch.tensor([0.5, 0.25]), "v": torch.tensor(0.125)}  # of each head; of all of the layer


@pytest.mark.parametrize(
    "name", ["{0}_scale", "attn.{0}_scale", "qkv_proj.{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale",
             "{0}_cache.scale"],
)  # fmt: skip
def test_scales_of_a_checkpoint_are_taken_under_any_name_without_a_pass_through_the_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_scales, "calibration_ids", lambda *_: pytest.fail("measured"))
    more = {f"{layer}.{name.format(which)}": scale.clone() for which, scale in GIVEN.items() for layer in (0, 1)}
    more["1." + name.format("k")] = GIVEN["k"].view(2, 1, 1).bfloat16()
    for scales in scales_of(make_llm(model=checkpoint(tmp_path / "it", more), kv_cache_dtype="fp8")):
        assert [scale.tolist() for scale in scales] == [[0.5, 0.25], [0.125, 0.125]]


def test_what_a_checkpoint_leaves_out_or_never_measured_is_measured(tmp_path: Path) -> None:
    measured = scales_of(make_llm(kv_cache_dtype="fp8"))
    more = {"0.k_scale": GIVEN["k"], "1.k_scale": torch.tensor([0.5, -1.0])}
    path = checkpoint(tmp_path / "it", more)
    first, second = scales_of(make_llm(model=path, kv_cache_dtype="fp8"))
    assert first[0].tolist() == [0.5, 0.25] and torch.equal(first[1], measured[0][1])
    assert torch.equal(second[0], measured[1][0]) and torch.equal(second[1], measured[1][1])
    integers = scales_of(make_llm(model=path, kv_cache_dtype="int8"))
    assert all((scale < 0.2).all() for scales in integers for scale in scales)  # those were for e4m3


def test_one_scale_may_be_for_both(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "it", {"1.kv_scale": torch.tensor([0.5])})
    scales = scales_of(make_llm(model=path, kv_cache_dtype="fp8"))
    assert [scale.tolist() for scale in scales[1]] == [[0.5, 0.5]] * 2


def test_scales_that_nobody_asked_for_change_nothing(tmp_path: Path) -> None:
    """Nor do those of what is not in the cache, and the zeros of asymmetric quantization."""
    names = ["k_scale", "v_scale", "q_scale", "attn.prob_scale", "k_zero_point", "q_proj.output_scale"]
    path = checkpoint(tmp_path / "it", {f"{layer}.{name}": torch.ones(1) for layer in (0, 1) for name in names})
    prompts = [{"prompt_token_ids": random_ids(50)}]
    given, unquantized = (make_llm(**more).generate(prompts, GREEDY, use_tqdm=False) for more in ({"model": path}, {}))
    assert given[0].outputs[0].token_ids == unquantized[0].outputs[0].token_ids


def test_scales_that_fit_no_head_are_named(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "it", {"1.k_scale": torch.ones(3)})
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.k_scale has shape \[3\], .* each of 2 KV heads$"):
        make_llm(model=path)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (None, torch.float8_e4m3fn),
        ({"kv_cache_scheme": None}, torch.float8_e4m3fn),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": True}}, torch.float8_e4m3fn),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int", "symmetric": True}}, torch.int8),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int", "symmetric": False}}, None),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float", "symmetric": True}}, None),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, torch.float8_e4m3fn),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}}, None),
    ],
)
def test_scales_are_for_the_dtype_that_their_checkpoint_means(config: Any, dtype: torch.dtype | None) -> None:
    found = quantization_config({"quantization_config": config}, Path("/nowhere"))
    assert dtype_of_kv_scales(found) == dtype


@pytest.mark.parametrize("wrong", [[1], 5, {"num_bits": "8"}, {"symmetric": 1}, {"type": 3}])
def test_what_is_no_scheme_of_the_kv_cache_is_named(wrong: Any) -> None:
    config = quantization_config({"quantization_config": {"kv_cache_scheme": wrong}}, Path("/nowhere"))
    with pytest.raises(ModelError, match=r"^config.json: quantization_config: kv_cache_scheme(=|: [a-z_]+=).*must be"):
        dtype_of_kv_scales(config)


def test_an_unquantized_cache_has_no_scales() -> None:
    assert all(each.settings.kv_scales is None for each in _attentions(runner_of(make_llm()).model))


def test_the_text_is_read_by_the_checkpoints_own_tokenizer_and_random_ids_stand_in_for_it() -> None:
    import teachllm

    assets = Path(teachllm.__file__).parent / "assets"
    ids = calibration_ids(assets / "teachlm", 4096, 2048)
    assert len(ids) == 256 and ids == calibration_ids(assets / "teachlm", 4096, 256)
    from tokenizers import Tokenizer

    text = Tokenizer.from_file(str(assets / "teachlm" / "tokenizer.json")).decode(ids)
    assert text.strip()[:40] == TEXT[:40]
    drawn = calibration_ids(assets / "teachlm-medusa", 512, 96)  # a folder without a tokenizer
    assert len(drawn) == 96 and len(set(drawn)) > 60 and max(drawn) < 512
    assert calibration_ids(assets / "teachlm", 100, 96) == calibration_ids(assets / "teachlm-medusa", 100, 96)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "medusa"] if THOROUGH else ["draft_model", "eagle"])
def test_a_drafters_kv_is_quantized_too_and_its_scales_are_measured(method: str) -> None:
    given = speculation(method, "qwen3", num_speculative_tokens=3, adaptive=False)
    llm = LLM(**tiny(kv_cache_dtype="fp8", speculative_config=given))
    runner = runner_of(llm)
    drafter = runner._drafting.drafter
    if method == "medusa":  # it has no layers
        assert runner.memory.bytes_per_token == 2 * 2 * 2 * 256
    else:
        assert {x.dtype for cache in drafter.kv_caches for x in cache} == {torch.float8_e4m3fn}
        found = [scale for each in _attentions(drafter.module) for scale in each.settings.kv_scales or ()]
        assert len(found) == 2 * len(drafter.kv_caches)
        assert all((scale > 0).all() and (scale != 1.0).any() for scale in found)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS[: times(2, 4)]], GREEDY, use_tqdm=False)
    quantized_reference("qwen3", "fp8", 0.05).judge_outputs(outputs)


# -- on a GPU ----------------------------------------------------------------------------------------------

prompts = pytest.mark.parametrize("short", [triton.SHORT, 0], ids=["quick launches", "hopper_prefill"])


@pytest.mark.gpu
@both
@prompts
def test_graphs_and_running_ahead_equal_eager_bit_for_bit(
    kv_cache_dtype: str, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "SHORT", short)
    how = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}
    plans, made = recorded(workload(), async_scheduling=True, **how)
    eager = replayed(plans, 0, enforce_eager=True, **how)
    assert made == eager and replayed(plans, 1, **how) == eager


def prompt_logprobs(device: str, dtype: str, kv_cache_dtype: str) -> torch.Tensor:
    llm = LLM(**SETTINGS | {"device": device, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype})
    given = [{"prompt_token_ids": prompt} for prompt, _ in workload()[:8]]
    outputs = llm.generate(given, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    llm.engine.close()
    found = [top.logprob for output in outputs for each in (output.prompt_logprobs or [])[1:] for top in each.values()]
    return torch.tensor(found)


@pytest.mark.gpu
@both
@prompts
def test_a_gpus_scores_are_the_cpus_up_to_values_that_round_the_other_way(
    kv_cache_dtype: str, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "SHORT", short)
    unquantized, quantized = (prompt_logprobs("cpu", "float32", each) for each in ("auto", kv_cache_dtype))
    assert len(unquantized) > 100
    cost = (quantized - unquantized).abs().mean()
    assert (prompt_logprobs("cuda", "float32", kv_cache_dtype) - quantized).abs().mean() < 0.1 * cost
    rounding = (prompt_logprobs("cuda", "bfloat16", "auto") - unquantized).abs().mean()
    assert (prompt_logprobs("cuda", "bfloat16", kv_cache_dtype) - unquantized).abs().mean() < 1.5 * cost + 2 * rounding
