"""What the kernels' tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.guard import guard


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill new memory with NaN, or the largest integer: nothing that was never written may matter."""
    # Filling new memory is a part of this. `torch.use_deterministic_algorithms` takes two seconds to import a compiler.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    yield
    torch._C._set_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same numbers in every run, whichever tests ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep interpreted kernels to the memory of their arguments."""
    if not torch.cuda.is_available():
        guard(monkeypatch)


@pytest.fixture(scope="module")
def products_in_order() -> Iterator[None]:
    """Make interpreted `tl.dot` add up in one order for every row.

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
