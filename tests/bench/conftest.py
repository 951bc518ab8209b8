"""Runs here are too short to be worth a garbage collection each."""

from __future__ import annotations

import pytest

from tests.quantization.algorithms.conftest import short as short


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch) -> None:
    monkeypatch.setattr("teachllm.bench.batch._settle", lambda llm: None)
    monkeypatch.setattr("teachllm.bench.serve.load.gc.collect", lambda: 0)
