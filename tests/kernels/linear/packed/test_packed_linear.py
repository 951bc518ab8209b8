"""Products of packed weights against their definition: in Triton's interpreter, natively where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels.linear.gemv import gemv_reference
from teachllm_kernels.linear.packed import packed_gemv, packed_linear
from teachllm_kernels.linear.packed.dequantize import dequantize_triton
from teachllm_kernels.linear.packed.packed_gemv import packed_gemv_triton
from teachllm_kernels.linear.packed.packed_linear import MAX_ROWS, packed_linear_triton
from teachllm_kernels.linear.packed.packed_weight import (
    PackedWeight,
    cost,
    dequantize_reference,
    pack,
    packed_linear_reference,
    unpack,
)
from tests.kernels.cases import DEVICE, ON_GPU, pairs, per_device
from tests.kernels.rounding import round_as_a_gpu
from tests.thorough import THOROUGH, times

pytestmark = [pytest.mark.gpu] if ON_GPU else []  # natively where there is a GPU, else interpreted
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# (inputs, outputs, inputs of a group): blocks and parts of them, groups of less than a block and of several, groups
# that do not divide one, whole rows, several chunks of a program
SHAPES = [
    (64, 32, 64),
    (512, 40, 128),
    (96, 20, 32),
    (80, 22, 16),
    (192, 34, 96),
    (1088, 70, 64),
    (768, 34, 256),
    (100, 34, 100),
    (75, 26, 75),
    (1024, 130, 1024),
    (4096, 24, 128),
    (6272, 18, 128),
]
OF_ONE_ROW = per_device([(512, 34, 64), (80, 22, 16), (75, 26, 75), (1152, 18, 128)], SHAPES)
OF_ROWS = per_device([(512, 40, 128) if THOROUGH else (256, 24, 128), (80, 22, 16), (192, 34, 64)], SHAPES)
KINDS = ["4 bits", "4 bits, zeros", "8 bits", "8 bits, zeros", "e2m1"]
ANY = THOROUGH or ON_GPU
KINDS_TO_MULTIPLY = KINDS if ANY else [kind for kind in KINDS if kind != "8 bits, zeros"]
NO_OR_YES = [False, True]
QWEN3_8B = {"qkv": (4096, 6144), "o": (4096, 4096), "gate, up": (4096, 24576), "down": (12288, 4096)}


def compute_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Make the interpreter, which takes bits of bfloat16 for integers, compute with what they stand for."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    binary_op = builder.binary_op

    def wide(value: Any) -> np.ndarray:
        if value.dtype.scalar != tl.bfloat16:
            return value.data
        return torch.from_numpy(np.ascontiguousarray(value.data).view(np.int16)).view(torch.bfloat16).float().numpy()

    def narrow(dequantized: np.ndarray) -> Any:
        bits = torch.from_numpy(np.ascontiguousarray(dequantized, dtype=np.float32)).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(bits.numpy().view(np.uint16), tl.bfloat16)

    def exact_binary_op(self: Any, a: Any, b: Any, op: Any) -> Any:
        is_narrow = a.dtype.scalar == tl.bfloat16
        return narrow(op(wide(a), wide(b))) if is_narrow else binary_op(self, a, b, op)

    def exact_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        return interpreter.TensorHandle(np.matmul(wide(a), wide(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)

    patch.setattr(builder, "binary_op", exact_binary_op)
    patch.setattr(builder, "create_dot", exact_dot)
    patch.setattr(builder, "get_bf16", lambda self, value: narrow(np.array([value])), raising=False)


@pytest.fixture(scope="module", autouse=True)
def arithmetic() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            round_as_a_gpu(patch)
            compute_in_bfloat16(patch)
        yield


def weight_of(
    shape: tuple[int, int, int], kind: str, scale_dtype: torch.dtype = torch.float16, is_gated: bool = False
) -> PackedWeight:
    """Return random quantized values; scales of either sign leave rows about as large as they were."""
    (num_in, num_out, group_size), bits = shape, 8 if kind.startswith("8") else 4
    num_groups = num_in // group_size
    qweight = torch.randint(1 << bits, (num_out, num_in), dtype=torch.uint8, device=DEVICE)
    signs = torch.randint(2, (num_out, num_groups), device=DEVICE) * 2 - 1
    scales = (0.5 + torch.rand(num_out, num_groups, device=DEVICE)) * signs * 4 / (1 << bits) * num_in**-0.5
    zeros = torch.randint(1 << bits, (num_out, num_groups), device=DEVICE) if "zeros" in kind else None
    return pack(qweight, scales.to(scale_dtype), zeros, bits, kind == "e2m1", is_gated)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.double()


def assert_near(
    result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, size: torch.Tensor | None = None
) -> None:
    """Check each row by the length of the error, relative to the row's, or to `size`; `expected` is in float64."""
    assert result.isfinite().all()
    size = expected.norm(dim=-1) if size is None else size
    error = (result.double() - expected).norm(dim=-1) / size.clamp(min=1e-30)
    assert error.max() < TOLERANCE[dtype], f"{float(error.max()):.1e}"


def size_of_gated(gates_and_ups: torch.Tensor) -> torch.Tensor:
    """Return [num_rows], what errors of silu(gate) * up are relative to.

    Gates and ups are each off by so much of their own length. Where few outputs happen to be near 0, the product is off
    by more of its length than that: exact arithmetic on rounded inputs is.
    """
    gates, ups = gates_and_ups.chunk(2, dim=-1)
    return 2 * gates.norm(dim=-1) * ups.norm(dim=-1) * gates.shape[-1] ** -0.5


@pairs(num_out=[1, 18], num_groups=[1, 3], group_size=[16, 48], kind=KINDS, is_gated=NO_OR_YES)
def test_unpacking_gives_back_what_was_packed(
    num_out: int, num_groups: int, group_size: int, kind: str, is_gated: bool
) -> None:
    num_out *= 2 if is_gated else 1
    num_in, bits = num_groups * group_size, 8 if kind.startswith("8") else 4
    qweight = torch.randint(1 << bits, (num_out, num_in), dtype=torch.uint8, device=DEVICE)
    scales = randn(num_out, num_groups, dtype=torch.bfloat16)
    zeros = torch.randint(1 << bits, (num_out, num_groups), device=DEVICE).int() if "zeros" in kind else None
    weight = pack(qweight, scales, zeros, bits, kind == "e2m1", is_gated)
    assert (weight.num_out, weight.num_in, weight.group_size) == (num_out, num_in, group_size)
    found = unpack(weight)
    assert torch.equal(found[0], qweight) and torch.equal(found[1], scales)
    assert found[2] is None if zeros is None else torch.equal(found[2], zeros)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_thread_has_the_weights_of_its_fragments_in_one_piece(bits: int, is_gated: bool) -> None:
    qweight = torch.randint(1 << bits, (32, 128), dtype=torch.uint8)
    weight = pack(qweight, torch.ones(32, 1), None, bits, is_gated=is_gated)
    words, values = (weight.qweight.long() & 0xFFFFFFFF).tolist(), qweight.tolist()
    for block, g, q, step, i, j, h in np.ndindex(2, 8, 4, 8, 2, 2, 2):
        output = i * 16 + block * 8 + g if is_gated else block * 16 + i * 8 + g
        value = values[output][16 * step + 8 * j + 2 * q + h]
        of_block = words[block][step * bits // 16][4 * g + q]
        word = of_block[step % 4] if bits == 4 else of_block[step % 2 * 2 + i]
        shift = 4 * (i + 2 * j) if bits == 4 else 8 * j
        assert word >> (shift + 16 * h) & (1 << bits) - 1 == value


def test_groups_that_cannot_be_multiplied_are_refused_with_the_way_out() -> None:
    qweight = torch.zeros(16, 72, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"9 groups of 72 inputs.*multiple of 16.*dequantize this weight"):
        pack(qweight, torch.ones(16, 9), None, 4)
    with pytest.raises(ValueError, match="5 groups of 72 inputs"):
        pack(qweight, torch.ones(16, 5), None, 4)


def test_dequantized_weights_are_those_of_the_definition() -> None:
    qweight = torch.arange(16, dtype=torch.uint8)[None]
    scales = torch.tensor([[-0.25]], dtype=torch.float16)
    dequantized = dequantize_reference(pack(qweight, scales, None, 4), torch.float32)
    assert dequantized.tolist() == [[-0.25 * (value - 8) for value in range(16)]]
    dequantized = dequantize_reference(pack(qweight, scales, torch.tensor([[3]]), 4), torch.float32)
    assert dequantized.tolist() == [[-0.25 * (value - 3) for value in range(16)]]
    dequantized = dequantize_reference(pack(qweight, scales, None, 4, is_e2m1=True), torch.float32)
    steps = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert dequantized.tolist() == [[-0.25 * step for step in [*steps, *(-step for step in steps)]]]


@pairs(
    few=6,
    shape=per_device([(272, 68, 16), (75, 26, 75)], SHAPES),
    kind=KINDS,
    dtype=DTYPES,
    scale_dtype=[torch.float16, torch.bfloat16, torch.float32],
    is_gated=NO_OR_YES,
)
def test_dequantizing_is_exact(
    shape: tuple[int, int, int], kind: str, dtype: torch.dtype, scale_dtype: torch.dtype, is_gated: bool
) -> None:
    weight = weight_of(shape, kind, scale_dtype, is_gated)
    dequantized = dequantize_triton(weight, dtype)
    assert torch.equal(dequantized, dequantize_reference(weight, dtype))
    if is_gated or ANY:
        out = torch.full_like(dequantized, torch.nan)
        assert dequantize_triton(weight, dtype, out) is out and torch.equal(out, dequantized)


@pairs(
    few=6,
    shape=OF_ONE_ROW,
    kind=KINDS_TO_MULTIPLY,
    dtype=DTYPES,
    scale_dtype=[torch.float16, torch.float32],
    has_bias=NO_OR_YES,
    has_norm=NO_OR_YES,
    has_residual=NO_OR_YES,
    how=["plain", "in turns", "gated"],
    num_places=[1, packed_gemv.PLACES],
)
def test_one_row(
    shape: tuple[int, int, int],
    kind: str,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    has_bias: bool,
    has_norm: bool,
    has_residual: bool,
    how: str,
    num_places: int,
) -> None:
    (num_in, num_out, _), gated = shape, how == "gated"
    weight = weight_of(shape, kind, scale_dtype, how != "plain")
    x = randn(1, num_in, dtype=dtype)
    bias = randn(num_out, dtype=dtype) if has_bias else None
    norm_weight = randn(num_in, dtype=dtype) if has_norm else None
    residual = randn(1, num_out // (2 if gated else 1), dtype=dtype) if has_residual else None
    with patch.object(packed_gemv, "PLACES", num_places):
        y = packed_gemv_triton(x, weight, bias, None if norm_weight is None else (norm_weight, 1e-6), residual, gated)
    assert y.dtype == dtype
    norm = None if norm_weight is None else (norm_weight.double(), 1e-6)
    dequantized = dequantize_reference(weight, torch.float64)
    expected = gemv_reference(x.double(), dequantized, wide(bias), norm, wide(residual), gated)
    size = size_of_gated(gemv_reference(x.double(), dequantized, wide(bias), norm)) if gated else None
    assert_near(y, expected, dtype, size)


@pairs(
    few=8,
    num_rows=per_device([2, 17], [2, 9, 16, 17, 40, 64, 130, MAX_ROWS]),
    shape=OF_ROWS,
    kind=KINDS_TO_MULTIPLY,
    dtype=DTYPES,
    scale_dtype=[torch.float16, torch.bfloat16, torch.float32],
    has_bias=NO_OR_YES,
    how=["plain", "in turns", "gated", "parts"],
)
def test_few_rows(
    num_rows: int,
    shape: tuple[int, int, int],
    kind: str,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    has_bias: bool,
    how: str,
) -> None:
    num_in, num_out, _ = shape
    weight = weight_of(shape, kind, scale_dtype, how in ("in turns", "gated"))
    x = randn(num_rows, num_in, dtype=dtype)
    bias = randn(num_out, dtype=dtype) if has_bias else None
    y = packed_linear_triton(x, weight, bias, how == "gated", how == "parts")
    dequantized = dequantize_reference(weight, torch.float64)
    expected = gemv_reference(x.double(), dequantized, wide(bias), gated=how == "gated")
    if how == "parts":
        assert y.dtype == torch.float32 and y.shape[1:] == (num_rows, num_out)
        assert_near(y.sum(0), expected, dtype)
    else:
        assert y.dtype == dtype
        size = size_of_gated(gemv_reference(x.double(), dequantized, wide(bias))) if how == "gated" else None
        assert_near(y, expected, dtype, size)
        if num_in > 200 and has_bias:  # programs share outputs, and leave their counters as they were
            assert torch.equal(packed_linear_triton(x, weight, bias, how == "gated"), y)


@pairs(num_rows=[1, 4], shape=SHAPES if ANY else SHAPES[:6], kind=KINDS, dtype=[torch.float16, torch.bfloat16])
def test_the_definition_rounds_numbers_and_is_near_all_the_same(
    num_rows: int, shape: tuple[int, int, int], kind: str, dtype: torch.dtype
) -> None:
    weight, x = weight_of(shape, kind), randn(num_rows, shape[0], dtype=dtype)
    unrounded = gemv_reference(x.double(), dequantize_reference(weight, torch.float64))
    assert_near(packed_linear_reference(x, weight), unrounded, dtype)


@settings(max_examples=times(60, 500))
@given(
    st.integers(1, MAX_ROWS),
    st.integers(1, 400).map(lambda number: number * 64),
    st.integers(1, 40_000),
    st.sampled_from([4, 8]),
    st.sampled_from([64, 128, 32]),
    st.sampled_from([99 << 10, 163 << 10, 227 << 10]),
)
def test_all_inputs_are_multiplied_once_and_all_arrivals_counted(
    num_rows: int, num_in: int, num_out: int, bits: int, group_size: int, most_bytes: int
) -> None:
    blocks = -(-num_out // 16)
    qweight = torch.empty((blocks, num_in * bits // 256, 32, 4), dtype=torch.int32, device="meta")
    scales = torch.empty((blocks, max(num_in // group_size, 1), 8, 2), device="meta")
    weight = PackedWeight(qweight, scales, None, bits, group_size, num_in, num_out)
    tiling = packed_linear._tiling(num_rows, weight, torch.bfloat16, most_bytes)
    tiles = tiling.splits * tiling.tiles
    assert tiles * tiling.tile_k >= num_in and (tiles - tiling.tiles) * tiling.tile_k < num_in
    assert not tiling.late or group_size % tiling.tile_k == 0 or scales.shape[1] == 1
    programs = -(-num_rows // tiling.rows) * -(-blocks // tiling.blocks)
    assert tiling.splits == 1 or programs <= packed_linear._arrivals(torch.device("cpu")).numel()
    stage = tiling.tile_k * (2 * tiling.rows + 2 * tiling.blocks * bits)
    assert tiling.stages >= 2 and (tiling.stages - 1) * stage < most_bytes


def test_launchers_refuse_what_they_would_compute_wrongly() -> None:
    weight = weight_of((64, 32, 64), "4 bits")
    x = torch.zeros(2, 64, device=DEVICE)
    with pytest.raises(AssertionError):
        packed_gemv_triton(x, weight)
    with pytest.raises(AssertionError):
        packed_gemv_triton(x[:1, :32], weight)
    with pytest.raises(AssertionError):
        packed_gemv_triton(x[:1], weight, gated=True)
    with pytest.raises(AssertionError):
        packed_linear_triton(x, weight, gated=True)
    with pytest.raises(AssertionError):
        packed_linear_triton(x.new_zeros(MAX_ROWS + 1, 64), weight)
    gated = weight_of((64, 32, 64), "4 bits", is_gated=True)
    with pytest.raises(AssertionError):
        packed_linear_triton(x, gated, gated=True, parts=True)
    with pytest.raises(AssertionError):
        dequantize_triton(weight, torch.float16, x.new_zeros(32, 64))


def test_cost_counts_quantized_weights_scales_and_zeros() -> None:
    plain, with_zeros = (weight_of((4096, 64, 128), kind) for kind in ("4 bits", "4 bits, zeros"))
    dequantized, groups = 4096 * 64, 32 * 64
    assert cost(2, plain) == (dequantized // 2 + groups * 2 + 2 * 2 * (4096 + 64), 4 * dequantized)
    assert cost(2, with_zeros)[0] == cost(2, plain)[0] + groups


@pytest.mark.gpu
@pytest.mark.parametrize("name", QWEN3_8B)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_a_large_model(name: str, kind: str) -> None:
    (num_in, num_out), gated = QWEN3_8B[name], name == "gate, up"
    weight = weight_of((num_in, num_out, 32 if kind == "e2m1" else 128), kind, is_gated=gated)
    assert torch.equal(dequantize_triton(weight, torch.bfloat16), dequantize_reference(weight, torch.bfloat16))
    dequantized = dequantize_reference(weight, torch.float32)
    norm_weight = randn(num_in, dtype=torch.bfloat16)
    for num_rows in (1, 2, 16, 33, 64, 100, 128, MAX_ROWS):
        x = randn(num_rows, num_in, dtype=torch.bfloat16)
        expected = gemv_reference(x.float(), dequantized, gated=gated).double()
        assert_near(packed_linear_triton(x, weight, gated=gated), expected, torch.bfloat16)
        if not gated:
            assert_near(packed_linear_triton(x, weight, parts=True).sum(0), expected, torch.bfloat16)
    x, residual = randn(1, num_in, dtype=torch.bfloat16), randn(1, num_out, dtype=torch.bfloat16)
    residual = residual[:, : num_out // (2 if gated else 1)].contiguous()
    expected = gemv_reference(x.float(), dequantized, None, (norm_weight.float(), 1e-6), residual.float(), gated)
    first = packed_gemv_triton(x, weight, None, (norm_weight, 1e-6), residual, gated)
    assert_near(first, expected.double(), torch.bfloat16)
    for _ in range(20):  # each starts before the one before it has ended
        assert torch.equal(packed_gemv_triton(x, weight, None, (norm_weight, 1e-6), residual, gated), first)
