"""Run what a reader has just written: it may raise, loop for ever, or end the program. The notebook goes on.

Whether it loops for ever is told by the time that it computes, not by the clock on the wall: on a busy machine a right
answer may wait for its turn as long as a wrong one computes.
"""

from __future__ import annotations

import ctypes
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LOOKS_EVERY = 0.05  # seconds


class TooLong(BaseException):
    """It has taken longer than it may. No `Exception`, so that code which catches all of those does not catch it."""


@dataclass(frozen=True)
class Seconds:
    """Time that something takes or may take.

    Attributes:
        computing: of all processors, by this process.
        waiting: from beginning to end.
    """

    computing: float
    waiting: float

    @classmethod
    def now(cls) -> Seconds:
        """Return both clocks."""
        return cls(time.process_time(), time.monotonic())

    def since(self, before: Seconds) -> Seconds:
        """Return what has passed."""
        return Seconds(self.computing - before.computing, self.waiting - before.waiting)

    def times(self, factor: float) -> Seconds:
        """Return a multiple."""
        return Seconds(factor * self.computing, factor * self.waiting)

    def or_more(self, other: Seconds) -> Seconds:
        """Return the longer time of each kind."""
        return Seconds(max(self.computing, other.computing), max(self.waiting, other.waiting))

    def or_less(self, other: Seconds) -> Seconds:
        """Return the shorter time of each kind."""
        return Seconds(min(self.computing, other.computing), min(self.waiting, other.waiting))

    def is_beyond(self, limit: Seconds) -> bool:
        """Return whether one of them is longer."""
        return self.computing > limit.computing or self.waiting > limit.waiting


@dataclass(frozen=True)
class Ran:
    """Describe what came of a call.

    Attributes:
        value: what it returned.
        error: what it raised, None if nothing; `TooLong` if its time was up.
        took: how long it ran.
        where: the line of the reader's own code in which it was, if that is known.
    """

    value: Any = None
    error: BaseException | None = None
    where: str | None = None
    took: Seconds | None = None


def run_guarded(call: Callable[[], Any], limit: Seconds) -> Ran:
    """Calls something, in this thread, and stops it when its time is up.

    Only Python code can be stopped: a call into compiled code is waited for. Ctrl-C goes through.
    """
    alarm, began = _Alarm(limit), Seconds.now()
    try:
        with alarm:
            value = call()
        return Ran(value=value, took=Seconds.now().since(began))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Ran(error=error, where=_where(error), took=Seconds.now().since(began))


class _Alarm:
    """Raises `TooLong` in the thread that entered it, unless that has left before."""

    def __init__(self, limit: Seconds) -> None:
        self._thread, self._limit = threading.get_ident(), limit
        self._lock, self._is_over, self._has_rung = threading.Lock(), False, False
        self._left = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._watcher.start()

    def _watch(self) -> None:
        began = Seconds.now()
        while not self._left.wait(_LOOKS_EVERY):
            if Seconds.now().since(began).is_beyond(self._limit):
                return self._ring()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._left.set()
        with self._lock:
            self._is_over = True
        if self._has_rung and kind is not TooLong:  # it is on its way: take it here, and not somewhere else
            for _turn in range(100):
                time.sleep(0.01)

    def _ring(self) -> None:
        with self._lock:
            if not self._is_over:
                self._has_rung = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(TooLong))


def _where(error: BaseException) -> str | None:
    """The innermost line that lies in no file of an installed package or of the project: the reader's."""
    from teachllm_lessons.faults import ROOT

    ours = (str(ROOT / "teachllm"), str(ROOT / "kernels"), str(ROOT / "lessons" / "teachllm_lessons"))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_own = not frame.filename.startswith(ours) and "site-packages" not in frame.filename
        if is_own and not frame.filename.startswith("<frozen") and "/lib/python" not in frame.filename:
            return f"line {frame.lineno}, in {frame.name}: `{frame.line}`" if frame.line else f"in {frame.name}"
    return None
