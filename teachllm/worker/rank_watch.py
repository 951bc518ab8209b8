"""What a rank did in a step, for a trace: when it computed, what it exchanged, and how long it waited for that.

Times are of `time.perf_counter`, which on Linux is one clock for all processes of a machine, and the trace's own. On a
CPU a step is over when `end` is called. A GPU works on its own: a step ends when the host learns of it, and began so
many seconds before, by the device's events; what it waited for in between is not known.
"""

from __future__ import annotations

import time
from typing import Any

from teachllm.distributed.group import Counts, Traffic
from teachllm.distributed.layout import Place
from teachllm.worker.executor import PendingOutput
from teachllm.worker.launched_step import PendingStep


class RankWatch:
    """Watches the steps of this process.

    Args:
        place: the rank's own.
        traffic: of all its groups.
        times_exchanges: False for those that a device works on by itself.
    """

    def __init__(self, place: Place, traffic: Traffic, *, times_exchanges: bool) -> None:
        self._place, self._traffic = place, traffic
        self._began = 0.0
        if times_exchanges:
            traffic.spans = []

    def begin(self) -> None:
        """From now on all is of a step."""
        self._traffic.take()
        if self._traffic.spans is not None:
            self._traffic.spans.clear()
        self._began = time.perf_counter()

    def end(self, pending: PendingOutput) -> WatchedStep:
        """The step has been computed, or on a GPU launched."""
        device = pending if isinstance(pending, PendingStep) else None
        spans = None if self._traffic.spans is None else [*self._traffic.spans]
        return WatchedStep(self._place, self._began, time.perf_counter(), self._traffic.take(), spans, device)


class WatchedStep:
    """A step that a rank has computed, or that a device still works on.

    Args:
        device: what waits for it; None: it is over.
    """

    def __init__(
        self,
        place: Place,
        begin: float,
        end: float,
        sent: Counts,
        spans: list[tuple[str, float, float]] | None,
        device: PendingStep | None,
    ) -> None:
        self._place, self._begin, self._end = place, begin, end
        self._sent, self._spans, self._device = sent, spans, device

    def result(self) -> dict[str, Any]:
        """Waits for the device; then what docs/trace.md says of a rank."""
        begin, end = self._begin, self._end
        if self._device is not None:
            seconds, end = self._device.seconds(), time.perf_counter()
            begin = end - (seconds or 0.0)
        told: dict[str, Any] = {"stage": self._place.stage, "begin": begin, "end": end, "sent": self._sent}
        if self._place.layout.replicas > 1:
            told["replica"] = self._place.replica
        if self._spans is not None:
            told["exchanges"] = [
                [operation, round(at - begin, 7), round(until - at, 7)] for operation, at, until in self._spans
            ]
        return told
