"""What a rank tells of a step: on a CPU when it was over, on a GPU by the device's events, of graphs what they sent."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from teachllm.core.scheduler_output import ModelRunnerOutput
from teachllm.distributed.group import Traffic
from teachllm.distributed.layout import Layout
from teachllm.worker.executor import ReadyOutput
from teachllm.worker.gpu.launched_step import PendingStep
from teachllm.worker.rank_watch import RankWatch

OVER = ReadyOutput(ModelRunnerOutput([]))


class Event:
    """On a device whose clock is at `now` milliseconds."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = -1.0

    def record(self) -> None:
        self.at = Event.now


class OnDevice(PendingStep):
    """A step that began at 2 and was done at 12 milliseconds."""

    def __init__(self) -> None:
        pass

    def seconds(self) -> float:
        time.sleep(0.01)
        return 0.010

    def seconds_until(self, moment: Any) -> float:
        return (moment.at - 2.0) / 1000


def exchange(traffic: Traffic, operation: str, num_bytes: int, seconds: float = 0.0) -> None:
    """As a group does it."""
    traffic.add(operation, num_bytes)
    if traffic.spans is not None:
        begin = traffic.moment()
        time.sleep(seconds)
        Event.now += 1.5
        traffic.spans.append((operation, begin, traffic.moment()))


def test_on_a_cpu_a_step_is_over_with_its_call_and_waits_are_part_of_exchanges() -> None:
    traffic = Traffic()
    watch = RankWatch(Layout(2, 2).coords(3), traffic, torch.device("cpu"))
    exchange(traffic, "broadcast", 4)  # before the step
    before = time.perf_counter()
    watch.begin()
    exchange(traffic, "recv", 0, 0.02)
    exchange(traffic, "all_reduce", 100)
    watched = watch.end(OVER)
    after = time.perf_counter()
    exchange(traffic, "all_reduce", 1)  # behind it
    told = watched.result()
    assert (told["stage"], told["sent"]) == (1, {"recv": (1, 0), "all_reduce": (1, 100)})
    assert before <= told["begin"] <= told["end"] <= after and "replica" not in told
    (first, begin, seconds), (second, _, _) = told["exchanges"]
    assert (first, second) == ("recv", "all_reduce")
    assert begin >= 0 and 0.02 <= seconds < told["end"] - told["begin"]


def test_on_a_gpu_all_is_measured_back_from_when_the_host_learned_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    traffic = Traffic()
    watch = RankWatch(Layout(2, 1).coords(0), traffic, torch.device("cuda"))
    watch.begin()
    Event.now = 5.0
    exchange(traffic, "all_reduce", 100)
    told = watch.end(OnDevice()).result()
    learned = time.perf_counter()
    assert learned - 0.01 < told["end"] <= learned
    assert told["end"] - told["begin"] == pytest.approx(0.010)
    assert told["exchanges"] == [["all_reduce", pytest.approx(0.003), pytest.approx(0.0015)]]


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
