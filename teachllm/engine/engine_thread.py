"""An engine that steps in a thread of its own, at a pace that can be set from outside.

    any thread or event loop                      the engine's thread

    call, pause, close            ── orders ──▶   carries them out between two steps
                                                  step, step, step ...

No other thread touches the engine, so none has to wait for a step, and a step waits for none. What comes of the steps
is `AsyncLLM`'s to give to those who asked.

The engine's core may have a process of its own: the thread then takes what that process has done, instead of doing it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from teachllm.engine.llm_engine import Engine, EngineDeadError
from teachllm.engine.observability.engine_clock import EngineClock
from teachllm.engine.observability.stats import StepStats
from teachllm.outputs import RequestOutput

T = TypeVar("T")
Order = tuple[Callable[[], Any], "Future[Any]"]


class EngineThread:
    """Run an engine in a thread. A subclass handles outputs in `_take` and errors in `_fail`.

    Args:
        engine: belongs to this from now on; `close` closes it.
        on_step: called in the thread after every step, with the error if it failed.
        on_stats: called in the thread whenever there are new figures, at least after every step.
        on_end: called in the thread when it ends, with the error if it was not closed.
        is_paused: as after `pause`, from the beginning.

    Raises:
        ValueError: it is to be paused, and the core has a process of its own, which keeps its own pace.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: Callable[[Exception | None], None] | None = None,
        on_stats: Callable[[StepStats], None] | None = None,
        on_end: Callable[[Exception | None], None] | None = None,
        is_paused: bool = False,
    ) -> None:
        if is_paused:
            _check_it_can_wait(engine)
        self._engine = engine
        self._on_step = on_step or (lambda error: None)
        self._on_end = on_end or (lambda error: None)
        self._on_stats = on_stats
        if on_stats is not None:
            engine.count()
        self._orders: deque[Order] = deque()
        self._wake = threading.Condition()
        self._is_paused, self._is_closing = is_paused, False
        self._death: EngineDeadError | None = None
        self._num_single_steps = 0
        self._pace, self._last_step = 0.0, -math.inf  # seconds; when the last step began
        clock = None if engine.is_elsewhere else engine.core.clock
        self._clock = clock if isinstance(clock, EngineClock) else None  # of a trace: it stands still while this waits
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- for a class of this: all in the thread ------------------------------------------------------------

    def _take(self, changed: list[RequestOutput]) -> None:
        """Take the outputs that a step has changed."""

    def _let_in(self) -> None:
        """Let waiting requests in, if there is room for them."""

    def _fail(self, error: Exception) -> None:
        """End all requests: which of them a step failed for is not known."""

    def _give_up(self, error: Exception) -> None:
        """Note that no step will come any more."""

    # -- from anywhere -------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop beginning further steps; requests may be added and aborted.

        Raises:
            ValueError: the core has a process of its own, which keeps its own pace.
        """
        _check_it_can_wait(self._engine)
        with self._wake:
            self._is_paused, self._num_single_steps = True, 0

    def resume(self) -> None:
        with self._wake:
            self._is_paused, self._num_single_steps = False, 0
            self._wake.notify()

    def step(self, count: int = 1) -> None:
        """Run `count` steps while it is paused, if there is work."""
        with self._wake:
            if self._is_paused and (self._engine.has_unfinished_requests or self._orders):
                self._num_single_steps += count
            self._wake.notify()

    def set_pace(self, seconds: float) -> None:
        """Set the least time from one step's beginning to the next one's.

        Raises:
            ValueError: less than none, or more than an hour; or the core has a process of its own.
        """
        _check_it_can_wait(self._engine)
        if not 0 <= seconds <= 3600:
            raise ValueError(f"a pace of {seconds} seconds per step: choose 0 to 3600")
        with self._wake:
            self._pace = seconds
            self._wake.notify()

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def call(self, order: Callable[[], T]) -> Future[T]:
        """Run something in the engine's thread, between two steps: the only way to look at the engine from outside.

        Raises:
            EngineDeadError: a process of the engine has ended.
            RuntimeError: it is closed.
        """
        done: Future[T] = Future()
        with self._wake:
            if self._death is not None:
                raise EngineDeadError(str(self._death)) from self._death
            if self._is_closing:
                raise RuntimeError("the engine is closed")
            self._orders.append((order, done))
            self._wake.notify()
        self._engine.interrupt()
        return done

    def close(self) -> None:
        """End its requests, its thread and the engine. Wait for a step under way."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._engine.interrupt()
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        _name_this_thread("engine")
        failure: Exception | None = None
        try:
            self._loop()
        except Exception as caught:  # not of a step, which `_step` looks after
            failure = caught
        error = failure or RuntimeError("the engine is closed")
        with self._wake:
            self._is_closing = True
            self._death = failure if isinstance(failure, EngineDeadError) else None
            orders, self._orders = self._orders, deque()
        self._fail(error)
        for _, done in orders:
            refuse(done, error)
        self._give_up(error)
        try:
            self._engine.close()
        finally:
            self._on_end(failure)

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._rest(lambda: bool(self._orders) or self._may_step() or self._is_closing)
                orders, self._orders = self._orders, deque()
                is_closing = self._is_closing
            for order in orders:
                carry_out(*order)
            self._let_in()
            if is_closing:
                return
            if not self._may_step():
                self._tell_stats()  # no step will
            elif (early := self._last_step + self._pace - time.monotonic()) > 0:
                self._wait(early, self._pace)
            else:
                self._step()

    def _wait(self, seconds: float, pace: float) -> None:
        """Wait for the next step's time, or until something else is to be done."""
        with self._wake:
            self._rest(lambda: bool(self._orders) or self._is_closing or self._pace != pace, seconds)

    def _rest(self, is_over: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until something holds, or for so long."""
        if not is_over():
            with self._resting():
                self._wake.wait_for(is_over, seconds)

    @contextlib.contextmanager
    def _resting(self) -> Iterator[None]:
        """Hold the engine's clock."""
        if self._clock is not None:
            self._engine.core.wait_for_pending()  # the engine rests only when its device does
            self._clock.hold()
        try:
            yield
        finally:
            if self._clock is not None:
                self._clock.go_on()

    def _may_step(self) -> bool:
        if self._engine.is_elsewhere:
            return True  # to listen
        return self._engine.has_unfinished_requests and (not self._is_paused or self._num_single_steps > 0)

    def _step(self) -> None:
        self._last_step = time.monotonic()
        changed: list[RequestOutput] = []
        failure: Exception | None = None
        try:
            changed = self._engine.step()
        except EngineDeadError:
            raise
        except Exception as error:
            self._fail(error)
            failure = error
        self._take(changed)
        self._let_in()
        with self._wake:
            self._num_single_steps = max(self._num_single_steps - 1, 0)
            if not self._engine.has_unfinished_requests:
                self._num_single_steps = 0
        self._tell_stats()
        self._on_step(failure)

    def _tell_stats(self) -> None:
        if self._on_stats is not None and (stats := self._engine.stats()) is not None:
            self._on_stats(stats)


def _name_this_thread(name: str) -> None:
    """Give it a name that the system's tools show, such as `top -H`."""
    with contextlib.suppress(OSError):  # on Linux alone
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name, encoding="ascii")


def carry_out(order: Callable[[], Any], done: Future[Any]) -> None:
    """Run what was ordered, unless the order was cancelled."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(order())
    except Exception as error:
        done.set_exception(error)


def refuse(done: Future[Any], error: BaseException) -> None:
    """Refuse what was ordered."""
    if done.set_running_or_notify_cancel():
        done.set_exception(error)


def _check_it_can_wait(engine: Engine) -> None:
    if engine.is_elsewhere:
        raise ValueError(
            "the engine's core has a process of its own and keeps its own pace: set own_process=False and "
            "data_parallel_size=1"
        )
