"""Cases for tests of kernels: few and small where kernels are interpreted, more and larger on a GPU.

An interpreted program takes ten milliseconds, so a test runs a kernel a handful of times: every value of every setting,
and every pair of two settings' values, occurs once.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from allpairspy import AllPairs

from tests.thorough import THOROUGH

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter has no correct bfloat16.
FLOATS = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
HALF = torch.bfloat16 if ON_GPU else torch.float16


def per_device(interpreted: Any, on_gpu: Any) -> Any:
    """Return what a test needs: sizes for the interpreter, or those for a GPU."""
    return on_gpu if ON_GPU else interpreted


def pairs(
    most: int = 60, few: int | None = None, without: dict[str, Any] | None = None, **settings: Sequence[Any]
) -> Callable[[Any], Any]:
    """Parametrize a test by `settings`, values by name, such that every pair of values occurs.

    Args:
        most: On a GPU, and where there is time, random combinations are added up to this number.
        few: Where kernels are interpreted and there is little time, only so many cases. The first ones have most
            pairs, and must have all values.
        without: Values that do not go together where kernels are interpreted, by the settings' names.
    """
    indices = [range(len(values)) for values in settings.values()]

    def is_wanted(row: Sequence[int]) -> bool:
        """Judge a row that may be incomplete yet."""
        chosen = {name: values[i] for (name, values), i in zip(settings.items(), row, strict=False)}
        return ON_GPU or not without or any(chosen.get(name) != value for name, value in without.items())

    found = AllPairs(indices, filter_func=is_wanted) if len(indices) > 1 else zip(*indices, strict=True)
    rows = [tuple(row) for row in found]
    if ON_GPU or THOROUGH:
        rng, num_rows = random.Random(0), max(most, len(rows))
        rows += filter(is_wanted, [tuple(map(rng.choice, indices)) for _ in range(4 * most)])
        rows = list(dict.fromkeys(rows))[:num_rows]
    else:
        num_values = [len(set(column)) for column in zip(*rows, strict=True)]
        rows = rows[:few]
        assert [len(set(column)) for column in zip(*rows, strict=True)] == num_values, "too few cases for all values"
    cases = [[values[i] for values, i in zip(settings.values(), row, strict=True)] for row in rows]
    return pytest.mark.parametrize(
        list(settings), [pytest.param(*case, id="-".join(map(_short, case))) for case in cases]
    )


def _short(value: Any) -> str:
    if inspect.isfunction(value):
        return value.__name__
    return str(value).replace("torch.", "").replace(" ", "")
