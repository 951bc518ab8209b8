"""A GPU's products of quantized weights, for any number of rows, are those of the dequantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from teachllm.layers.norm import RMSNorm
from teachllm.layers.weights.execution_weights import as_groups
from teachllm.layers.weights.gpu_grouped_weight import GPUGroupedWeight
from teachllm.layers.weights.gpu_scaled_weight import GPUScaledWeight
from teachllm.layers.weights.quantized_weights import Activations, GroupedWeight, ScaledWeight
from teachllm.quantization.formats import rounding
from teachllm.quantization.formats.fp4 import Fp4
from teachllm_kernels.linear.packed import packed_gemv
from teachllm_kernels.linear.scaled import scaled_gemv, scaled_linear
from teachllm_kernels.quantize_rows import QuantizedRows, quantize_rows_reference
from teachllm_kernels.rms_norm import rms_norm_reference
from tests.kernels.rounding import round_as_a_gpu
from tests.thorough import THOROUGH, times

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if ON_GPU else []  # natively where there is a GPU, else interpreted
DEVICE, DTYPE = (torch.device("cuda"), torch.bfloat16) if ON_GPU else (torch.device("cpu"), torch.float32)
ROWS = (1, 2, 17, 64, 300, 2500) if ON_GPU else (1, 5)
NUM_IN, NUM_OUT = (384, 512) if ON_GPU else (128, times(128, 256))  # interpreted ones take long
E4M3 = torch.float8_e4m3fn
NEAR = 1e-2 if ON_GPU else 1e-4  # of a row's length
NEAR_AFTER_NORM = 2e-2  # where a quantized value may be rounded the other way

Make = Callable[[torch.Tensor], Any]


def grouped(bits: int, group_size: int, symmetric: bool) -> Make:
    return lambda weight: rounding.grouped(weight, bits, group_size, symmetric)


def in_another_order(weight: torch.Tensor) -> GroupedWeight:
    quantized = rounding.grouped(weight, 4, 32, False)
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    return GroupedWeight(quantized.qweight, quantized.scales, quantized.zeros, 4, (order // 32).to(torch.int32))


def scaled(dtype: torch.dtype, per: str, activations: Activations) -> Make:
    def make(weight: torch.Tensor) -> ScaledWeight:
        quantized = rounding.scaled(weight, dtype, per, activations)
        if activations is Activations.STATIC:
            quantized = ScaledWeight(quantized.qweight, quantized.scales, activations, torch.tensor([0.03]))
        return quantized

    return make


WEIGHTS: dict[str, Make] = {
    "int4": grouped(4, 128, True),
    "int4, groups of 32, zeros": grouped(4, 32, False),
    "int8, zeros": grouped(8, 64, False),
    "int4, one group": grouped(4, NUM_IN, True),
    "int4, in another order": in_another_order,
    "mxfp4": lambda weight: Fp4("mxfp4").quantize(weight),
    "nvfp4": lambda weight: Fp4("nvfp4").quantize(weight),
    "W8A8 int8": scaled(torch.int8, "channel", Activations.BY_TOKEN),
    "int8 of the weight alone": scaled(torch.int8, "tensor", Activations.UNQUANTIZED),
    "W8A8 fp8": scaled(E4M3, "channel", Activations.BY_TOKEN),
    "W8A8 fp8, static": scaled(E4M3, "tensor", Activations.STATIC),
    "W8A8 fp8, blocks": scaled(E4M3, "block", Activations.BY_BLOCK),
    "fp8 of weights alone": scaled(E4M3, "channel", Activations.UNQUANTIZED),
}
EVERY_CASE = THOROUGH or ON_GPU


def cases(*usual: tuple[str, int]) -> pytest.MarkDecorator:
    """Return all weights with all numbers of rows, or what is usual where kernels are interpreted."""
    every = [(name, num_rows) for name in WEIGHTS for num_rows in ROWS]
    return pytest.mark.parametrize(("name", "num_rows"), every if EVERY_CASE else usual)


def weights(*usual: str) -> pytest.MarkDecorator:
    """Return all weights, or those that are usual where kernels are interpreted."""
    return pytest.mark.parametrize("name", WEIGHTS if EVERY_CASE else usual)


def few_programs(patch: pytest.MonkeyPatch) -> None:
    """Let fewer interpreted programs share a product where there is little time."""
    if THOROUGH:
        return
    scaled_linear._arrivals(DEVICE)  # is cached: with all of its counters
    patch.setattr(scaled_linear, "_BLOCKS_WANTED", 4)
    patch.setattr(packed_gemv, "PLACES", 1)
    patch.setattr(scaled_gemv, "_shape", lambda num_in, gated: (num_in, 64, 4))


@pytest.fixture(scope="module", autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            round_as_a_gpu(patch)
            few_programs(patch)
        yield


def made(name: str, is_gated: bool = False) -> tuple[Any, Any]:
    """Return (a quantized weight, what a GPU makes of it)."""
    weight = torch.randn(NUM_OUT, NUM_IN, generator=torch.Generator().manual_seed(1)) * NUM_IN**-0.5
    quantized = as_groups(WEIGHTS[name](weight))
    for field in quantized.__slots__ if hasattr(quantized, "__slots__") else vars(quantized):
        value = getattr(quantized, field)
        if isinstance(value, torch.Tensor):
            object.__setattr__(quantized, field, value.to(DEVICE))
    if isinstance(quantized, GroupedWeight):
        return quantized, GPUGroupedWeight(quantized, DTYPE, is_gated)
    return quantized, GPUScaledWeight(quantized, DTYPE)


def rows_of(num_rows: int) -> torch.Tensor:
    """Of different sizes; some of their numbers are large."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, NUM_IN, generator=generator)
    x[:, ::50] *= 8
    return (x * torch.logspace(-1, 0.5, num_rows)[:, None]).to(DEVICE, DTYPE)


def product(quantized: Any, x: torch.Tensor) -> torch.Tensor:
    """[num_rows, NUM_OUT] float64, written apart from the kernels."""
    if isinstance(quantized, GroupedWeight) or quantized.activations is Activations.UNQUANTIZED:
        return x.double() @ quantized.dequantize(DTYPE).double().t()
    rows = quantize_rows_reference(
        x, quantized.qweight.dtype, quantized.input_scale, quantized.activations is Activations.BY_BLOCK
    )
    return rows.dequantize().double() @ quantized.dequantize(torch.float64).double().t()


def silu_and_mul(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def assert_near(found: torch.Tensor, expected: torch.Tensor, like: torch.Tensor, near: float = NEAR) -> None:
    """`like`: rows as large as the sums that the result is made of."""
    error = (found.double() - expected).norm(dim=-1) / like.norm(dim=-1)
    assert found.shape == expected.shape and error.max() < near, float(error.max())


@cases(("int4, in another order", 5), ("W8A8 fp8, blocks", 5))
def test_products(name: str, num_rows: int) -> None:
    (quantized, weight), x = made(name), rows_of(num_rows)
    bias = torch.randn(NUM_OUT, generator=torch.Generator().manual_seed(2)).to(DEVICE, DTYPE)
    expected = product(quantized, x)
    assert_near(weight.product(x, bias), expected + bias.double(), expected + bias.double())


@cases(("int8 of the weight alone", 1))
def test_products_that_are_added_to_a_residual(name: str, num_rows: int) -> None:
    (quantized, weight), x = made(name), rows_of(num_rows)
    expected = product(quantized, x)
    residual = rows_of(num_rows)[:, :1].expand(-1, NUM_OUT).contiguous()
    total = expected + residual.double()
    y, kept = weight.add_to_residual(residual.clone(), x, None)
    parts = 0.0 if y is None else y.double() if y.dim() == 2 else y.double().sum(0)
    assert_near(kept.double() + parts, total, total)


@cases(("int4, groups of 32, zeros", 1), ("W8A8 int8", 5))
def test_gate_and_up(name: str, num_rows: int) -> None:
    (quantized, weight), x = made(name, is_gated=True), rows_of(num_rows)
    y = product(quantized, x)
    gate, up = y.chunk(2, dim=-1)
    assert_near(weight.gated(x, None), silu_and_mul(y), gate.abs() * up.abs() + silu_and_mul(y).abs())
    if EVERY_CASE:
        assert_near(weight.product(x, None), y, y)


@weights("int4", "W8A8 fp8")
def test_one_row_with_what_is_around_it(name: str) -> None:
    x, residual = rows_of(1), rows_of(2)[1:, :1].expand(-1, NUM_OUT).contiguous()
    norm = RMSNorm(NUM_IN, eps=1e-5).to(DEVICE, DTYPE).requires_grad_(False)
    norm.weight.copy_(torch.linspace(0.5, 2, NUM_IN))
    normed = rms_norm_reference(x, None, norm.weight, 1e-5)[0]
    quantized, weight = made(name)
    expected = product(quantized, normed) + residual.double()
    assert_near(weight.one_row(x, None, norm, residual), expected, expected, NEAR_AFTER_NORM)
    quantized, weight = made(name, is_gated=True)
    y = product(quantized, normed)
    found = weight.one_row(x, None, norm, gated=True)
    gate, up = y.chunk(2, dim=-1)
    assert_near(found, silu_and_mul(y), gate.abs() * up.abs() + silu_and_mul(y).abs(), NEAR_AFTER_NORM)


@weights("mxfp4", "W8A8 fp8, static")
def test_what_a_norm_gives_where_it_quantizes(name: str) -> None:
    (quantized, weight), x = made(name), rows_of(5)
    if weight.input_quantization is None:
        assert isinstance(quantized, GroupedWeight) or quantized.activations is Activations.UNQUANTIZED
        return
    rows = quantize_rows_reference(x, *weight.input_quantization)
    assert isinstance(rows, QuantizedRows)
    expected = product(quantized, x)
    if EVERY_CASE:
        assert_near(weight.product(rows, None), expected, expected)
    y, residual = weight.add_to_residual(torch.zeros_like(expected, dtype=DTYPE), rows, None)
    assert_near(y.double() if y.dim() == 2 else y.double().sum(0), expected, expected)
    assert not residual.any()
