"""The clock of an engine that may be held back: it stands still while the engine rests.

A person who watches an engine pauses it, or slows it down to some steps per second. Times on this clock are those of
the engine at full speed:

    time.perf_counter   ├── step 0 ──┤ ... rest ... ├── step 1 ──┤ ... rest ... ├── step 2 ──┤
    EngineClock         ├── step 0 ──┤├── step 1 ──┤├── step 2 ──┤
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque

_MAX_RESTS = 64  # that `at` knows: a rank tells of a step soon after it


class EngineClock:
    """Seconds of an engine that is not held back.

    Args:
        at: the time to begin with; None is that of `time.perf_counter`.
    """

    def __init__(self, at: float | None = None) -> None:
        now = time.perf_counter()
        self._behind = 0.0 if at is None else now - at  # seconds behind `time.perf_counter`
        self._held_since: float | None = None
        self._rests: deque[tuple[float, float]] = deque([(now, self._behind)], _MAX_RESTS)  # (end, behind from then on)

    def __call__(self) -> float:
        """Return the time now."""
        held_since = self._held_since
        return (time.perf_counter() if held_since is None else held_since) - self._behind

    def at(self, seconds: float) -> float:
        """Return the time at a moment of `time.perf_counter`, not long ago."""
        if self._held_since is not None:
            seconds = min(seconds, self._held_since)
        place = bisect_right(self._rests, (seconds, float("inf"))) - 1
        if place < 0:
            return seconds - self._rests[0][1]
        behind = self._rests[place][1]
        if place + 1 < len(self._rests):  # in the rest after it the clock stood still
            following_end, following = self._rests[place + 1]
            seconds = min(seconds, following_end - (following - behind))
        return seconds - behind

    def hold(self) -> None:
        """Stand still from now on."""
        if self._held_since is None:
            self._held_since = time.perf_counter()

    def go_on(self) -> None:
        """Run again."""
        held_since = self._held_since
        if held_since is None:
            return
        now = time.perf_counter()
        self._behind += now - held_since
        self._rests.append((now, self._behind))
        self._held_since = None
