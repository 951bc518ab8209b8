"""Dtypes by their names."""

from __future__ import annotations

import pytest
import torch

from teachllm.layers.dtypes import dtype_bytes, torch_dtype


@pytest.mark.parametrize(
    ("name", "dtype", "num_bytes"),
    [("bfloat16", torch.bfloat16, 2), ("float32", torch.float32, 4), ("float8_e4m3fn", torch.float8_e4m3fn, 1)],
)
def test_a_name_is_its_dtype_and_its_size(name: str, dtype: torch.dtype, num_bytes: int) -> None:
    assert torch_dtype(name) is dtype and dtype_bytes(name) == num_bytes


@pytest.mark.parametrize("name", ["float33", "nn", ""])
def test_what_is_no_dtype_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"^'{name}' is no dtype of PyTorch$"):
        torch_dtype(name)
