"""Machines that join an engine, as threads, and a connection to one that can be cut or fall silent."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Sequence
from typing import Any

from teachllm.worker.processes.host import join


class Joining(threading.Thread):
    """A machine, and what came of it.

    Attributes:
        ranks: that are to be here, as soon as the engine has begun.
        error: what ended it; None: the engine told it to end.
    """

    def __init__(self, address: str, secret: str = "sesame", place: int | None = None) -> None:
        super().__init__(daemon=True)
        self.place = place
        self._join = lambda: join(address, secret, place=place, joined=self._joined)
        self.ranks: list[int] = []
        self.error: BaseException | None = None
        self.start()

    def _joined(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)

    def run(self) -> None:
        try:
            self._join()
        except BaseException as error:
            self.error = error


class Cable:
    """Passes on bytes between whoever connects to `address` and a port of this machine."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._port = port
        self._woken, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Close the connection: what both ends see when the process at the other one has ended."""
        self.fall_silent()
        for end in self._ends:
            end.close()

    def fall_silent(self) -> None:
        """Pass on nothing any more: what both ends see when the machine at the other one hangs."""
        self._waker.send(b"!")
        self._thread.join()

    def close(self) -> None:
        self.cut()
        for each in (self._listener, self._woken, self._waker):
            each.close()

    def _run(self) -> None:
        self._ends = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._port))
        others: dict[Any, socket.socket] = dict(zip(self._ends, reversed(self._ends), strict=True))
        with selectors.DefaultSelector() as selector:
            for source in (*self._ends, self._woken):
                selector.register(source, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        self._woken.recv(1)
                        return
                    received = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    if not received:
                        return
                    others[key.fileobj].sendall(received)
