"""One engine with the embedded model, and a server in front of it, for all tests that only ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from teachllm import LLM
from teachllm.config import EngineConfig
from teachllm.engine.async_llm import AsyncLLM
from tests.server.door import Server, serving


class Stats:
    """What the engine tells goes to whatever server is asked."""

    def __init__(self) -> None:
        self.sink: Any = None

    def __call__(self, stats: Any) -> None:
        if self.sink is not None:
            self.sink(stats)


@pytest.fixture(scope="session")
def engine() -> Iterator[tuple[AsyncLLM, Stats]]:
    stats = Stats()
    config = EngineConfig(model="teachlm", device="cpu", max_model_len=1024)
    door = AsyncLLM.start(config, own_process=False, on_stats=stats)
    yield door, stats
    door.close()


@pytest.fixture(scope="session")
def server(engine: tuple[AsyncLLM, Stats]) -> Iterator[Server]:
    door, stats = engine
    with serving(door, served_model_names=("teachlm", "alias"), dev_endpoints=True) as running:
        stats.sink = running.service.metrics.on_step
        yield running


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """What the server's answers have to equal."""
    llm = LLM("teachlm", device="cpu", max_model_len=1024)
    yield llm
    llm.close()
