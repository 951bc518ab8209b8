"""Connections on which nothing happens are closed: each takes a descriptor, and there are only so many."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

PATIENCE = 30.0  # seconds


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of two classes, as installed
    """uvicorn's protocol, which would wait for ever for a request that never comes whole."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._last_request: Any = None
        self._next_look: asyncio.TimerHandle = self.loop.call_later(PATIENCE, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Close it if no request has begun since the last look, or none at all."""
        request = self.cycle
        is_silent = request is None or request.response_complete
        if is_silent and request is self._last_request:
            self.transport.close()
            return
        self._last_request = request if is_silent else None
        self._next_look = self.loop.call_later(PATIENCE, self._look)
