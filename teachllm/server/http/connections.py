"""Connections: those on which nothing happens are closed, and an offer of another protocol is not taken up."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

PATIENCE = 30.0  # seconds: each connection takes a descriptor, and there are only so many
_UPGRADE = re.compile(rb"^upgrade(?=[ \t]*:)", re.IGNORECASE | re.MULTILINE)


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of two classes, as installed
    """uvicorn's protocol, which would wait for ever for a request that never comes whole.

    It would also lose the body of a request that offers HTTP/2 (`Upgrade: h2c`), as Java's clients do: what follows
    such a head counts as the other protocol. So the offer is taken out of the head.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._last_request: Any = None
        self._next_look: asyncio.TimerHandle = self.loop.call_later(PATIENCE, self._look)

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body):  # a head comes
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"X-Upgrade", head) + end + rest
        super().data_received(data)

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
