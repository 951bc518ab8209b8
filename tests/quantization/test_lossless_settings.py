"""No setting changes a greedy token of a quantized model: static scales, and scales of each token by itself."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm.layers.weights.cpu_scaled_weight import CPUScaledWeight
from teachllm.layers.weights.quantized_weights import BLOCK, Activations, ScaledWeight
from tests.engine.quantized_reference import QuantizedReference, float64_allowed, logprobs_of
from tests.engine.reference import reference
from tests.engine.test_lossless_settings import ANYTHING, check
from tests.quantization.format_checkpoints import FORMATS, RENAMED, write_checkpoint
from tests.quantization.judge import (
    GOLDEN_FAMILY,
    GOLDEN_NAMES,
    GOLDEN_PROMPTS,
    compare,
    folder_of,
    golden_of,
    make_golden,
    transformers_reference,
)
from tests.thorough import THOROUGH, only_thorough, times

ON_THE_FLY = {f"{method}, as it is read": method for method in ("int8", "fp8", "int4")}
OF_WEIGHTS_ALONE = [name for name, how in FORMATS.items() if how.activations is Activations.UNQUANTIZED]
OF_WEIGHTS_ALONE += ["int4, as it is read"]
# What is multiplied with the weights is quantized, too.
WITH_ACTIVATIONS = [name for name in FORMATS if name not in (*OF_WEIGHTS_ALONE, *RENAMED)]
WITH_ACTIVATIONS += ["fp8 by block, as DeepSeek writes it", "int8, as it is read", "fp8, as it is read"]
OF_OWN_CODE = ANYTHING | {"family": st.sampled_from(["qwen3", "mistral", "llama2"][: times(1, 3)])}
WITH_KV = OF_OWN_CODE | {"kv_cache_dtype": st.sampled_from(["auto", "auto", "fp8", "int8"])}
ON_A_GPU = ("gptq in another order", "awq", "packed int8 asymmetric", "int8", "fp8", "fp8 by tensor", "fp8 static")


@cache
def alone(family: str, name: str, kv_cache_dtype: str) -> QuantizedReference:
    """The same model, one request at a time."""
    how: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype}
    if name in ON_THE_FLY:
        return QuantizedReference(reference(family).path, how | {"quantization": ON_THE_FLY[name]})
    return QuantizedReference(written(family, name), how)


@cache
def written(family: str, name: str) -> str:
    """A checkpoint in a format."""
    folder = folder_of(family, f"{name}, alone")
    write_checkpoint(name, Path(reference(family).path), folder)
    return str(folder)


def check_in_float64(name: str, kv_cache_dtype: str, **drawn: Any) -> None:
    judge: Any = alone(drawn["family"], name, kv_cache_dtype)
    with float64_allowed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*one scale for the activations of a whole batch")
        check(**drawn, judge=judge, dtype="float64", **judge.settings)


@pytest.mark.parametrize("name", WITH_ACTIVATIONS if THOROUGH else ["fp8 by block"])
def test_settings_do_not_change_greedy_tokens_of_a_model_with_quantized_products(name: str) -> None:
    @settings(max_examples=times(2, 20))
    @given(**WITH_KV)
    def run(**drawn: Any) -> None:
        check_in_float64(name, **drawn)

    run()


@settings(max_examples=times(2, 50))
@given(name=st.sampled_from(OF_WEIGHTS_ALONE if THOROUGH else ["gptq in another order"]), **WITH_KV)
def test_settings_do_not_change_greedy_tokens_of_a_model_of_quantized_weights(name: str, **drawn: Any) -> None:
    check_in_float64(name, **drawn)


@pytest.mark.parametrize("name", GOLDEN_NAMES if THOROUGH else ["int8"])
def test_alone_its_answers_are_transformers_own_with_activations_rounded(name: str) -> None:
    """Up to a quantized value that rounds the other way, of few tokens."""
    ours, errors = alone(GOLDEN_FAMILY, name, "auto"), []
    for prompt, expected in list(zip(GOLDEN_PROMPTS, golden_of(name), strict=True))[: times(4, 8)]:
        made = ours.alone(tuple(prompt))
        errors += compare(expected, made.token_ids, logprobs_of(made), max_gap=0.1, max_logprob_error=0.05)
    assert len(errors) > 60 and median(errors) < 1e-3


@only_thorough
def test_golden_answers_are_transformers() -> None:
    """On another processor than the file's, a sum may be off by its last bit, and a value of activations by one."""
    made = make_golden()
    for name in GOLDEN_NAMES:
        errors = []
        for expected, ids, logprobs in zip(
            golden_of(name), made[f"{name}: ids"], made[f"{name}: logprobs"], strict=True
        ):
            errors += compare(expected, ids.tolist(), logprobs.tolist(), max_gap=0.1, max_logprob_error=0.05)
        assert len(errors) > 60 and median(errors) < 1e-3


@pytest.mark.gpu
@settings(max_examples=6)
@given(name=st.sampled_from(ON_A_GPU), **OF_OWN_CODE)
def test_nor_do_they_on_a_gpu(name: str, **drawn: Any) -> None:
    check(**drawn, judge=transformers_reference(drawn["family"], name), device="cuda")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("activations", [Activations.BY_TOKEN, Activations.BY_BLOCK, Activations.STATIC])
def test_a_token_is_quantized_alike_whatever_runs_beside_it(dtype: torch.dtype, activations: Activations) -> None:
    """Up to the order in which products are added up; another quantized value would be a hundredth of the largest."""
    weight, x = scaled_weight(dtype, activations), torch.randn(7, 2 * BLOCK) * torch.logspace(-3, 3, 7)[:, None]
    together = weight.product(x, None)
    for row in range(7):
        alone, beside = weight.product(x[row : row + 1], None)[0], together[row]
        assert (alone - beside).abs().max() <= 1e-5 * beside.abs().max()


def scaled_weight(dtype: torch.dtype, activations: Activations) -> CPUScaledWeight:
    by_block = activations is Activations.BY_BLOCK
    qweight = torch.randint(-100, 100, (BLOCK, 2 * BLOCK)).to(dtype)
    scales = torch.rand(1, 2) if by_block else torch.rand(BLOCK, 1)
    input_scale = torch.tensor([0.02]) if activations is Activations.STATIC else None
    block = (BLOCK, BLOCK) if by_block else None
    return CPUScaledWeight(ScaledWeight(qweight, scales, activations, input_scale, block), torch.float32)
