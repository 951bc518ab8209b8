"""Products of 8-bit weights against their definition: in Triton's interpreter, natively where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels.linear.hopper_linear import MAX_ROWS, has_hopper, hopper_scaled_linear
from teachllm_kernels.linear.hopper_tiling import STRIPE, result_columns, tiling_of
from teachllm_kernels.linear.scaled import hopper_scaled_mm as many_rows
from teachllm_kernels.linear.scaled import scaled_gemv, scaled_linear
from teachllm_kernels.linear.scaled.hopper_scaled_mm import hopper_scaled_mm
from teachllm_kernels.linear.scaled.scaled_gemv import scaled_gemv_reference, scaled_gemv_triton
from teachllm_kernels.linear.scaled.scaled_linear import scaled_linear_triton, weight_only_triton
from teachllm_kernels.linear.scaled.scaled_mm import scaled_mm
from teachllm_kernels.linear.scaled.scaled_reference import scale_kind, scaled_linear_reference, weight_only_reference
from teachllm_kernels.quantize_rows import GROUP, QuantizedRows, quantize_rows_reference
from tests.kernels.cases import DEVICE, ON_GPU, pairs, per_device
from tests.kernels.linear.scaled.scaled_cases import (
    KINDS,
    OF_HOPPER,
    QUANTIZED_DTYPES,
    ROUNDED,
    assert_near,
    bias_of,
    check_few_rows_on_hopper,
    check_many_rows_on_hopper,
    library_takes,
    outputs_of,
    rows_of,
    tolerance,
    weight_of,
)
from tests.kernels.rounding import round_as_a_gpu
from tests.thorough import THOROUGH, times

pytestmark = [pytest.mark.gpu] if ON_GPU else []  # natively where there is a GPU, else interpreted
ON_HOPPER = ON_GPU and has_hopper(DEVICE)
ANY = THOROUGH or ON_GPU
hopper_only = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper card")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NO_OR_YES = [False, True]
GATED_BLOCKS = {"kind": "block", "gated": True}  # have 256 rows of the weight at least, so a test of their own
SHAPES = per_device([(144, 40), (512, 130)], [(128, 40), (144, 130), (528, 70)])


@pytest.fixture(scope="module", autouse=True)
def rounding() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            round_as_a_gpu(patch)
            scaled_linear._arrivals(DEVICE)  # is cached: with all of its counters
            patch.setattr(scaled_linear, "_BLOCKS_WANTED", 4)  # fewer interpreted programs share a product
        yield


def row_of(x: QuantizedRows, row: int) -> QuantizedRows:
    """Return one row alone, laid out as rows are."""
    return QuantizedRows(x.values[row : row + 1], x.scales[row : row + 1].t().contiguous().t())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantized_dtype", QUANTIZED_DTYPES)
def test_the_definition_is_the_product_of_the_values_that_are_stored(quantized_dtype: torch.dtype, kind: str) -> None:
    weight, scales = weight_of(300, 200, quantized_dtype, kind)
    x = rows_of(3, 200, quantized_dtype, kind)
    assert scale_kind(weight, scales) == kind
    by_number = scales if kind != "block" else scales.repeat_interleave(GROUP, 0)[:300].repeat_interleave(GROUP, 1)
    unquantized = weight.float() * by_number[:, :200]
    expected = x.dequantize().double() @ unquantized.double().t()
    torch.testing.assert_close(scaled_linear_reference(x, weight, scales), expected, rtol=1e-5, atol=1e-5)
    assert_near(weight_only_reference(x.dequantize(), weight, scales), expected, 1e-5)


@pairs(
    few=6,
    num_rows=per_device([2, 40, 70], [1, 2, 16, 17, 40, 70, 130]),
    shape=SHAPES,
    quantized_dtype=QUANTIZED_DTYPES,
    kind=KINDS,
    has_bias=NO_OR_YES,
    gated=NO_OR_YES,
    dtype=DTYPES,
    without=GATED_BLOCKS,
)
def test_products_of_quantized_rows(
    num_rows: int,
    shape: tuple[int, int],
    quantized_dtype: torch.dtype,
    kind: str,
    has_bias: bool,
    gated: bool,
    dtype: torch.dtype,
) -> None:
    num_in, num_out = shape[0], outputs_of(kind, gated, shape[1])
    weight, scales = weight_of(num_out * (2 if gated else 1), num_in, quantized_dtype, kind)
    x = rows_of(num_rows, num_in, quantized_dtype, kind)
    bias = bias_of(len(weight), dtype) if has_bias else None
    y = scaled_linear_triton(x, weight, scales, bias, gated, dtype)
    assert y.dtype == dtype and y.shape == (num_rows, num_out)
    assert_near(y, scaled_linear_reference(x, weight, scales, bias, gated), tolerance(quantized_dtype, dtype, gated))
    if has_bias or ANY:  # whichever program arrives last
        assert torch.equal(y, scaled_linear_triton(x, weight, scales, bias, gated, dtype))


@pairs(
    few=5,
    num_rows=per_device([5, 70], [1, 5, 33, 130]),
    shape=SHAPES,
    kind=KINDS,
    has_bias=NO_OR_YES,
    gated=NO_OR_YES,
    dtype=per_device(DTYPES[:2], DTYPES),
    without=GATED_BLOCKS,
)
def test_products_with_weights_that_are_dequantized_first(
    num_rows: int, shape: tuple[int, int], kind: str, has_bias: bool, gated: bool, dtype: torch.dtype
) -> None:
    num_in, num_out = shape[0], outputs_of(kind, gated, shape[1])
    weight, scales = weight_of(num_out * (2 if gated else 1), num_in, torch.float8_e4m3fn, kind)
    x = torch.randn(num_rows, num_in, device=DEVICE).to(dtype)
    bias = bias_of(len(weight), dtype) if has_bias else None
    y = weight_only_triton(x, weight, scales, bias, gated)
    assert y.dtype == dtype
    assert_near(y, weight_only_reference(x.double(), weight, scales, bias, gated), 2 * ROUNDED[dtype])


def test_every_8_bit_float_but_nan_is_dequantized_exactly() -> None:
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    every[[0x7F, 0xFF]] = 0
    weight = torch.zeros(256, 16, dtype=torch.uint8, device=DEVICE)
    weight[:, 0] = every
    x = torch.zeros(1, 16, device=DEVICE)
    x[0, 0] = 1.0
    y = weight_only_triton(x, weight.view(torch.float8_e4m3fn), torch.ones(1, 1, device=DEVICE))
    assert torch.equal(y[0], every.view(torch.float8_e4m3fn).float())


@pairs(
    few=9,
    shape=per_device([(144, 9), (1040, 3)], [(128, 40), (144, 9), (1040, 12)]),
    quantized_dtype=QUANTIZED_DTYPES,
    kind=KINDS,
    dtype=DTYPES,
    has_bias=NO_OR_YES,
    has_residual=NO_OR_YES,
    gated=NO_OR_YES,
    how=["plain", "norm", "static", "quantized"],
    without=GATED_BLOCKS,
)
def test_one_row(
    shape: tuple[int, int],
    quantized_dtype: torch.dtype,
    kind: str,
    dtype: torch.dtype,
    has_bias: bool,
    has_residual: bool,
    gated: bool,
    how: str,
) -> None:
    num_in, num_out = shape[0], outputs_of(kind, gated, shape[1])
    weight, scales = weight_of(num_out * (2 if gated else 1), num_in, quantized_dtype, kind)
    x = torch.randn(1, num_in, device=DEVICE).to(dtype)
    bias = bias_of(len(weight), dtype) if has_bias else None
    residual = torch.randn(1, num_out, device=DEVICE).to(dtype) if has_residual else None
    norm = (torch.randn(num_in, device=DEVICE).to(dtype), 1e-6) if how == "norm" else None
    given_scale = torch.tensor([0.01], device=DEVICE) if how == "static" else None
    row = quantize_rows_reference(x, quantized_dtype, grouped=kind == "block") if how == "quantized" else x
    y = scaled_gemv_triton(row, weight, scales, bias, norm, residual, gated, given_scale, dtype)
    assert y.dtype == dtype and y.shape == (1, num_out)
    # Sums of squares that differ in their last bit may turn a value, and so its quantized value, to the next one.
    near = 2e-2 if how == "norm" and dtype != torch.float32 else ROUNDED[dtype]
    expected = scaled_gemv_reference(x, weight, scales, bias, norm, residual, gated, given_scale)
    assert_near(y, expected.double(), 2 * near)


@pytest.mark.parametrize("quantized_dtype", QUANTIZED_DTYPES)
def test_gated_products_of_blocks(quantized_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(scaled_gemv, "_shape", lambda num_in, gated: (256, 64, 4))  # two programs instead of 32
    weight, scales = weight_of(2 * GROUP, 144, quantized_dtype, "block")
    numbers, bias = torch.randn(3, 144, device=DEVICE), bias_of(2 * GROUP, torch.float32)
    x = quantize_rows_reference(numbers, quantized_dtype, grouped=True)
    expected = scaled_linear_reference(x, weight, scales, bias, True)
    y = scaled_linear_triton(x, weight, scales, bias, True, torch.float32)
    assert_near(y, expected, tolerance(quantized_dtype, torch.float32, True))
    if quantized_dtype == torch.int8:
        y = scaled_gemv_triton(row_of(x, 0), weight, scales, bias, gated=True, dtype=torch.float32)
        assert_near(y, expected[:1], 1e-5)
    else:
        assert_near(scaled_gemv_triton(numbers[:1], weight, scales, bias, gated=True), expected[:1], 1e-5)
        y = weight_only_triton(numbers, weight, scales, bias, True)
        assert_near(y, weight_only_reference(numbers.double(), weight, scales, bias, True), 1e-5)


@pytest.mark.parametrize("quantized_dtype", QUANTIZED_DTYPES)
def test_one_row_is_quantized_as_among_others(quantized_dtype: torch.dtype) -> None:
    weight, scales = weight_of(8, 1040, quantized_dtype, "output")
    x = torch.randn(3, 1040, device=DEVICE)
    x[1, -1] = 50.0  # the largest number is the last one
    for row in range(3) if ANY else (1,):
        alone = scaled_gemv_triton(x[row : row + 1], weight, scales)
        among_others = row_of(quantize_rows_reference(x, quantized_dtype), row)
        assert torch.equal(alone, scaled_gemv_triton(among_others, weight, scales, dtype=torch.float32))


def test_products_of_integers_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows = per_device(3, 20)
    weight, _ = weight_of(per_device(20, 40), 1040, torch.int8, "output")
    x = rows_of(num_rows, 1040, torch.int8, "output")
    ones = torch.ones(1, 1, device=DEVICE)
    x = QuantizedRows(x.values, torch.ones_like(x.scales))
    exact = x.values.long().cpu() @ weight.long().cpu().t()
    ways = [scaled_linear_triton(x, weight, ones, dtype=torch.float32)]
    for on_amd in NO_OR_YES:  # where no instruction multiplies four values by four
        monkeypatch.setattr(scaled_gemv, "is_amd", lambda device, on_amd=on_amd: on_amd)
        rows = [scaled_gemv_triton(row_of(x, i), weight, ones, dtype=torch.float32) for i in range(num_rows)]
        ways.append(torch.cat(rows))
    if library_takes(x, weight, ones):
        ways.append(scaled_mm(x, weight, ones, dtype=torch.float32))
    if ON_HOPPER:
        ways.append(hopper_scaled_linear(x, weight, ones, parts=True).sum(0))
    for y in ways:
        assert torch.equal(y.cpu().long(), exact)


@pytest.mark.parametrize(("quantized_dtype", "kind"), [(torch.int8, "output"), (torch.float8_e4m3fn, "block")])
def test_rows_of_zeros_give_the_bias(quantized_dtype: torch.dtype, kind: str) -> None:
    weight, scales = weight_of(40, 144, quantized_dtype, kind)
    bias = bias_of(40, torch.float32)
    zeros = torch.zeros(3, 144, device=DEVICE)
    x = quantize_rows_reference(zeros, quantized_dtype, grouped=kind == "block")
    assert torch.equal(scaled_linear_triton(x, weight, scales, bias, dtype=torch.float32), bias.expand(3, 40))
    assert torch.equal(scaled_gemv_triton(zeros[:1], weight, scales, bias), bias.expand(1, 40))


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("kind", KINDS)
def test_fixed_products_do_not_depend_on_other_rows(kind: str) -> None:
    num_in, last = per_device(144, 400), 69
    weight, scales = weight_of(70, num_in, torch.float8_e4m3fn, kind)
    x = rows_of(70, num_in, torch.float8_e4m3fn, kind)
    together = scaled_linear_triton(x, weight, scales, is_fixed=True)
    for row in per_device((last,), (0, 5, last)):
        assert torch.equal(scaled_linear_triton(row_of(x, row), weight, scales, is_fixed=True)[0], together[row])


@pytest.mark.skipif(ON_GPU, reason="of a CPU, which has the library's products of integers")
@pytest.mark.parametrize("kind", ["tensor", "output"])
@pytest.mark.parametrize("gated", [False, True])
def test_sums_of_integers_from_the_library_get_their_scales(kind: str, gated: bool) -> None:
    weight, scales = weight_of(1100 * (2 if gated else 1), 64, torch.int8, kind)
    x = rows_of(5, 64, torch.int8, kind)
    bias = bias_of(len(weight), torch.float32)
    y = scaled_mm(x, weight, scales, bias, gated, torch.float32)
    assert_near(y, scaled_linear_reference(x, weight, scales, bias, gated), 1e-6)


@settings(max_examples=times(60, 500))
@given(
    num_rows=st.integers(1, MAX_ROWS),
    num_in=st.integers(1, 2000).map(lambda count: 16 * count),
    sixteens=st.integers(1, 9000),
    form=st.sampled_from(["plain", "gated", "parts"]),
    kind=st.sampled_from([(2, False), (1, False), (1, True)]),
)
def test_programs_of_few_rows_cover_the_product_and_fit(
    num_rows: int, num_in: int, sixteens: int, form: str, kind: tuple[int, bool]
) -> None:
    dtype_bytes, grouped = kind
    tiling = tiling_of(num_rows, num_in, 16 * sixteens, form == "gated", form == "parts", dtype_bytes, grouped)
    of_a_program = tiling.tiles * tiling.block_k
    assert (tiling.splits - 1) * of_a_program < num_in <= tiling.splits * of_a_program
    assert tiling.splits == 1 or form == "parts"
    rows = tiling.stripes * STRIPE + tiling.rows + tiling.rest
    staged = 0 if tiling.direct else tiling.stripes * tiling.rows * result_columns(form == "gated") * 2
    scales = 2 * tiling.rows * 4 if grouped else 0
    assert (rows * tiling.block_k * dtype_bytes + scales) * tiling.stages + staged <= 226 << 10
    if grouped:  # a tile is two products
        assert tiling.block_k == (128 if tiling.rest else 256) and tiling.rest <= tiling.rows <= 64
    assert min(tiling.tiles, 2) <= tiling.stages


@given(st.integers(1, 200), st.integers(1, 200_000))
def test_tiles_of_many_rows_are_narrow_only_where_that_takes_fewer_rounds(blocks: int, num_weight_rows: int) -> None:
    columns = many_rows._columns(blocks, num_weight_rows, 132)
    rounds = {each: -(-blocks * -(-num_weight_rows // each) // 132) for each in (128, 256)}
    assert columns == 256 or rounds[128] * 128 < rounds[256] * 256


def test_launchers_refuse_what_they_would_compute_wrongly() -> None:
    weight, scales = weight_of(32, 128, torch.int8, "output")
    x = torch.zeros(2, 128, device=DEVICE)
    with pytest.raises(AssertionError):
        scaled_gemv_triton(x, weight, scales)
    with pytest.raises(AssertionError):
        scaled_gemv_triton(x[:1, :120], weight[:, :120], scales)
    blocks = torch.ones(2, 1, device=DEVICE)
    with pytest.raises(AssertionError):  # a block of gate and up
        scaled_gemv_triton(x[:1], weight_of(160, 128, torch.int8, "output")[0], blocks, gated=True)
    with pytest.raises(AssertionError):
        scaled_linear_triton(
            rows_of(2, 128, torch.int8, "block"), weight_of(160, 128, torch.int8, "output")[0], blocks, gated=True
        )
    for product in (hopper_scaled_linear, hopper_scaled_mm):
        for kind, gated in ((torch.float8_e4m3fn, True), (torch.int8, False)):  # a block of gate and up; of integers
            with pytest.raises(AssertionError):
                product(rows_of(2, 256, kind, "block"), *weight_of(160, 256, kind, "block"), gated=gated)
    with pytest.raises(AssertionError):
        hopper_scaled_linear(rows_of(MAX_ROWS + 1, 128, torch.int8, "output"), weight, scales)


@hopper_only
@settings(max_examples=150)
@given(
    num_rows=st.sampled_from([1, 2, 7, 8, 9, 16, 31, 40, 64, 65, 96, 128, 129, 160, 192, MAX_ROWS]),
    shape=st.sampled_from([(128, 64), (80, 40), (1040, 200), (1024, 4096), (4096, 96), (512, 9000), (4096, 6144)]),
    kind=st.sampled_from(OF_HOPPER),
    has_bias=st.booleans(),
    form=st.sampled_from(["plain", "gated", "parts"]),
)
def test_products_of_quantized_rows_on_hopper(
    num_rows: int, shape: tuple[int, int], kind: tuple[torch.dtype, str], has_bias: bool, form: str
) -> None:
    quantized_dtype, scale_kind = kind
    check_few_rows_on_hopper(num_rows, shape, quantized_dtype, scale_kind, has_bias, form)


@hopper_only
@settings(max_examples=70)
@given(
    num_rows=st.integers(1, 700) | st.sampled_from([2048, 2100]),  # of those, several tiles for each program
    shape=st.sampled_from([(128, 128), (80, 40), (1040, 200), (512, 3072), (2048, 1096), (4096, 4096)]),
    kind=st.sampled_from(OF_HOPPER),
    has_bias=st.booleans(),
    gated=st.booleans(),
    level=st.sampled_from([0, 128, 512]),
)
def test_products_of_many_quantized_rows_on_hopper(
    num_rows: int,
    shape: tuple[int, int],
    kind: tuple[torch.dtype, str],
    has_bias: bool,
    gated: bool,
    level: int,
) -> None:
    quantized_dtype, scale_kind = kind
    check_many_rows_on_hopper(num_rows, shape, quantized_dtype, scale_kind, has_bias, gated, level)


@hopper_only
@pytest.mark.parametrize("num_rows", [1, 64, 100, 256, 300, 2050])
@pytest.mark.parametrize("form", ["plain", "gated", "parts"])
def test_products_of_a_model_with_blocks_on_hopper(num_rows: int, form: str) -> None:
    shape = {"plain": (4096, 6144), "gated": (4096, 12288), "parts": (12288, 4096)}[form]
    if num_rows <= MAX_ROWS:
        check_few_rows_on_hopper(num_rows, shape, torch.float8_e4m3fn, "block", True, form)
    else:
        check_many_rows_on_hopper(num_rows, shape, torch.float8_e4m3fn, "block", True, form == "gated")


@pytest.mark.skipif(not ON_GPU, reason="the library's products of a GPU")
@pytest.mark.parametrize("quantized_dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [20, 256, 1001, 2050])
@pytest.mark.parametrize("shape", [(512, 256), (4096, 6144), (12288, 4096)])
def test_products_of_the_library(
    quantized_dtype: torch.dtype, kind: str, num_rows: int, shape: tuple[int, int]
) -> None:
    weight, scales = weight_of(shape[1], shape[0], quantized_dtype, kind)
    x = rows_of(num_rows, shape[0], quantized_dtype, kind)
    if not library_takes(x, weight, scales):
        pytest.skip("there is none")
    for gated in (False, True):
        bias = bias_of(shape[1], torch.bfloat16) if kind == "output" else None
        y = scaled_mm(x, weight, scales, bias, gated)
        near = 3 * tolerance(quantized_dtype, torch.bfloat16)  # gated after it was rounded
        assert_near(y, scaled_linear_reference(x, weight, scales, bias, gated), near)


@pytest.mark.skipif(not ON_GPU, reason="a model's sizes are too many to interpret")
@pytest.mark.parametrize("quantized_dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [(4096, 6144, False), (4096, 4096, False), (4096, 12288, True), (12288, 4096, False)])
def test_products_of_a_model(quantized_dtype: torch.dtype, kind: str, layer: tuple[int, int, bool]) -> None:
    num_in, num_out, gated = layer
    weight, scales = weight_of(num_out * (2 if gated else 1), num_in, quantized_dtype, kind)
    for num_rows in (1, 2, 16, 64, 256, 1000):
        unquantized = torch.randn(num_rows, num_in, device=DEVICE).bfloat16()
        x = quantize_rows_reference(unquantized, quantized_dtype, grouped=kind == "block")
        expected = scaled_linear_reference(x, weight, scales, gated=gated)
        near = tolerance(quantized_dtype, torch.bfloat16)
        assert_near(scaled_linear_triton(x, weight, scales, gated=gated), expected, near)
        if num_rows == 1:
            assert_near(scaled_gemv_triton(unquantized, weight, scales, gated=gated), expected, near)
            assert_near(scaled_gemv_triton(x, weight, scales, gated=gated, dtype=torch.bfloat16), expected, near)
        if ON_HOPPER and (quantized_dtype, kind) in OF_HOPPER:
            assert_near(hopper_scaled_mm(x, weight, scales, gated=gated), expected, near)
            if num_rows <= MAX_ROWS:
                assert_near(hopper_scaled_linear(x, weight, scales, gated=gated), expected, near)
