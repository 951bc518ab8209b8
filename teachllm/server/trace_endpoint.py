"""Serve GET /trace: the engine's trace as it is written, to all subscribers.

    engine's thread ──▶ hub: header, and the last lines within a limit ──▶ subscribers, each at its own line

No subscriber has a queue of its own. One that is so slow that the hub has dropped its next line is cut off, so a
subscriber costs the server nothing but what it sends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator

MAX_BYTES = 64 << 20
_MAX_PIECE = 1 << 18  # bytes in one `send`


class TraceHub:
    """Lines of one trace.

    Args:
        max_bytes: of lines that are kept, beside the header.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self.header: bytes | None = None
        self._lines: list[bytes] = []  # those from index `_num_gone` on; in front of it, what awaits clearing away
        self._start = 0  # in `_lines`
        self.num_gone = 0  # lines that were let go of
        self._num_bytes = 0
        self.has_ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.watchers: set[Watcher] = set()
        self._is_waking = False

    def sink(self, line: str) -> None:
        """Takes a line, in any thread."""
        data = line.encode("utf-8", "replace")
        with self._lock:
            if self.header is None:
                self.header = data
            else:
                self._lines.append(data)
                self._num_bytes += len(data)
                self._let_go()
        self._wake()

    def close(self) -> None:
        """No more lines come: subscribers get what there is, and end."""
        self.has_ended = True
        self._wake()

    def watch(self) -> Watcher:
        """Another subscriber, of the running loop."""
        self._loop = asyncio.get_running_loop()
        return Watcher(self)

    def lines_from(self, at: int) -> list[bytes] | None:
        """Some lines from number `at` on; None if that one is gone."""
        with self._lock:
            if at < self.num_gone:
                return None
            first = last = self._start + at - self.num_gone
            size = 0
            while last < len(self._lines) and size < _MAX_PIECE:
                size += len(self._lines[last])
                last += 1
            return self._lines[first:last]

    def _let_go(self) -> None:
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._lines[self._start])
            self._lines[self._start] = b""
            self._start += 1
            self.num_gone += 1
        if self._start > len(self._lines) // 2:
            del self._lines[: self._start]
            self._start = 0

    def _wake(self) -> None:
        """Once for all lines that come before the event loop gets to it."""
        if self._loop is None or not self.watchers or self._is_waking:
            return
        self._is_waking = True
        try:
            self._loop.call_soon_threadsafe(self._wake_watchers)
        except RuntimeError:  # the loop is closed
            self.watchers.clear()

    def _wake_watchers(self) -> None:
        self._is_waking = False
        for watcher in self.watchers:
            watcher.news.set()


class Watcher:
    """One subscriber."""

    def __init__(self, hub: TraceHub) -> None:
        self._hub = hub
        self._has_left = False
        self.news = asyncio.Event()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The trace as events, from its header on; a comment says where lines are missing."""
        hub = self._hub
        hub.watchers.add(self)
        try:
            yield b": trace\n\n"
            while hub.header is None and not (hub.has_ended or self._has_left):
                await self._wait()
            if hub.header is not None:
                yield _event(hub.header)
            at = hub.num_gone
            if at:
                yield b": the first %d lines after the header are gone\n\n" % at
            while not self._has_left:
                lines = hub.lines_from(at)
                if lines is None:
                    yield b": too slow: lines were let go of before they were read\n\n"
                    return
                if lines:
                    at += len(lines)
                    yield b"".join(map(_event, lines))
                elif hub.has_ended:
                    return
                else:
                    await self._wait()
        finally:
            hub.watchers.discard(self)

    async def leave(self) -> None:
        """Ends the events."""
        self._has_left = True
        self.news.set()

    async def _wait(self) -> None:
        await self.news.wait()
        self.news.clear()


def _event(line: bytes) -> bytes:
    return b"data: " + line + b"\n\n"
