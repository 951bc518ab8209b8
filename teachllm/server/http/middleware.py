"""The front door, before anything else runs: who asks, how it ended, and one line in the log.

Plain ASGI, since a middleware that wraps requests and responses would cost every token of every stream.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any

from teachllm.server.http.body import BodyRest
from teachllm.server.http.errors import ApiError, error_response, kind_of
from teachllm.server.http.request_ids import request_id
from teachllm.server.service import Service

OPEN_PATHS = {"/health", "/metrics", "/version", "/openapi.json"}
_QUIET_PATHS = {"/health", "/metrics"}  # asked every few seconds by machines
_HOST = re.compile(r"(\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[^][:@/ ]+))(:[0-9]*)?")
logger = logging.getLogger("teachllm.requests")


class AccessMiddleware:
    """Asks for the API key, names the request, and logs it.

    `scope["teachllm"]` holds what the log will say; handlers add to it. `scope["teachllm.send"]` is the server's own
    `send`, for the chunks of a stream: what lies between only looks at how an answer begins.
    """

    def __init__(self, app: Any, service: Service) -> None:
        self._app, self._service = app, service
        self._known_hosts = service.options.known_hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        began = time.perf_counter()
        headers = dict(scope["headers"])
        name = request_id(headers.get(b"x-request-id"))
        notes: dict[str, Any] = {"request_id": name}
        scope["teachllm"], scope["teachllm.send"] = notes, send
        status = 0
        scope["root_path"] = root_path = self._service.options.root_path  # routes are looked up below it
        path = scope["path"].removeprefix(root_path)
        body = BodyRest(receive, headers)

        async def send_named(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status >= 400 and path not in _QUIET_PATHS:
                    self._service.metrics.on_refusal(status, kind_of(status))
                if status >= 400:
                    await body.discard()
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name.encode())]}
            await send(message)

        try:
            refusal = self._refusal(path, headers)
            if refusal is None:
                await self._app(scope, body.receive, send_named)
            else:
                await error_response(refusal)(scope, body.receive, send_named)
        finally:
            if self._service.options.log_requests and path not in _QUIET_PATHS:
                self._log(scope, path, status, time.perf_counter() - began, notes)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        host = headers.get(b"host")
        if host is not None and self._known_hosts is not None and _host_name(host) not in self._known_hosts:
            return ApiError(
                403,
                f"this server is not called {_host_name(host)!r}: ask it by its own name, or start it with "
                "--allowed-hosts",
            )
        if not self._may_enter(path, headers):
            return ApiError(
                401,
                "this server needs an API key: send Authorization: Bearer KEY",
                headers={"www-authenticate": "Bearer"},
            )
        return None

    def _may_enter(self, path: str, headers: dict[bytes, bytes]) -> bool:
        if path in OPEN_PATHS:
            return True
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        return self._service.is_key(key.strip() if kind.lower() == b"bearer" else b"")

    def _log(self, scope: Any, path: str, status: int, seconds: float, notes: dict[str, Any]) -> None:
        client = scope.get("client") or ("", 0)
        fields = {"request_id": notes["request_id"], "client": client[0], "method": scope["method"], "path": path}
        fields |= {"status": status, "seconds": round(seconds, 4)}
        for field in ("prompt_tokens", "completion_tokens", "error"):
            if field in notes:
                fields[field] = notes[field]
        logger.info("request", extra={"fields": fields})


def _host_name(host: bytes) -> str:
    """Return the name in a Host header, without its port and without the brackets of an IPv6 address.

    What is no name and port is returned whole: no server is called that.
    """
    given = host.decode("latin-1").lower()
    found = _HOST.fullmatch(given)
    return given if found is None else found["six"] or found["name"].removesuffix(".")
