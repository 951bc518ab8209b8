"""The small kernels against their references: in Triton's interpreter, natively where there is a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels import step_inputs as step_inputs_module
from teachllm_kernels.attention.kv_write import kv_write_reference, kv_write_triton
from teachllm_kernels.attention.rope_kv_write import rope_kv_write_reference, rope_kv_write_triton
from teachllm_kernels.linear import skinny_gemm
from teachllm_kernels.linear.gemv import gemv_reference, gemv_triton
from teachllm_kernels.linear.hopper_linear import hopper_linear
from teachllm_kernels.linear.skinny_gemm import skinny_gemm_triton
from teachllm_kernels.rms_norm import rms_norm_reference, rms_norm_triton
from teachllm_kernels.silu_and_mul import silu_and_mul_reference, silu_and_mul_triton
from teachllm_kernels.step_inputs import append_tokens, step_inputs, write_runs
from tests.kernels.cases import DEVICE, FLOATS, ON_GPU, pairs, per_device
from tests.thorough import THOROUGH, times

pytestmark = [pytest.mark.gpu] if ON_GPU else []  # natively where there is a GPU, else interpreted
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
YES_OR_NO = [False, True]


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_near(result: torch.Tensor, reference: torch.Tensor) -> None:
    """The reference was computed in float64; the error is measured against its length."""
    assert result.isfinite().all()
    error = (result.double() - reference).norm() / reference.norm().clamp(min=1e-30)
    assert error < TOLERANCE[result.dtype], f"{float(error):.1e}"


@pairs(
    num_tokens=per_device([1, 3], [1, 2, 5, 257, 300]),
    size=per_device([16, 96], [16, 96, 1000]),
    has_residual=YES_OR_NO,
    dtype=FLOATS,
)
def test_rms_norm(num_tokens: int, size: int, has_residual: bool, dtype: torch.dtype) -> None:
    y, weight = randn(num_tokens, size, dtype=dtype), randn(size, dtype=dtype)
    residual = randn(num_tokens, size, dtype=dtype) if has_residual else None
    normed, x = rms_norm_triton(y, residual, weight, 1e-6)
    expected, total = rms_norm_reference(
        y.double(), None if residual is None else residual.double(), weight.double(), 1e-6
    )
    assert_near(normed, expected)
    assert_near(x, total)


@pairs(
    num_tokens=[1, 3], num_parts=per_device([1, 3], [1, 2, 5, 8]), size=per_device([16, 96], [16, 1000]), dtype=FLOATS
)
def test_rms_norm_adds_parts_up(num_tokens: int, num_parts: int, size: int, dtype: torch.dtype) -> None:
    y = randn(num_parts, num_tokens, size, dtype=torch.float32)
    residual, weight = randn(num_tokens, size, dtype=dtype), randn(size, dtype=dtype)
    normed, x = rms_norm_triton(y, residual, weight, 1e-6)
    expected, total = rms_norm_reference(y.double().sum(0), residual.double(), weight.double(), 1e-6)
    assert normed.dtype == x.dtype == dtype
    assert_near(normed, expected)
    assert_near(x, total)


@pairs(num_tokens=per_device([1, 2], [1, 2, 5]), size=[8, 1500], dtype=FLOATS)
def test_silu_and_mul(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = randn(num_tokens, 2 * size, dtype=dtype)
    assert_near(silu_and_mul_triton(gate_up), silu_and_mul_reference(gate_up.double()))


@pairs(num_kv_heads=[1, 3], head_size=[8, 80, 512], dtype=FLOATS)
def test_kv_write_fills_its_slots_and_no_other(num_kv_heads: int, head_size: int, dtype: torch.dtype) -> None:
    wide = randn(4, 3 * num_kv_heads, head_size, dtype=dtype)  # k and v as they lie beside q
    k, v = wide[:, num_kv_heads : 2 * num_kv_heads], wide[:, 2 * num_kv_heads :]
    caches = randn(2, 3, 16, num_kv_heads, head_size, dtype=dtype)
    expected = caches.clone()
    slots = torch.tensor([17, -1, 0, 47], device=DEVICE)
    kv_write_triton(k, v, *caches, slots)
    kv_write_reference(k, v, *expected, slots)
    assert torch.equal(caches, expected)


@pairs(
    heads=per_device([(4, 2), (3, 1)], [(1, 1), (4, 2), (9, 3), (16, 8)]),
    head_size=per_device([16, 80], [16, 80, 96, 128]),
    has_norm=YES_OR_NO,
    dtype=FLOATS,
)
def test_rope_kv_write(heads: tuple[int, int], head_size: int, has_norm: bool, dtype: torch.dtype) -> None:
    (num_heads, num_kv_heads), num_tokens = heads, 3
    qkv = randn(num_tokens, num_heads + 2 * num_kv_heads, head_size, dtype=dtype)
    angles = torch.rand(num_tokens, 1, head_size // 2, device=DEVICE) * 6
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype)
    signed_sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)
    weight = randn(num_heads + num_kv_heads, head_size, dtype=dtype) if has_norm else None
    caches = randn(2, 2, 16, num_kv_heads, head_size, dtype=dtype)
    slots = torch.tensor([31, -1, 4], device=DEVICE)
    expected_qkv, expected_caches = qkv.double(), caches.double()
    rope_kv_write_reference(
        expected_qkv,
        cos.double(),
        signed_sin.double(),
        None if weight is None else weight.double(),
        1e-6,
        *expected_caches,
        slots,
    )
    rope_kv_write_triton(qkv, cos, signed_sin, weight, 1e-6, *caches, slots)
    assert_near(qkv, expected_qkv)
    assert_near(caches, expected_caches)
    untouched = torch.ones(32, dtype=torch.bool, device=DEVICE)
    untouched[[31, 4]] = False
    assert torch.equal(caches.flatten(1, 2)[:, untouched].double(), expected_caches.flatten(1, 2)[:, untouched])


@pairs(
    sizes=per_device([(8, 5), (100, 90), (3000, 5)], [(8, 5), (100, 33), (1024, 40), (3000, 7)]),
    has_bias=YES_OR_NO,
    has_norm=YES_OR_NO,
    has_residual=YES_OR_NO,
    gated=YES_OR_NO,
    dtype=FLOATS,
)
def test_gemv(
    sizes: tuple[int, int], has_bias: bool, has_norm: bool, has_residual: bool, gated: bool, dtype: torch.dtype
) -> None:
    num_in, num_out = sizes
    rows = num_out * (2 if gated else 1)
    x, weight = randn(1, num_in, dtype=dtype), randn(rows, num_in, dtype=dtype) * num_in**-0.5
    bias = randn(rows, dtype=dtype) if has_bias else None
    norm_weight = randn(num_in, dtype=dtype) if has_norm else None
    residual = randn(1, num_out, dtype=dtype) if has_residual else None

    def wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.double()

    result = gemv_triton(x, weight, bias, None if norm_weight is None else (norm_weight, 1e-6), residual, gated)
    norm = None if norm_weight is None else (norm_weight.double(), 1e-6)
    assert_near(result, gemv_reference(x.double(), weight.double(), wide(bias), norm, wide(residual), gated))


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide a product among fewer interpreted programs."""
    skinny_gemm._arrivals(DEVICE)  # is cached: with all of its counters
    if not ON_GPU:
        monkeypatch.setattr(skinny_gemm, "_BLOCKS_WANTED", 4)


@pytest.mark.usefixtures("few_programs")
@pairs(
    num_rows=per_device([2, 16], [2, 3, 9, 16]),
    # One block that programs share, several, and too many to be shared.
    sizes=per_device(
        [(8, 5), (300, 100), (16, 300)], [(8, 5), (100, 33), (1024, 70), (3000, 7), (300, 4200), (9000, 5120)]
    ),
    has_bias=YES_OR_NO,
    gated=YES_OR_NO,
    dtype=FLOATS,
)
def test_skinny_gemm(num_rows: int, sizes: tuple[int, int], has_bias: bool, gated: bool, dtype: torch.dtype) -> None:
    num_in, num_out = sizes
    rows = num_out * (2 if gated else 1)
    x, weight = randn(num_rows, num_in, dtype=dtype), randn(rows, num_in, dtype=dtype) * num_in**-0.5
    bias = randn(rows, dtype=dtype) if has_bias else None
    expected = gemv_reference(x.double(), weight.double(), None if bias is None else bias.double(), gated=gated)
    first = skinny_gemm_triton(x, weight, bias, gated)
    assert_near(first, expected)
    if has_bias or THOROUGH or ON_GPU:  # whichever program arrives last
        assert torch.equal(first, skinny_gemm_triton(x, weight, bias, gated))


@settings(max_examples=times(30, 500))
@given(st.integers(1, 40_000), st.integers(1, 40_000))
def test_columns_are_shared_only_where_arrivals_are_counted(num_in: int, num_out: int) -> None:
    blocks, splits = skinny_gemm._grid(num_in, num_out)
    assert blocks * skinny_gemm._BLOCK_N >= num_out
    assert splits == 1 or blocks <= skinny_gemm._arrivals(DEVICE).numel()


def test_launchers_refuse_what_they_would_compute_wrongly() -> None:
    x, weight = torch.zeros(17, 16, device=DEVICE), torch.zeros(32, 16, device=DEVICE)
    with pytest.raises(AssertionError):
        skinny_gemm_triton(x, weight)
    with pytest.raises(AssertionError):
        gemv_triton(x[:2], weight)
    with pytest.raises(AssertionError):
        rms_norm_triton(torch.zeros(2, 3, 16, device=DEVICE), None, weight[0], 1e-6)
    with pytest.raises(AssertionError):
        hopper_linear(x.new_zeros(257, 16), weight)
    with pytest.raises(AssertionError):
        hopper_linear(x, weight, gated=True, parts=True)


def test_step_inputs_start_at_a_known_token_and_give_padding_no_slot() -> None:
    def ints(values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    token_ids = ints([[10 * row + i for i in range(8)] for row in range(3)])
    tables = ints([[5, 6], [7, 8], [9, 4]])
    outputs = {
        name: torch.full((7,), 99, dtype=dtype, device=DEVICE)
        for name, dtype in (
            ("input_ids", torch.int64),
            ("positions", torch.int64),
            ("slot_mapping", torch.int64),
            ("seq_lens", torch.int32),
        )
    }
    # Row 2 decodes (planned too far: a draft was rejected), row 0 computes three tokens of its prompt; one is padding.
    step_inputs(
        rows=ints([2, 0, -1]),
        query_start=ints([0, 1, 4, 6]),
        planned_start=ints([7, 2, 0]),
        token_ids=token_ids,
        num_known=ints([8, 1, 6]),
        block_tables=tables,
        block_size=4,
        **outputs,
    )
    assert outputs["input_ids"].tolist() == [25, 2, 3, 4, 0, 0, 99]
    assert outputs["positions"].tolist() == [5, 2, 3, 4, 0, 0, 99]
    assert outputs["slot_mapping"].tolist() == [4 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 6 * 4, -1, -1, 99]
    assert outputs["seq_lens"].tolist() == [6, 5, 0, 99, 99, 99, 99]


def test_sampled_tokens_are_appended_to_their_rows_and_padding_to_none() -> None:
    token_ids = torch.zeros((3, 4), dtype=torch.int32, device=DEVICE)
    num_known = torch.tensor([1, 3, 2], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([2, -1, 0], dtype=torch.int32, device=DEVICE)
    outputs = on_host(torch.full((2, 3), -1, dtype=torch.int32))
    second = torch.ones(1, dtype=torch.int32, device=DEVICE)
    append_tokens(rows, torch.tensor([7, 8, 9], device=DEVICE), token_ids, num_known, outputs, second)
    assert token_ids.tolist() == [[0, 9, 0, 0], [0, 0, 0, 0], [0, 0, 7, 0]]
    assert num_known.tolist() == [2, 3, 3]
    assert outputs.tolist() == [[-1, -1, -1], [7, -1, 9]]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Move a tensor to where the host and a GPU's kernels reach it."""
    return tensor.pin_memory() if ON_GPU else tensor


@pytest.fixture(params=[[(0, 1)], [(7, 3), (0, 1024), (40, 1), (3, 1100)], [(5, 17_000), (1, 30)]], ids=len)
def gaps_and_lens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return runs: how far each lies from the one before, and its length; interpreted, 128 times as short."""
    runs = request.param
    if not ON_GPU:
        monkeypatch.setattr(step_inputs_module, "_RUN_BLOCK", 8)
        runs = [(gap, -(-length // 128)) for gap, length in runs]
    return runs


@pytest.mark.parametrize("from_host", YES_OR_NO if ON_GPU else [False])
def test_runs_are_written_to_their_places_and_nowhere_else(
    gaps_and_lens: list[tuple[int, int]], from_host: bool
) -> None:
    places, lens, end = [], [], 0
    for gap, length in gaps_and_lens:
        places.append(end + gap)
        lens.append(length)
        end = places[-1] + length
    order = torch.randperm(len(lens)).tolist()  # runs need not come in the order of their places
    expected = torch.full((end + 30,), -1, dtype=torch.int32)
    header, values = [places[i] for i in order], torch.arange(sum(lens), dtype=torch.int32)
    starts = [0]
    for i in order:
        starts.append(starts[-1] + lens[i])
        expected[places[i] : places[i] + lens[i]] = values[starts[-2] : starts[-1]]
    packed = torch.cat([torch.tensor(header + starts, dtype=torch.int32), values])
    packed = on_host(packed) if from_host else packed.to(DEVICE)
    to = torch.full((end + 30,), -1, dtype=torch.int32, device=DEVICE)
    write_runs(to, packed, len(lens), max(lens))
    assert torch.equal(to.cpu(), expected)
