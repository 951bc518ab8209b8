"""Products of fixed order: near the definition, and no row depends by one bit on the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels.linear import batch_invariant_gemm
from teachllm_kernels.linear.batch_invariant_gemm import batch_invariant_gemm_triton, linear_reference

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []  # natively where there is a GPU, else interpreted
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter has no correct bfloat16.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
few = settings(max_examples=8 if DEVICE.type == "cpu" else 60)
MOST_ROWS = 140 if DEVICE.type == "cpu" else 700
WIDE = 8200 if DEVICE.type == "cuda" else 300  # columns, in wide tiles
sizes = st.sampled_from([(8, 5), (100, 33), (300, 130), (256, WIDE)])


@pytest.fixture(autouse=True, scope="module")
def few_columns_are_wide() -> Iterator[None]:
    """Interpreted, a program takes as long as a thousand on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(batch_invariant_gemm, "_WIDE", WIDE)
        yield


def draw(num_rows: int, num_in: int, num_out: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(num_rows, num_in, device=DEVICE).to(dtype)
    return x, (torch.randn(num_out, num_in, device=DEVICE) * num_in**-0.5).to(dtype)


@few
@given(st.integers(1, MOST_ROWS), sizes, st.booleans(), st.sampled_from(DTYPES))
def test_it_is_the_product(num_rows: int, size: tuple[int, int], has_bias: bool, dtype: torch.dtype) -> None:
    x, weight = draw(num_rows, *size, dtype)
    bias = torch.randn(size[1], device=DEVICE).to(dtype) if has_bias else None
    expected = linear_reference(x.double(), weight.double(), None if bias is None else bias.double())
    result = batch_invariant_gemm_triton(x, weight, bias)
    assert result.isfinite().all()
    assert (result.double() - expected).norm() < TOLERANCE[dtype] * expected.norm()


@pytest.mark.usefixtures("products_in_order")
@few
@given(st.integers(2, MOST_ROWS), sizes, st.data(), st.sampled_from(DTYPES))
def test_a_row_is_the_same_alone_and_anywhere_among_others(
    num_rows: int, size: tuple[int, int], data: st.DataObject, dtype: torch.dtype
) -> None:
    x, weight = draw(num_rows, *size, dtype)
    together = batch_invariant_gemm_triton(x, weight)
    first = data.draw(st.integers(0, num_rows - 1))
    end = data.draw(st.integers(first + 1, num_rows))
    assert torch.equal(batch_invariant_gemm_triton(x[first:end], weight), together[first:end])
    assert torch.equal(batch_invariant_gemm_triton(x[first : first + 1], weight), together[first : first + 1])


@pytest.mark.gpu
def test_a_librarys_rows_do_depend_on_each_other() -> None:
    """Or this kernel would not be needed: cuBLAS, at the sizes of a decode and of a prompt."""
    x, weight = draw(4096, 4096, 4096, torch.bfloat16)
    together = linear_reference(x, weight)
    alone = torch.cat([linear_reference(x[i : i + 1], weight) for i in range(64)])
    assert not torch.equal(alone, together[:64])
    assert torch.equal(batch_invariant_gemm_triton(x[:1], weight), batch_invariant_gemm_triton(x, weight)[:1])
