"""The bounds of interpreted kernels: an access outside of the arguments' memory is found, and named."""

from __future__ import annotations

import pytest
import torch

from teachllm_kernels._triton import tl, triton

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")


@triton.jit
def _copy(from_ptr, to_ptr, size, shift):
    i = tl.arange(0, 8)
    tl.store(to_ptr + i + shift, tl.load(from_ptr + i, mask=i < size), mask=i < 4)


def test_an_access_outside_of_the_tensors_is_an_error() -> None:
    x, y = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    _copy[(1,)](from_ptr=x, to_ptr=y, size=4, shift=0)
    assert y.tolist() == [0, 1, 2, 3]
    with pytest.raises(Exception, match="_copy: 1 of a read's 5 lie outside of its tensors"):
        _copy[(1,)](from_ptr=x, to_ptr=y, size=5, shift=0)
    for shift in (1, -1):
        with pytest.raises(Exception, match="_copy: 1 of a write's 4 lie outside of its tensors"):
            _copy[(1,)](from_ptr=x, to_ptr=y, size=4, shift=shift)
    assert y.tolist() == [0, 1, 2, 3]
