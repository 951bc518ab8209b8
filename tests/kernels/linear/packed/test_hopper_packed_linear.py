"""Hopper's products of packed weights against the definition; where there is no such card they are only compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels.linear.gemv import gemv_reference
from teachllm_kernels.linear.hopper_linear import has_hopper
from teachllm_kernels.linear.packed.hopper_packed_linear import MAX_ROWS, _tiling, hopper_packed_linear, takes_groups
from teachllm_kernels.linear.packed.packed_weight import PackedWeight, dequantize_reference, pack
from tests.thorough import times

ON_HOPPER = torch.cuda.is_available() and has_hopper(torch.device("cuda"))
# (inputs, outputs, inputs of a group): a tile, groups of several tiles, of a whole row, and of parts of a tile; outputs
# that fill no stripe, one of a program, two, three
SHAPES = [
    (128, 64, 128),
    (512, 96, 256),
    (1216, 64, 1216),
    (4096, 512, 128),
    (640, 80, 32),
    (1024, 4096, 64),
    (256, 9216, 128),
    (512, 24576, 32),
    (384, 17408, 128),
    (12288, 256, 128),
]
KINDS = ["4 bits", "4 bits, zeros", "8 bits", "8 bits, zeros", "e2m1"]


def weight_of(
    num_in: int, num_out: int, group_size: int, kind: str, scale_dtype: torch.dtype, is_gated: bool
) -> PackedWeight:
    """Return random values; scales of either sign that leave rows about as large as they were."""
    bits, device = 8 if kind.startswith("8") else 4, "cuda" if ON_HOPPER else "cpu"
    num_groups = num_in // group_size
    qweight = torch.randint(1 << bits, (num_out, num_in), dtype=torch.uint8, device=device)
    signs = torch.randint(2, (num_out, num_groups), device=device) * 2 - 1
    scales = (0.5 + torch.rand(num_out, num_groups, device=device)) * signs * 4 / (1 << bits) * num_in**-0.5
    zeros = torch.randint(1 << bits, (num_out, num_groups), device=device) if "zeros" in kind else None
    return pack(qweight, scales.to(scale_dtype), zeros, bits, kind == "e2m1", is_gated)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper card")
@settings(max_examples=times(80, 400))
@given(
    num_rows=st.sampled_from([1, 2, 7, 8, 9, 16, 31, 40, 64, 65, 128, 130, MAX_ROWS]),
    shape=st.sampled_from(SHAPES),
    kind=st.sampled_from(KINDS),
    has_bias=st.booleans(),
    how=st.sampled_from(["plain", "gated", "parts"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    scale_dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_products(
    num_rows: int,
    shape: tuple[int, int, int],
    kind: str,
    has_bias: bool,
    how: str,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
) -> None:
    num_in, num_out, group_size = shape
    gated = how == "gated"
    weight = weight_of(num_in, num_out, group_size, kind, scale_dtype, gated)
    x = torch.randn(num_rows, num_in, device="cuda", dtype=dtype)
    size = weight.group_size if weight.scales.shape[1] > 1 else 0
    if num_in % 8 or weight.num_out % 16 or not takes_groups(dtype, size, scale_dtype.itemsize, weight.is_e2m1):
        return
    bias = torch.randn(num_out, device="cuda", dtype=dtype) if has_bias else None
    y = hopper_packed_linear(x, weight, bias, gated, how == "parts")
    assert torch.equal(hopper_packed_linear(x, weight, bias, gated, how == "parts"), y)
    if how == "parts":
        assert y.dtype == torch.float32 and y.shape[1:] == (num_rows, num_out)
        y = y.sum(0)
    else:
        assert y.dtype == dtype
    dequantized, wide = dequantize_reference(weight, torch.float64), None if bias is None else bias.double()
    expected = gemv_reference(x.double(), dequantized, wide, gated=gated)
    error = (y.double() - expected).norm(dim=-1) / expected.norm(dim=-1)  # of each row
    assert y.isfinite().all() and error.max() < 1e-2, f"{float(error.max()):.1e}"


@given(
    num_rows=st.integers(1, MAX_ROWS),
    num_in=st.integers(1, 400).map(lambda number: number * 64),
    num_blocks=st.integers(1, 2500),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([16, 64, 128]),
    parts=st.booleans(),
)
def test_all_inputs_are_multiplied_once(
    num_rows: int, num_in: int, num_blocks: int, bits: int, group_size: int, parts: bool
) -> None:
    qweight = torch.empty((num_blocks, num_in * bits // 256, 32, 4), dtype=torch.int32, device="meta")
    scales = torch.empty((num_blocks, max(num_in // group_size, 1), 8, 2), device="meta")
    tiling = _tiling(num_rows, PackedWeight(qweight, scales, None, bits, group_size, num_in, 16 * num_blocks), parts)
    assert tiling.tiles % tiling.turns == 0 and 1 in (tiling.stripes, tiling.turns)
    of_program = 128 * tiling.tiles
    assert (tiling.splits - 1) * of_program < num_in <= tiling.splits * of_program
    assert parts or tiling.splits == 1
    assert 2 <= tiling.stages <= tiling.tiles or tiling.tiles == 1
    assert tiling.stages % tiling.turns == 0
