"""Processes that ranks run on serve the tests of a module, and end with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.processes import close_processes


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    yield
    close_processes()
