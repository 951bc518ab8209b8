"""AsyncLLM: the engine in a thread of its own, and requests as streams.

    any thread or event loop                      the engine's thread

    generate, abort, pause, call  ── orders ──▶   carries them out between two steps
    a stream's reader             ◀── what is new ──  step

Nobody else touches the engine, so nobody has to wait for a step, and a step waits for nobody. A stream keeps what its
reader has not taken yet as one change, however many steps it took: a slow reader costs no memory. A limit on the
requests that are unfinished makes those who add more wait.

llm = AsyncLLM(Engine(EngineConfig(model="teachlm")))
async for output in llm.generate("What is a KV cache?"):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from teachllm.engine.engine import Engine, Prompt
from teachllm.engine.output_stream import OutputStream
from teachllm.outputs import RequestOutput
from teachllm.sampling_params import SamplingParams

T = TypeVar("T")
_Order = tuple[Callable[[], Any], "Future[Any]"]


class AsyncLLM:
    """Requests as streams.

    Args:
        engine: belongs to this from now on; `close` closes it.
        max_requests: that are unfinished at once; one more waits in `generate` until another has ended. None: no limit.
        on_step: called in the engine's thread after every step, with the error if it failed.
        on_end: called in the engine's thread when it ends, with the error if nobody closed it.
        is_paused: as after `pause`, from the beginning.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_requests: int | None = None,
        on_step: Callable[[Exception | None], None] | None = None,
        on_end: Callable[[Exception | None], None] | None = None,
        is_paused: bool = False,
    ) -> None:
        self._engine = engine
        self._on_step = on_step or (lambda error: None)
        self._on_end = on_end or (lambda error: None)
        self._max_requests = max_requests
        self._num_requests = 0
        # The engine's thread alone has these: streams of unfinished requests, and requests for which there is no room.
        self._streams: dict[str, OutputStream] = {}
        self._arriving: deque[tuple[str, _Order]] = deque()
        self._orders: deque[_Order] = deque()
        self._wake = threading.Condition()
        self._is_paused, self._is_closing = is_paused, False
        self._num_single_steps = 0
        self._pace, self._last_step = 0.0, -math.inf  # seconds; when the last step began
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- requests ------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answers one prompt, yielding its output whenever it has grown. Leaving the loop early aborts it.

        Args:
            prompt, sampling_params, options: as in `Engine.add_request`.
            request_id: None makes one.

        Yields:
            One object, this caller's own, as far as it has come; the last one is finished.

        Raises:
            ValueError: as `Engine.add_request`.
            Exception: a step failed; every request that was unfinished then ends so.
        """
        name = request_id or self.next_id()
        stream = OutputStream(asyncio.get_running_loop())
        added: Future[None] = Future()
        add = partial(self._add, stream, name, prompt, sampling_params, options)
        queued = self.call(lambda: self._arriving.append((name, (add, added))))
        try:
            await asyncio.wrap_future(queued)
            await asyncio.wrap_future(added)
            while not stream.has_ended:
                yield await stream.next()
        finally:
            added.cancel()  # of somebody who gave up waiting for room
            if not stream.has_ended:
                await self._ask(lambda: self._leave(name, stream))

    async def abort(self, request_id: str) -> None:
        """Ends a request. Its stream ends with what there is; nothing happens if it has ended already."""
        await self._ask(lambda: self._abort(request_id))

    def next_id(self) -> str:
        """An id that this has given to no other request."""
        self._num_requests += 1
        return f"request-{self._num_requests}"

    # -- the engine's pace ---------------------------------------------------------------------------------

    def pause(self) -> None:
        """No further step begins; requests may be added and aborted."""
        with self._wake:
            self._is_paused, self._num_single_steps = True, 0

    def resume(self) -> None:
        with self._wake:
            self._is_paused, self._num_single_steps = False, 0
            self._wake.notify()

    def step(self, count: int = 1) -> None:
        """While it is paused: so many steps, if there is work."""
        with self._wake:
            if self._is_paused and (self._engine.has_unfinished_requests or self._orders):
                self._num_single_steps += count
            self._wake.notify()

    def set_pace(self, seconds: float) -> None:
        """From one step's beginning to the next one's pass at least so many seconds.

        Raises:
            ValueError: less than none, or more than an hour.
        """
        if not 0 <= seconds <= 3600:
            raise ValueError(f"a pace of {seconds} seconds a step: choose 0 to 3600")
        with self._wake:
            self._pace = seconds
            self._wake.notify()

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def call(self, order: Callable[[], T]) -> Future[T]:
        """Runs something in the engine's thread, between two steps: the only way to look at the engine from outside.

        Raises:
            RuntimeError: it is closed.
        """
        done: Future[T] = Future()
        with self._wake:
            if self._is_closing:
                raise RuntimeError("the engine is closed")
            self._orders.append((order, done))
            self._wake.notify()
        return done

    def close(self) -> None:
        """Ends its requests, its thread and the engine. A step under way is waited for."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    async def _ask(self, order: Callable[[], None]) -> None:
        """As `call`, waited for; of a closed engine nothing is left to be asked for."""
        with contextlib.suppress(RuntimeError):
            done = self.call(order)
            await asyncio.wrap_future(done)

    # -- the engine's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            self._loop()
        except Exception as caught:  # not of a step, which `_step` looks after
            failure = caught
        error = failure or RuntimeError("the engine is closed")
        with self._wake:
            self._is_closing = True
            orders, self._orders = self._orders, deque()
        self._fail(error)
        for _, done in (*orders, *(order for _, order in self._arriving)):
            if done.set_running_or_notify_cancel():
                done.set_exception(error)
        try:
            self._engine.close()
        finally:
            self._on_end(failure)

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._orders or self._may_step() or self._is_closing)
                orders, self._orders = self._orders, deque()
                is_closing = self._is_closing
            for order in orders:
                _carry_out(*order)
            self._let_in()
            if is_closing:
                return
            if self._may_step():
                pace = self._pace
                if (early := self._last_step + pace - time.monotonic()) > 0:
                    self._wait(early, pace)
                else:
                    self._step()

    def _wait(self, seconds: float, pace: float) -> None:
        """For the next step's time, or until something else is to be done."""
        with self._wake:
            self._wake.wait_for(lambda: self._orders or self._is_closing or self._pace != pace, seconds)

    def _may_step(self) -> bool:
        return self._engine.has_unfinished_requests and (not self._is_paused or self._num_single_steps > 0)

    def _step(self) -> None:
        self._last_step = time.monotonic()
        changed: list[RequestOutput] = []
        failure: Exception | None = None
        try:
            changed = self._engine.step()
        except Exception as error:
            self._fail(error)
            failure = error
        for output in changed:
            if output.request_id in self._streams:
                self._streams[output.request_id].put(output)
                if output.finished:
                    del self._streams[output.request_id]
        self._let_in()
        with self._wake:
            self._num_single_steps = max(self._num_single_steps - 1, 0)
            if not self._engine.has_unfinished_requests:
                self._num_single_steps = 0
        self._on_step(failure)

    def _let_in(self) -> None:
        while self._arriving and (self._max_requests is None or len(self._streams) < self._max_requests):
            _carry_out(*self._arriving.popleft()[1])

    def _add(
        self, stream: OutputStream, name: str, prompt: Prompt, params: SamplingParams | None, options: dict[str, Any]
    ) -> None:
        stream.begin(self._engine.add_request(name, prompt, params, **options))
        self._streams[name] = stream

    def _abort(self, name: str) -> None:
        waits = next((entry for entry in self._arriving if entry[0] == name), None)
        if waits is not None and name not in self._streams:  # for room: it comes, and goes at once
            self._arriving.remove(waits)
            _carry_out(*waits[1])
        self._engine.abort_request(name)
        stream = self._streams.pop(name, None)
        if stream is not None:
            stream.put(stream.source)

    def _leave(self, name: str, stream: OutputStream) -> None:
        if self._streams.get(name) is stream:  # not another request that had this name first
            self._abort(name)

    def _fail(self, error: Exception) -> None:
        """Nobody knows which request a step failed for: all end."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        for name in streams:
            with contextlib.suppress(Exception):  # a recorder's, say: the stream knows already
                self._engine.abort_request(name)


def _carry_out(order: Callable[[], Any], done: Future[Any]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(order())
    except Exception as error:
        done.set_exception(error)
