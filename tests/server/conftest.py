"""One engine with the embedded model, and a server in front of it, for all tests of a module that only ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from teachllm import LLM
from teachllm.config import EngineConfig
from teachllm.engine.async_llm import AsyncLLM
from tests.server.fake_engine import Server, serving


class Stats:
    """Pass the engine's statistics on to whatever server is asked."""

    def __init__(self) -> None:
        self.sink: Any = None

    def __call__(self, stats: Any) -> None:
        if self.sink is not None:
            self.sink(stats)


@contextmanager
def running_engine(**settings: Any) -> Iterator[tuple[AsyncLLM, Stats]]:
    """Run an engine in a thread; with the embedded model, unless told otherwise."""
    stats = Stats()
    config = EngineConfig(**{"model": "teachlm", "device": "cpu", "max_model_len": 1024} | settings)
    engine = AsyncLLM.start(config, own_process=False, on_stats=stats)
    try:
        yield engine, stats
    finally:
        engine.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[AsyncLLM, Stats]]:
    with running_engine() as found:
        yield found


@pytest.fixture(scope="module")
def server(engine: tuple[AsyncLLM, Stats]) -> Iterator[Server]:
    engine_client, stats = engine
    with serving(engine_client, served_model_names=("teachlm", "alias"), dev_endpoints=True) as running:
        stats.sink = running.service.metrics.on_step
        yield running


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """What the server's answers have to equal."""
    llm = LLM("teachlm", device="cpu", max_model_len=1024)
    yield llm
    llm.close()
