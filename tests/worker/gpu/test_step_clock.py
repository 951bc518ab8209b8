"""A step is timed from the end of the one in front while the device is kept at work, else from its own launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from teachllm.worker.gpu.gpu_model_runner import GPUModelRunner


class FakeEvent:
    recorded: list[FakeEvent]

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.recorded.append(self)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    FakeEvent.recorded = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    made: Any = GPUModelRunner.__new__(GPUModelRunner)
    made._last = None
    return made


def test_the_first_step_is_timed_from_its_launch(runner: Any) -> None:
    assert [runner._start_clock()] == FakeEvent.recorded


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_later_one_from_the_end_of_the_one_in_front_unless_the_host_has_that_already(
    runner: Any, is_taken: bool
) -> None:
    runner._last = SimpleNamespace(is_taken=is_taken, arrived="when the one in front was done")
    began = runner._start_clock()
    assert (began == "when the one in front was done") is not is_taken
    assert len(FakeEvent.recorded) == is_taken
