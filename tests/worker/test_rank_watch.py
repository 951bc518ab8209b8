"""What a rank tells of a step: on a CPU when it was over, on a GPU by the device's events, of graphs what they sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from teachllm.core.scheduler_output import ModelRunnerOutput
from teachllm.distributed.group import Traffic
from teachllm.distributed.layout import Layout
from teachllm.worker import rank_watch
from teachllm.worker.gpu.launched_step import PendingStep
from teachllm.worker.rank_watch import RankWatch
from teachllm.worker.runner import ReadyOutput

OVER = ReadyOutput(ModelRunnerOutput([]))


class Clock:
    """Seconds on the host and on the device, as a test sets them."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rank_watch, "time", clock)
    return clock


def exchange(traffic: Traffic, operation: str, num_bytes: int, clock: Clock | None = None, seconds: float = 0) -> None:
    """As a group does it."""
    traffic.add(operation, num_bytes)
    if traffic.spans is not None:
        begin = traffic.moment()
        if clock is not None:
            clock.now += seconds
        traffic.spans.append((operation, begin, traffic.moment()))


def test_on_a_cpu_a_step_is_over_with_its_call_and_waits_are_part_of_exchanges(clock: Clock) -> None:
    traffic = Traffic(moment=clock.perf_counter)
    watch = RankWatch(Layout(2, 2).coords(3), traffic, torch.device("cpu"))
    exchange(traffic, "broadcast", 4, clock, 1)  # before the step
    watch.begin()
    exchange(traffic, "recv", 0, clock, 0.25)
    clock.now += 0.5
    exchange(traffic, "all_reduce", 100, clock, 0.125)
    watched = watch.end(OVER)
    clock.now += 1
    exchange(traffic, "all_reduce", 1)  # after it
    told = watched.result()
    assert told == {
        "stage": 1,
        "begin": 101.0,
        "end": 101.875,
        "sent": {"recv": (1, 0), "all_reduce": (1, 100)},
        "exchanges": [["recv", 0.0, 0.25], ["all_reduce", 0.75, 0.125]],
    }


def test_on_a_gpu_all_is_measured_back_from_when_the_host_learned_of_it(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Event:
        """Of the device."""

        def __init__(self, enable_timing: bool = False) -> None:
            self.at = -1.0

        def record(self) -> None:
            self.at = clock.now

    class OnDevice(PendingStep):
        """A step that took half a second, and whose result the host has two seconds later."""

        def __init__(self, began: float) -> None:
            self._began = began

        def seconds(self) -> float:
            clock.now = self._began + 2.0
            return 0.5

        def seconds_until(self, moment: Any) -> float:
            seconds: float = moment.at - self._began
            return seconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    traffic = Traffic()
    watch = RankWatch(Layout(2, 1).coords(0), traffic, torch.device("cuda"))
    watch.begin()
    clock.now += 0.125
    exchange(traffic, "all_reduce", 100, clock, 0.25)
    told = watch.end(OnDevice(100.0)).result()
    assert (told["begin"], told["end"]) == (101.5, 102.0)
    assert told["exchanges"] == [["all_reduce", 0.125, 0.25]]


def test_what_a_graph_exchanged_is_counted_and_not_timed() -> None:
    traffic = Traffic()
    watch = RankWatch(Layout(2, 1, True, 2).coords(0, 1), traffic, torch.device("cpu"))
    with traffic.recorded() as recorded:
        exchange(traffic, "all_reduce", 100)
    watch.begin()
    exchange(traffic, "all_gather", 7)
    traffic.replay(recorded)
    told = watch.end(OVER).result()
    assert told["sent"] == {"all_gather": (1, 7), "all_reduce": (1, 100)} and "exchanges" not in told
    assert told["replica"] == 1
