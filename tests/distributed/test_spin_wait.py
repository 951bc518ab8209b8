"""Waiting awake: until it is so, and no longer than was said; only where GPUs wait and cores are plentiful."""

from __future__ import annotations

import os
from itertools import count
from types import SimpleNamespace

import pytest

from teachllm.config import EngineConfig
from teachllm.distributed import spin_wait
from teachllm.distributed.spin_wait import spin_seconds, spin_until


def test_who_is_awake_asks_until_it_is_so() -> None:
    answers = iter([False, False, True])
    spin_until(lambda: next(answers), 60.0)
    assert list(answers) == []


def test_who_is_awake_goes_to_sleep_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spin_wait, "time", SimpleNamespace(monotonic=count().__next__))
    asked: list[None] = []
    spin_until(lambda: asked.append(None), 5)
    assert len(asked) == 4


def test_who_is_not_to_stay_awake_does_not_even_ask() -> None:
    spin_until(lambda: pytest.fail("asked"), 0.0)


@pytest.mark.parametrize(
    ("device", "num_cores", "is_awake"),
    [("cuda:0", 12, True), ("cuda:0", 11, False), ("cpu", 64, False)],
)
def test_only_processes_of_gpus_stay_awake_and_only_if_others_have_cores_too(
    monkeypatch: pytest.MonkeyPatch, device: str, num_cores: int, is_awake: bool
) -> None:
    config = EngineConfig(model="teachlm", device=device, tensor_parallel_size=2, data_parallel_size=2)  # 6 processes
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)), raising=False)
    assert (spin_seconds(config) > 0) == is_awake
