"""A GPU before compute capability 8.9 has fp8 of the weights alone, and says so."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from teachllm.layers.weights import gpu_scaled_weight
from teachllm.layers.weights.gpu_scaled_weight import GPUScaledWeight
from teachllm.layers.weights.quantized_weights import Activations, ScaledWeight
from teachllm.loading import loader
from teachllm.quantization.formats import rounding
from teachllm_kernels.dry_run import dry_run
from teachllm_kernels.gpu_type import GPU_TYPES
from tests.kernels.rounding import round_as_a_gpu
from tests.layers.weights.test_gpu_weights import (
    DEVICE,
    DTYPE,
    NUM_IN,
    NUM_OUT,
    ON_GPU,
    assert_near,
    few_programs,
    rows_of,
)
from tests.thorough import times

pytestmark = [pytest.mark.gpu] if ON_GPU else []  # natively where there is a GPU, else interpreted


@pytest.fixture(autouse=True)
def rounds_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        round_as_a_gpu(monkeypatch)
        few_programs(monkeypatch)


def made(dtype: torch.dtype, per: str, activations: Activations) -> tuple[Any, GPUScaledWeight]:
    weight = torch.randn(NUM_OUT, NUM_IN, generator=torch.Generator().manual_seed(1)) * NUM_IN**-0.5
    quantized = rounding.scaled(weight.to(DEVICE), dtype, per, activations)
    with pytest.MonkeyPatch.context() as patch:  # an Ampere
        patch.setattr(gpu_scaled_weight, "capability", lambda device: (8, 0))
        return quantized, GPUScaledWeight(quantized, DTYPE)


@pytest.mark.parametrize("num_rows", [1, 5][: times(1, 2)])
@pytest.mark.parametrize(
    ("per", "activations"), [("block", Activations.BY_BLOCK), ("channel", Activations.BY_TOKEN)][: times(1, 2)]
)
def test_activations_stay_unquantized(per: str, activations: Activations, num_rows: int) -> None:
    quantized, weight = made(torch.float8_e4m3fn, per, activations)
    x = rows_of(num_rows)
    expected = x.double() @ quantized.dequantize(DTYPE).double().t()
    assert weight.input_quantization is None
    assert_near(weight.product(x, None), expected, expected)


def test_amds_cards_have_another_fp8_and_take_this_one_for_weights_alone() -> None:
    with dry_run(GPU_TYPES["gfx942"]), torch.device("meta"):
        empty = torch.empty(NUM_OUT, NUM_IN, dtype=torch.float8_e4m3fn)
        weight = GPUScaledWeight(ScaledWeight(empty, torch.empty(NUM_OUT, 1), Activations.BY_TOKEN), DTYPE)
    assert weight.lacks_fp8 and weight.operands.form == "fp8_weight_only" and weight.input_quantization is None


def warned_of(weight: GPUScaledWeight) -> list[str]:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"qkv_proj": nn.ModuleDict({"weight": weight})})])})
    with warnings.catch_warnings(record=True) as found:
        loader._warn_of_fp8(model, SimpleNamespace(path="here"))  # type: ignore[arg-type]
    return [str(warning.message) for warning in found]


def test_a_warning_says_what_to_take_instead() -> None:
    _, weight = made(torch.float8_e4m3fn, "channel", Activations.BY_TOKEN)
    (said,) = warned_of(weight)
    assert (
        "does not multiply fp8" in said
        and "of layers.0.qkv_proj and 0 more layers only the weights are quantized" in said
    )
    assert said.endswith("take int8, by a checkpoint of it or with quantization='int8'")


def test_of_integers_and_of_weights_alone_nothing_is_said() -> None:
    for dtype, activations in ((torch.int8, Activations.BY_TOKEN), (torch.float8_e4m3fn, Activations.UNQUANTIZED)):
        _, weight = made(dtype, "channel", activations)
        assert warned_of(weight) == []
    assert made(torch.int8, "channel", Activations.BY_TOKEN)[1].input_quantization is not None
