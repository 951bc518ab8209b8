"""Run what a reader has just written: it may raise, loop for ever, or end the program. The notebook goes on."""

from __future__ import annotations

import ctypes
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class TooLong(BaseException):
    """It has taken longer than it may. No `Exception`, so that code which catches all of those does not catch it."""


@dataclass(frozen=True)
class Ran:
    """Describe what came of a call.

    Attributes:
        value: what it returned.
        error: what it raised, None if nothing; `TooLong` if its time was up.
        where: the line of the reader's own code in which it was, if that is known.
    """

    value: Any = None
    error: BaseException | None = None
    where: str | None = None


def run_guarded(call: Callable[[], Any], seconds: float) -> Ran:
    """Calls something, in this thread, and stops it when its time is up.

    Only Python code can be stopped: a call into compiled code is waited for. Ctrl-C goes through.
    """
    alarm = _Alarm(seconds)
    try:
        with alarm:
            return Ran(value=call())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Ran(error=error, where=_where(error))


class _Alarm:
    """Raises `TooLong` in the thread that entered it, unless that has left before."""

    def __init__(self, seconds: float) -> None:
        self._thread = threading.get_ident()
        self._lock, self._is_over, self._has_rung = threading.Lock(), False, False
        self._timer = threading.Timer(seconds, self._ring)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
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
