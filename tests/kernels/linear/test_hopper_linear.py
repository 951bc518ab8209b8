"""Hopper's matrix products against the definition; where there is no such card they are only compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels.linear.gemv import gemv_reference
from teachllm_kernels.linear.hopper_gated_linear import hopper_gated_linear
from teachllm_kernels.linear.hopper_linear import MAX_ROWS, has_hopper, hopper_linear

ON_HOPPER = torch.cuda.is_available() and has_hopper(torch.device("cuda"))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper card")]
# (inputs, outputs): one tile and less, ragged ones, many tiles, an output's last columns missing, two and three stripes
SHAPES = [(128, 64), (72, 40), (1000, 200), (1024, 4096), (3072, 1024), (4096, 96), (512, 9000), (512, 12288)]


@settings(max_examples=100)
@given(
    st.sampled_from([1, 2, 7, 8, 9, 16, 31, 40, 64, 65, 96, 128, 129, 160, 192, MAX_ROWS]),
    st.sampled_from(SHAPES),
    st.booleans(),
    st.sampled_from(["plain", "gated", "parts"]),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_products(num_rows: int, shape: tuple[int, int], has_bias: bool, kind: str, dtype: torch.dtype) -> None:
    num_in, num_out = shape
    gated = kind == "gated"
    weight = torch.randn(num_out * (2 if gated else 1), num_in, device="cuda", dtype=dtype) / num_in**0.5
    x = torch.randn(num_rows, num_in, device="cuda", dtype=dtype)
    bias = torch.randn(weight.shape[0], device="cuda", dtype=dtype) if has_bias else None
    y = hopper_linear(x, weight, bias, gated=gated, parts=kind == "parts")
    if kind == "parts":
        assert y.dtype == torch.float32 and y.shape[1:] == (num_rows, num_out)
        y = y.sum(0)
    else:
        assert y.dtype == dtype and y.shape == (num_rows, num_out)
    expected = gemv_reference(x.double(), weight.double(), None if bias is None else bias.double(), gated=gated)
    error = (y.double() - expected).norm(dim=-1) / expected.norm(dim=-1)  # of each row
    assert error.max() < (3e-5 if kind == "parts" else 5e-3), f"{float(error.max()):.1e}"  # half a bfloat16 is 4e-3


@settings(max_examples=30)
@given(
    st.integers(1, 700) | st.sampled_from([2048, 2100]),  # of those, several tiles for each program
    st.sampled_from([(64, 128), (72, 40), (1000, 200), (512, 3072), (2048, 1096)]),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_gated_products_of_many_rows(num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_in, num_out = shape
    weight = torch.randn(2 * num_out, num_in, device="cuda", dtype=dtype) / num_in**0.5
    x = torch.randn(num_rows, num_in, device="cuda", dtype=dtype)
    y = hopper_gated_linear(x, weight)
    assert y.dtype == dtype and y.shape == (num_rows, num_out)
    expected = gemv_reference(x.double(), weight.double(), gated=True)
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-3)  # each: a tile gone wrong is few of many
    assert torch.equal(y, hopper_gated_linear(x, weight))
