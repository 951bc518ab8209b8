"""Waiting for what happens in another thread or process. The bound here is the only clock that tests look at."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

HANG_SECONDS = 180.0  # nothing takes as long, on the busiest machine, unless it hangs


def wait_for(condition: Callable[[], Any]) -> None:
    """Return once the condition holds; fail when it has not for `HANG_SECONDS`."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)
