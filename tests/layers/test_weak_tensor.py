"""A weak tensor reads and writes the same memory, and does not keep it."""

from __future__ import annotations

import weakref

import pytest
import torch

from teachllm.layers.weak_tensor import weak_tensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_it_sees_and_writes_the_same_numbers_through_any_view(device: str, dtype: torch.dtype) -> None:
    whole = torch.arange(60, device=device).to(dtype).view(3, 5, 4)
    part = whole[:, 1:4].transpose(0, 1)
    other = weak_tensor(part)
    assert other.dtype == dtype and other.shape == part.shape and other.stride() == part.stride()
    assert other.equal(part)
    other[2, 1] = 7
    assert whole[1, 3].tolist() == [7] * 4
    whole.zero_()
    assert not other.any()


def test_the_memory_is_not_kept() -> None:
    tensor = torch.zeros(10)
    is_alive = weakref.ref(tensor.untyped_storage())
    other = weak_tensor(tensor)
    assert other.data_ptr() == tensor.data_ptr()
    del tensor
    assert is_alive() is None


@pytest.mark.gpu
def test_a_gpu_hands_the_memory_out_again() -> None:
    tensor = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    before, other = torch.cuda.memory_allocated(), weak_tensor(tensor)
    assert torch.cuda.memory_allocated() == before and other.nbytes == 64 << 20
    del tensor
    assert torch.cuda.memory_allocated() == before - (64 << 20)
