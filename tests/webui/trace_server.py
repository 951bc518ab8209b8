"""A server of traces that does as it is told, and the fixture that starts it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class TraceServer:
    """`GET /trace` in threads of its own, as a server of teachllm gives it.

    Args:
        lines: of the trace.
        num_gone: how many after the header are not to be had any more.
        key: that it asks for.
        status, kind: of its answers.

    Attributes:
        num_open: connections.
        asked: the Authorization header of each request.
    """

    def __init__(
        self,
        lines: list[str],
        num_gone: int = 0,
        key: str | None = None,
        status: int = 200,
        kind: str = "text/event-stream; charset=utf-8",
        port: int = 0,
    ) -> None:
        self.lines, self.num_gone, self.key, self.status, self.kind = list(lines), num_gone, key, status, kind
        self.changed = threading.Condition()
        self.num_open, self._num_cut = 0, 0
        self.asked: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.headers["Authorization"])
                status = 404 if self.path != "/trace" else outer.status
                if outer.key and self.headers["Authorization"] != f"Bearer {outer.key}":
                    status = 401
                self.send_response(status)
                self.send_header("Content-Type", outer.kind)
                self.end_headers()
                if status == 200:
                    outer.send(self.wfile.write, self.connection)

            def log_message(self, *_: Any) -> None:
                pass

        class HTTPServer(ThreadingHTTPServer):
            daemon_threads = allow_reuse_address = True
            block_on_close = False

        self._http = HTTPServer(("127.0.0.1", port), Handler)
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def send(self, write: Callable[[bytes], Any], connection: socket.socket) -> None:
        """All lines, then those to come, until the connection is cut or the other side leaves."""
        at, num_cut = 0, self._num_cut
        self.num_open += 1
        try:
            write(b": trace\n\n")
            while True:
                with self.changed:
                    self.changed.wait_for(partial(self._has_news, at, num_cut), 0.02)
                    lines = self.lines[at:]
                if self._num_cut > num_cut or has_left(connection):
                    return
                if lines and at == 0:
                    write(b"data: " + lines.pop(0).encode() + b"\n\n")
                    if self.num_gone:
                        write(b": the first %d lines after the header are gone\n\n" % self.num_gone)
                    at, lines = 1 + self.num_gone, lines[self.num_gone :]
                for line in lines:
                    write(b"data: " + line.encode() + b"\n\n")
                    at += 1
        finally:
            self.num_open -= 1

    def _has_news(self, at: int, num_cut: int) -> bool:
        return self._num_cut > num_cut or len(self.lines) > at

    def push(self, *lines: str) -> None:
        with self.changed:
            self.lines += lines
            self.changed.notify_all()

    def cut(self) -> None:
        """Ends the connections; new ones are welcome."""
        with self.changed:
            self._num_cut += 1
            self.changed.notify_all()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self.cut()


def has_left(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.setblocking(True)


Serve = Callable[..., TraceServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers = []

    def serve_(*lines: str, **settings: Any) -> TraceServer:
        servers.append(TraceServer([*lines], **settings))
        return servers[-1]

    yield serve_
    for server in servers:
        server.close()
