"""An engine under way that can be watched: its trace grows in a log, and it can be played, paused and stepped.

    any thread                                      the engine's thread

    play, pause, step, speed, submit, abort  ──▶   between two steps
    the log's readers                        ◀──   a line for whatever happens

Tokens reach a reader through the trace, so the requests' streams are not read. Planned requests are added in the
engine's thread right before their step, which makes two runs of one plan the same.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from teachllm_webui.plan import Plan, PlannedRequest
from teachllm_webui.trace_log import TraceLog

if TYPE_CHECKING:
    from teachllm.engine.llm_engine import Engine

T = TypeVar("T")
_STEP = '{"event":"step"'


class LiveRun:
    """One engine under way. It begins paused.

    Args:
        changed: notified whenever a line was written or one of the attributes below has changed.
        turn: held during each step, by one of several runs at a time; None: it is alone.

    Attributes:
        log: its trace.
        next_step: the number of the step that comes next.
        is_done: nothing is left to do, and no request is to come.
        has_ended: the engine is gone.
        error: what went wrong last, in words; None if nothing has. Whoever has told it may set it to None.

    Raises:
        ValueError: the settings are refused.
    """

    def __init__(
        self, plan: Plan, changed: threading.Condition | None = None, turn: threading.Lock | None = None
    ) -> None:
        from teachllm_webui.turns import TakingTurns

        self.log = TraceLog(changed=changed)
        self.next_step = plan.first_step
        self.is_done = False
        self.error: str | None = None
        self.has_ended = False
        named = [replace(request, name=request.name or str(i)) for i, request in enumerate(plan.requests)]
        self._planned = deque(sorted(named, key=lambda request: request.at_step))
        self._names = {*plan.under_way, *(request.name for request in named)}
        self._engine = plan.make_engine(self._write)
        settings = {"on_step": self._after_step, "on_end": self._end, "is_paused": True}
        self._llm = TakingTurns(self._engine, turn or threading.Lock(), **settings)
        try:
            self._order(lambda: None)
        except BaseException:
            self._llm.close()
            raise

    # -- pace ----------------------------------------------------------------------------------------------

    @property
    def is_playing(self) -> bool:
        return not self._llm.is_paused and not self.has_ended

    def play(self) -> None:
        self._llm.resume()
        self._tell()

    def pause(self) -> None:
        self._llm.pause()
        self._tell()

    def step(self, count: int = 1) -> None:
        """Pauses, and takes so many steps. Without anything to do nothing changes: a later prompt begins at once."""
        if self.is_done:
            return
        if self.is_playing:  # pausing again would forget steps that are still to be taken
            self.pause()
        self._llm.step(count)

    def set_speed(self, steps_per_s: float | None) -> None:
        """None is as fast as it goes.

        Raises:
            ValueError: it is nothing that could be waited for.
        """
        if steps_per_s is not None and not steps_per_s > 0:
            raise ValueError(f"{steps_per_s} steps per second: choose more than none")
        self._llm.set_pace(1 / steps_per_s if steps_per_s else 0.0)

    # -- requests ------------------------------------------------------------------------------------------

    def knows(self, name: str) -> bool:
        """Return whether a request has had this name, or will."""
        return name in self._names

    def submit(self, request: PlannedRequest) -> None:
        """Adds a request between two steps. Its text becomes ids here, so that no step waits for that.

        Raises:
            ValueError: it is refused, in one line.
        """
        request = replace(request, prompt=self._token_ids(request), is_chat=False)
        self._order(lambda: self._add(request))

    def abort(self, name: str) -> None:
        """Ends a request, or one completion of it; nothing happens if it has ended."""
        self._order(lambda: self._engine.abort_request(name))

    def so_far(self) -> tuple[list[str], list[PlannedRequest]]:
        """The trace and who is still to come, of one moment between two steps."""
        if self.has_ended:
            return self.log.upto(), []
        return self.inspect(lambda engine: (self.log.upto(), list(self._planned)))

    def inspect(self, read: Callable[[Engine], T]) -> T:
        """Return what something reads off the engine, between two steps."""
        return self._llm.call(lambda: read(self._engine)).result()

    def close(self) -> None:
        self._llm.close()

    def _order(self, order: Callable[[], Any]) -> None:
        """Do something between two steps, after which a request may be due."""

        def work() -> None:
            try:
                order()
            finally:
                self._add_due()

        self._llm.call(work).result()

    def _token_ids(self, request: PlannedRequest) -> list[int]:
        if not isinstance(request.prompt, str):
            return list(request.prompt)
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise ValueError("the engine has no tokenizer: give token ids")
        if not request.is_chat:
            return tokenizer.encode(request.prompt)
        system = [{"role": "system", "content": request.system}] if request.system else []
        return tokenizer.apply_chat_template([*system, {"role": "user", "content": request.prompt}])

    # -- the engine's thread -------------------------------------------------------------------------------

    def _write(self, line: str) -> None:
        if line.startswith(_STEP):
            self.next_step += 1
        self.log.append(line)

    def _after_step(self, error: Exception | None) -> None:
        if error is not None:  # the request is not known: all end, or the step would fail for ever
            self.error = f"a step failed: {error!r}"
            self._planned.clear()
            self._llm.pause()
            for name in self._engine.unfinished_ids:
                self._engine.abort_request(name)
        self._add_due()

    def _add_due(self) -> None:
        while self._planned and (self._planned[0].at_step <= self.next_step or self._is_idle):
            try:
                self._add(self._planned[0])
            except ValueError as error:
                self.error = f"a request that was planned is refused: {error}"
            self._planned.popleft()
        is_done = self._is_idle and not self._planned
        if is_done != self.is_done or self.error:
            self.is_done = is_done
            self._tell()

    @property
    def _is_idle(self) -> bool:
        return not self._engine.has_unfinished_requests

    def _add(self, request: PlannedRequest) -> None:
        name = request.name or self._llm.next_id()
        prompt = {"prompt_token_ids": self._token_ids(request)}
        self._engine.add_request(name, prompt, request.params, priority=request.priority, cache_salt=request.cache_salt)
        self._names.add(name)

    def _end(self, error: Exception | None) -> None:
        if error is not None:
            self.error = f"the engine has ended: {error!r}"
        self.has_ended = self.is_done = True
        self._tell()

    def _tell(self) -> None:
        with self.log.changed:
            self.log.changed.notify_all()
