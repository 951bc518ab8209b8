"""What the kernels' tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
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


@pytest.fixture
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make interpreted `tl.dot` add up in one order for every row.

    Its own is NumPy's product: the processor's library, whose bits may depend on where in the matrix a row lies.
    """
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    def unpacked(x: Any) -> Any:
        """Return a block's numbers; the interpreter holds 8-bit floats as bytes."""
        if not (x.dtype.is_floating() and x.dtype.primitive_bitwidth == 8):
            return x.data
        return interpreter._convert_float(x.data, x.dtype, tl.float16, None).view(np.float16)

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        left, right = unpacked(a), unpacked(b)
        total = d.data
        for k in range(left.shape[-1]):
            total = total + left[..., k, None].astype(total.dtype) * right[..., k, None, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
