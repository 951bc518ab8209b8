"""Watch what a rank did in a step, for a trace: when it computed, what it exchanged, and how long it waited for that.

Times are of `time.perf_counter`, which on Linux is one clock for all processes of a machine, and the trace's own. On a
CPU a step is over when `end` is called. A GPU works on its own: a step ends when the host learns of it, and what lies
before is measured on the device, by events. What a CUDA graph does inside has none, nor has a sum that a norm
makes while it reads: of a step with either it is known what was sent, and not how long that took.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from teachllm.distributed.group import Counts, Traffic
from teachllm.distributed.layout import RankCoords
from teachllm.worker.gpu.launched_step import PendingStep
from teachllm.worker.runner import PendingOutput


class RankWatch:
    """Watches the steps of this process.

    Args:
        coords: the rank's own.
        traffic: of all its groups.
        device: that computes.
    """

    def __init__(self, coords: RankCoords, traffic: Traffic, device: torch.device) -> None:
        self._coords, self._traffic = coords, traffic
        self._began = 0.0
        traffic.spans = []
        if device.type == "cuda":
            traffic.moment = _moment_on_device

    def begin(self) -> None:
        """Begin a step: all that is recorded from now on belongs to it."""
        self._take()
        self._began = time.perf_counter()

    def end(self, pending: PendingOutput) -> WatchedStep:
        """Record that the step has been computed, or on a GPU launched."""
        end, device = time.perf_counter(), pending if isinstance(pending, PendingStep) else None
        return WatchedStep(self._coords, self._began, end, *self._take(), device)

    def _take(self) -> tuple[Counts, list[tuple[str, Any, Any]]]:
        """Return what was exchanged, from now on nothing."""
        spans, self._traffic.spans = self._traffic.spans or [], []
        return self._traffic.take(), spans


class WatchedStep:
    """A step that a rank has computed, or that a device still works on.

    Args:
        device: what waits for it; None: it is over.
    """

    def __init__(
        self,
        coords: RankCoords,
        begin: float,
        end: float,
        sent: Counts,
        spans: list[tuple[str, Any, Any]],
        device: PendingStep | None,
    ) -> None:
        self._coords, self._begin, self._end = coords, begin, end
        self._sent, self._spans, self._device = sent, spans, device

    def result(self) -> dict[str, Any]:
        """Wait for the device; then return what docs/trace.md describes of a rank."""
        begin, end, device = self._begin, self._end, self._device
        if device is not None:
            seconds, end = device.seconds() or 0.0, time.perf_counter()
            begin = end - seconds
        told: dict[str, Any] = {"stage": self._coords.stage, "begin": begin, "end": end, "sent": self._sent}
        if self._coords.layout.replicas > 1:
            told["replica"] = self._coords.replica
        num_calls = sum(calls for calls, _ in self._sent.values())
        if len(self._spans) == num_calls:  # neither a graph nor a norm has exchanged anything
            told["exchanges"] = []
            for operation, *moments in self._spans:
                at, until = (each - begin if device is None else device.seconds_until(each) for each in moments)
                told["exchanges"].append([operation, round(at, 7), round(until - at, 7)])
        return told


def _moment_on_device() -> torch.cuda.Event:
    """Return when the device comes to what is launched next."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
