"""A request's output on its way from the engine's thread to whoever reads it.

The engine's object grows at the engine's pace, the reader's at the reader's. What lies between them is one change,
however many steps it took, so a reader who never comes back costs no more than one who does.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from copy import copy

from teachllm.outputs import CompletionOutput, RequestOutput


class OutputStream:
    """One request's.

    Args:
        loop: the reader's.

    Attributes:
        source: the engine's object.
        has_ended: the reader knows the end, be it an error.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.source: RequestOutput
        self._loop = loop
        self._lock = threading.Lock()
        self._arrived = asyncio.Event()
        self._taken: RequestOutput | None = None  # the reader's
        self._new: RequestOutput | None = None  # what it has not taken
        self._told: list[int] = []  # tokens of each completion that are in one of the two
        self._num_scored = 0  # prompt tokens whose log-probabilities are
        self._error: Exception | None = None
        self.has_ended = False

    def begin(self, source: RequestOutput) -> None:
        self.source = source
        self._told = [0] * len(source.outputs)

    def put(self, source: RequestOutput) -> None:
        """Pass on how far the output has come."""
        with self._lock:
            if self._new is None:
                self._new = copy(source)
                self._new.outputs = [CompletionOutput(completion.index) for completion in source.outputs]
                self._new.prompt_logprobs = None
            self._new.num_cached_tokens = source.num_cached_tokens
            if source.prompt_logprobs is not None and len(source.prompt_logprobs) > self._num_scored:
                self._new.prompt_logprobs = list(source.prompt_logprobs)
                self._num_scored = len(source.prompt_logprobs)
            for i, (new, completion) in enumerate(zip(self._new.outputs, source.outputs, strict=True)):
                _extend(new, completion, self._told[i])
                self._told[i] = len(completion.token_ids)
        self._wake()

    def fail(self, error: Exception) -> None:
        with self._lock:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the reader's loop is closed: it no longer waits
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def next(self) -> RequestOutput:
        """Return the reader's object, grown; wait until there is something new."""
        new: RequestOutput | None = None
        while new is None:  # it may have been woken for what it has taken already
            await self._arrived.wait()
            with self._lock:
                self._arrived.clear()
                if self._error is not None:
                    self.has_ended = True
                    raise self._error
                new, self._new = self._new, None
        self.has_ended = new.finished
        if self._taken is None:
            self._taken = new
            return new
        self._taken.num_cached_tokens = new.num_cached_tokens
        if new.prompt_logprobs is not None:
            self._taken.prompt_logprobs = new.prompt_logprobs
        for mine, more in zip(self._taken.outputs, new.outputs, strict=True):
            _extend(mine, more, 0)
        return self._taken


class RequestStream:
    """A request's outputs as its reader sees them: one object that grows, as far as it has come.

    Args:
        leave: ends the request, if it has not ended.
    """

    def __init__(self, stream: OutputStream, leave: Callable[[], Awaitable[None]]) -> None:
        self._stream, self._leave = stream, leave

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._stream.has_ended:
            raise StopAsyncIteration
        return await self._stream.next()

    async def aclose(self) -> None:
        """Abort the request, unless it has ended: the reader wants no more."""
        if not self._stream.has_ended:
            self._stream.has_ended = True
            await self._leave()


def _extend(output: CompletionOutput, source: CompletionOutput, first: int) -> None:
    """Add the tokens of `source` from index `first` on, and copy every field that describes the whole."""
    output.token_ids += source.token_ids[first:]
    if source.logprobs is not None:
        if output.logprobs is None:
            output.logprobs = []
        output.logprobs += source.logprobs[first:]
    for name in ("text", "cumulative_logprob", "finish_reason", "stop_reason"):
        setattr(output, name, getattr(source, name))
