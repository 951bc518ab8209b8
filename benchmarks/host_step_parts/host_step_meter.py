"""Divide what a loop's steps cost among their phases: CPU time, or calls of functions. Used by `host_step_worker.py`.

Both are a number that only grows, read before and after each phase: the CPU time of this thread, which does not grow
while other threads or processes run, and a count that Python's profiler raises at each call. The count is the same in
every run of the same code, so that it shows a change that is far smaller than a busy machine's noise.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# "loop" is what a step does outside the other three.
PHASES = ("schedule", "inputs", "update", "loop")
Costs = dict[str, float]  # per step, by phase
_HERE = (lambda: None).__code__.co_filename


class Meter:
    """Divides among phases what a number grows by.

    Args:
        read: returns the number.
        read_cost: what the number grows by between two readings with nothing between them.
    """

    def __init__(self, read: Callable[[], int], read_cost: int = 0) -> None:
        self._read, self._read_cost = read, read_cost
        self._spent: dict[str, int] = {}
        self._num_intervals = 0

    def attach(self, owner: Any, name: str, phase: str) -> None:
        """Count every call of a method of this object to a phase."""
        function = getattr(owner, name)

        def metered(*arguments: Any) -> Any:
            before = self._read()
            result = function(*arguments)
            self._spent[phase] += self._read() - before - self._read_cost
            self._num_intervals += 1
            return result

        setattr(owner, name, metered)

    def window(self, step: Callable[[], Any], num_steps: int) -> Costs:
        """Take some steps and return what each phase costs per step."""
        self._spent, self._num_intervals = dict.fromkeys(PHASES, 0), 0
        before = self._read()
        for _ in range(num_steps):
            step()
        # Of the two readings around a phase, one is within the interval and one is outside.
        whole = self._read() - before - self._read_cost * (1 + self._num_intervals)
        self._spent["loop"] = whole - sum(self._spent.values())
        return {phase: spent / num_steps for phase, spent in self._spent.items()}


def cpu_time_meter() -> Meter:
    """Return a meter of this thread's CPU time, in nanoseconds."""
    read = time.thread_time_ns
    return Meter(read, read_cost=min(-read() + read() for _ in range(1000)))


@contextmanager
def call_meter(caller: str) -> Iterator[Meter]:
    """Provide a meter of calls, of Python's functions and of C's.

    Args:
        caller: the file whose own functions, and whose calls of C's, do not count; nor do this file's.
    """
    ignored = (_HERE, caller)
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        if event in ("call", "c_call") and frame.f_code.co_filename not in ignored:
            count += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield Meter(lambda: count)
    finally:
        sys.setprofile(before)
