"""What the kernels' tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.guard import guard


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """What is allocated holds NaN, or the largest integer, until somebody writes to it."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # of which filling new memory is a part
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, kernels keep to the memory of their arguments."""
    if not torch.cuda.is_available():
        guard(monkeypatch)


@pytest.fixture(scope="module")
def products_in_order() -> Iterator[None]:
    """Interpreted, `tl.dot` adds up in one order for every row.

    Its own is NumPy's product: the processor's library, whose bits may depend on where in the matrix a row lies.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            from triton.runtime import interpreter

            def create_dot(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
                total = d.data
                for k in range(a.data.shape[-1]):
                    total = total + a.data[..., k, None].astype(total.dtype) * b.data[..., k, None, :]
                return interpreter.TensorHandle(total, d.dtype.scalar)

            patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield
