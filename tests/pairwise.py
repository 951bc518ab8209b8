"""Pairwise covering arrays: every pair of values of two settings occurs in some case, in few cases.

Most faults need one setting or two to show. `make test-thorough` takes the full product.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from allpairspy import AllPairs

from tests.thorough import THOROUGH


def pairwise(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return cases as dictionaries, in an order that is the same in every run."""
    rows = itertools.product(*values.values()) if THOROUGH else AllPairs([list(each) for each in values.values()])
    return [dict(zip(values, row, strict=True)) for row in rows]
