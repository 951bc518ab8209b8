"""How often a test tries: as many times as everybody has time for, or, by TEACHLLM_THOROUGH=1, as many as say more."""

from __future__ import annotations

import os

import pytest

THOROUGH = os.environ.get("TEACHLLM_THOROUGH") == "1"

only_thorough = pytest.mark.skipif(not THOROUGH, reason="runs in make test-thorough")


def times(usual: int, thorough: int) -> int:
    """Examples, runs or samples."""
    return thorough if THOROUGH else usual
