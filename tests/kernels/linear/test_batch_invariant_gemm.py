"""Products of fixed order: near the definition, and no row depends by one bit on the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from teachllm_kernels.linear import batch_invariant_gemm
from teachllm_kernels.linear.batch_invariant_gemm import batch_invariant_gemm_triton, linear_reference
from tests.kernels.cases import DEVICE, FLOATS, ON_GPU, pairs, per_device

pytestmark = [pytest.mark.gpu] if ON_GPU else []  # natively where there is a GPU, else interpreted
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
WIDE = per_device(140, 8200)  # columns, in wide tiles


@pytest.fixture(autouse=True, scope="module")
def few_columns_are_wide() -> Iterator[None]:
    """Interpret wide tiles for fewer columns than a GPU needs."""
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            patch.setattr(batch_invariant_gemm, "_WIDE", WIDE)
        yield


def draw(num_rows: int, num_in: int, num_out: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(num_rows, num_in, device=DEVICE).to(dtype)
    return x, (torch.randn(num_out, num_in, device=DEVICE) * num_in**-0.5).to(dtype)


@pairs(
    num_rows=per_device([1, 70], [1, 16, 100, 700]),
    size=[(8, 5), (100, 33), *per_device([], [(300, 130)]), (128, WIDE)],
    has_bias=[False, True],
    dtype=FLOATS,
)
def test_it_is_the_product(num_rows: int, size: tuple[int, int], has_bias: bool, dtype: torch.dtype) -> None:
    x, weight = draw(num_rows, *size, dtype)
    bias = torch.randn(size[1], device=DEVICE).to(dtype) if has_bias else None
    expected = linear_reference(x.double(), weight.double(), None if bias is None else bias.double())
    result = batch_invariant_gemm_triton(x, weight, bias)
    assert result.isfinite().all()
    assert (result.double() - expected).norm() < TOLERANCE[dtype] * expected.norm()


@pytest.mark.usefixtures("products_in_order")
@pairs(num_rows=per_device([3, 70], [3, 70, 333, 700]), size=[(100, 33), (128, WIDE)], dtype=FLOATS)
def test_a_row_is_the_same_alone_and_anywhere_among_others(
    num_rows: int, size: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight = draw(num_rows, *size, dtype)
    together = batch_invariant_gemm_triton(x, weight)
    first, end = num_rows // 3, num_rows - 1
    assert torch.equal(batch_invariant_gemm_triton(x[first:end], weight), together[first:end])
    assert torch.equal(batch_invariant_gemm_triton(x[first : first + 1], weight), together[first : first + 1])


@pytest.mark.gpu
def test_rows_of_a_library_do_depend_on_each_other() -> None:
    """Or this kernel would not be needed: cuBLAS, at the sizes of a decode and of a prompt."""
    x, weight = draw(4096, 4096, 4096, torch.bfloat16)
    together = linear_reference(x, weight)
    alone = torch.cat([linear_reference(x[i : i + 1], weight) for i in range(64)])
    assert not torch.equal(alone, together[:64])
    assert torch.equal(batch_invariant_gemm_triton(x[:1], weight), batch_invariant_gemm_triton(x, weight)[:1])
