"""Server-sent events: one response whose body is `data: ...` lines, as they come.

The framework's own streaming response runs a group of tasks for each stream and wraps every chunk; at a few hundred
streams and a token each per step that is a good part of what the server does. Here a chunk is one `send`, which waits
while the client's connection is full: so nothing piles up behind a slow reader.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from teachllm.server.http.errors import ApiError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.encode


def event(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"


@contextlib.asynccontextmanager
async def noticing_hangup(
    receive: Callable[[], Awaitable[Any]], action: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """While inside, `action` is called if the client goes away.

    Args:
        receive: ASGI's, of a request whose body has been read.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await action()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` gives; it is cancelled when the client goes away.

    Args:
        request: its body has been read.

    Raises:
        ApiError: 400, which nobody gets.
    """
    task = asyncio.ensure_future(work)

    async def cancel() -> None:
        task.cancel()

    async with noticing_hangup(request.receive, cancel):
        try:
            return await task
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # this runs in one
                raise
            raise ApiError(400, "the client left before its request was answered") from None


class EventStream(Response):
    """Events as they come.

    Args:
        events: whole events, one or several in a piece.
        on_hangup: called if the client goes away; it should make `events` end.
        on_end: called when the response has ended, however it did.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_hangup: Callable[[], Awaitable[None]],
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        self.status_code, self.background = 200, None
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # a proxy that collects what it passes on would undo the streaming
        ]
        self._events, self._on_hangup, self._on_end = events, on_hangup, on_end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            async with contextlib.aclosing(self._events), noticing_hangup(receive, self._on_hangup):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                send_piece = scope.get("teachllm.send", send)
                async for piece in self._events:
                    await send_piece({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._on_end()
