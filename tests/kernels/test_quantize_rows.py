"""Quantized rows: every way to them gives the same ones, and they are near the original."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels.quantize_rows import (
    GROUP,
    QuantizedRows,
    quantize_rows_reference,
    quantize_rows_triton,
)
from teachllm_kernels.rms_norm import rms_norm_quantized_triton, rms_norm_triton
from teachllm_kernels.silu_and_mul import silu_and_mul_quantized_triton, silu_and_mul_triton
from tests.kernels.cases import DEVICE, ON_GPU, pairs, per_device
from tests.kernels.rounding import round_as_a_gpu
from tests.thorough import times

pytestmark = [pytest.mark.gpu] if ON_GPU else []  # natively where there is a GPU, else interpreted
QUANTIZED_DTYPES = [torch.float8_e4m3fn, torch.int8]
STEP = {torch.float8_e4m3fn: 2**-4, torch.int8: 0.5 / 127.5}  # half a step: of the number itself, of the largest number
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = ["dynamic", "static", "grouped"]


@pytest.fixture(scope="module", autouse=True)
def rounding() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            round_as_a_gpu(patch)
        yield


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of different sizes."""
    sizes = torch.exp2(torch.randint(-12, 6, (*shape[:-1], 1), device=DEVICE))
    return (torch.randn(*shape, device=DEVICE) * sizes).to(dtype)


def options(kind: str, scale: float = 0.01) -> dict:
    given = torch.tensor([scale], device=DEVICE) if kind == "static" else None
    return {"scale": given, "grouped": kind == "grouped"}


def assert_same(quantized: QuantizedRows, expected: QuantizedRows) -> None:
    assert quantized.values.dtype == expected.values.dtype
    assert quantized.values.is_contiguous() and quantized.scales.t().is_contiguous()
    assert torch.equal(quantized.scales, expected.scales)
    assert torch.equal(quantized.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert quantized.dequantize().isfinite().all()


@pairs(
    num_rows=per_device([2], [1, 5]),
    size=per_device([1, 128, 129], [1, 8, 100, 128, 129, 1000, 3000]),
    dtype=DTYPES,
    quantized_dtype=QUANTIZED_DTYPES,
    kind=KINDS,
)
def test_rows_are_quantized_as_defined(
    num_rows: int, size: int, dtype: torch.dtype, quantized_dtype: torch.dtype, kind: str
) -> None:
    x = randn(num_rows, size, dtype=dtype)
    assert_same(
        quantize_rows_triton(x, quantized_dtype, **options(kind)),
        quantize_rows_reference(x, quantized_dtype, **options(kind)),
    )


@settings(max_examples=times(20, 500))
@given(st.integers(1, 300), st.sampled_from(QUANTIZED_DTYPES), st.booleans())
def test_dequantized_rows_are_near_the_original(size: int, quantized_dtype: torch.dtype, grouped: bool) -> None:
    x = randn(3, size, dtype=torch.float32)
    quantized = quantize_rows_reference(x, quantized_dtype, grouped=grouped)
    assert quantized.scales.shape == (3, -(-size // GROUP) if grouped else 1)
    scale = quantized.scales.repeat_interleave(GROUP if grouped else size, dim=1)[:, :size]
    # Half a step: of e4m3 a sixteenth of the value, or half of the smallest number, 2**-9, where that is more.
    is_e4m3 = quantized_dtype == torch.float8_e4m3fn
    half_a_step = torch.maximum(x.abs() / 16, scale * 2**-10) if is_e4m3 else scale / 2
    assert ((quantized.dequantize() - x).abs() <= 1.0001 * half_a_step).all()


@pytest.mark.parametrize("quantized_dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("grouped", [False, True])
def test_the_largest_value_gets_the_largest_quantized_value_wherever_it_stands(
    quantized_dtype: torch.dtype, grouped: bool
) -> None:
    for at in (0, 130, 299):
        x = torch.full((1, 300), 0.01, device=DEVICE)
        x[0, at] = -7.0
        quantized = quantize_rows_triton(x, quantized_dtype, grouped=grouped)
        is_float = quantized_dtype == torch.float8_e4m3fn
        assert quantized.values[0, at].float() in ((-448,) if is_float else (-127, -128))  # -127.5 is between them
        assert (quantized.dequantize()[0, at] - x[0, at]).abs() <= 7.0 * (
            1e-6 if is_float else 1.0001 * STEP[quantized_dtype]
        )


@pytest.mark.parametrize("quantized_dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("grouped", [False, True])
def test_zeros_are_zeros(quantized_dtype: torch.dtype, grouped: bool) -> None:
    x = torch.zeros(2, 200, device=DEVICE)
    x[1, 0] = 1.0
    for quantized in (
        quantize_rows_triton(x, quantized_dtype, grouped=grouped),
        quantize_rows_reference(x, quantized_dtype, None, grouped),
    ):
        assert quantized.scales.isfinite().all() and (quantized.scales > 0).all()
        assert torch.equal(quantized.dequantize() == 0, x == 0)


@pytest.mark.parametrize("quantized_dtype", QUANTIZED_DTYPES)
def test_values_beyond_a_given_scale_are_clamped(quantized_dtype: torch.dtype) -> None:
    x = torch.tensor([[1e30, -1e30, 448.9, -127.5, 127.3, 500.0, 126.5, 0.5, 1.5]], device=DEVICE)
    quantized = quantize_rows_triton(x, quantized_dtype, scale=torch.ones(1, device=DEVICE))
    assert_same(quantized, quantize_rows_reference(x, quantized_dtype, scale=torch.ones(1, device=DEVICE)))
    assert quantized.values.float()[0, :2].tolist() == (
        [448, -448] if quantized_dtype == torch.float8_e4m3fn else [127, -128]
    )


def test_a_row_does_not_depend_on_the_others() -> None:
    x = randn(3, 300, dtype=torch.float32)
    together = quantize_rows_triton(x, torch.int8)
    for row in range(3):
        alone = quantize_rows_triton(x[row : row + 1], torch.int8)
        assert torch.equal(alone.values[0], together.values[row]) and alone.scales[0] == together.scales[row]


@pairs(
    num_rows=per_device([2], [1, 4]),
    size=per_device([96, 130], [96, 130, 1000]),
    has_residual=[False, True],
    parts=[0, 2],
    dtype=DTYPES,
    quantized_dtype=QUANTIZED_DTYPES,
    kind=KINDS,
)
def test_a_norm_that_quantizes_quantizes_what_it_would_have_written(
    num_rows: int,
    size: int,
    has_residual: bool,
    parts: int,
    dtype: torch.dtype,
    quantized_dtype: torch.dtype,
    kind: str,
) -> None:
    residual = randn(num_rows, size, dtype=dtype) if has_residual or parts else None
    y = randn(parts, num_rows, size, dtype=torch.float32) if parts else randn(num_rows, size, dtype=dtype)
    weight = torch.randn(size, device=DEVICE).to(dtype)
    normed, total = rms_norm_triton(y, residual, weight, 1e-6)
    quantized, same_total = rms_norm_quantized_triton(y, residual, weight, 1e-6, quantized_dtype, **options(kind))
    assert torch.equal(total, same_total)
    assert_same(quantized, quantize_rows_reference(normed, quantized_dtype, **options(kind)))


@pairs(
    num_rows=per_device([2], [1, 4]),
    size=per_device([8, 200], [8, 200, 1500]),
    dtype=DTYPES,
    quantized_dtype=QUANTIZED_DTYPES,
    kind=KINDS,
)
def test_silu_that_quantizes_quantizes_what_it_would_have_written(
    num_rows: int, size: int, dtype: torch.dtype, quantized_dtype: torch.dtype, kind: str
) -> None:
    gate_up = torch.randn(num_rows, 2 * size, device=DEVICE).to(dtype)
    quantized = silu_and_mul_quantized_triton(gate_up, quantized_dtype, **options(kind))
    assert_same(quantized, quantize_rows_reference(silu_and_mul_triton(gate_up), quantized_dtype, **options(kind)))


@pytest.mark.skipif(not ON_GPU, reason="a model's sizes are too many to interpret")
@pytest.mark.parametrize("size", [4096, 12288])
@pytest.mark.parametrize("quantized_dtype", QUANTIZED_DTYPES)
def test_rows_of_a_model(size: int, quantized_dtype: torch.dtype) -> None:
    x = randn(2050, size, dtype=torch.bfloat16)
    for kind in ("dynamic", "static", "grouped"):
        assert_same(
            quantize_rows_triton(x, quantized_dtype, **options(kind)),
            quantize_rows_reference(x, quantized_dtype, **options(kind)),
        )
