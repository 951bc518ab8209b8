"""A trace's file: what a recorder writes, line by line.

A trace holds what users wrote, so only its owner may read it. A thread of its own writes what has come every
INTERVAL: a step waits for no disk, nor does it wake a thread. A trace can be watched while it grows, and one that ends
in the middle is whole up to there. Where the disk is full, the trace ends with a warning, and the engine goes on.
"""

from __future__ import annotations

import atexit
import logging
import os
import stat
import threading
from collections import deque

INTERVAL = 0.05  # seconds
log = logging.getLogger(__name__)


class TraceFile:
    """A recorder's sink.

    Args:
        path: the file, made or written over. An engine that does not come to its first line leaves the old one.

    Raises:
        ValueError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError as error:
            raise ValueError(f"trace_path={path!r} cannot be written: {error.strerror or error}") from error
        self._file = open(descriptor, "wb")  # noqa: SIM115 (closed by the thread)
        self._is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if self._is_regular:
            os.fchmod(descriptor, 0o600)  # also of a file that was there
        self._path = path
        self._lines: deque[str] = deque()
        self._closed = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # of an engine that is never closed

    def __call__(self, line: str) -> None:
        if not self._has_failed:
            self._lines.append(line)

    def close(self) -> None:
        """Wait until all lines are written."""
        atexit.unregister(self.close)
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        lines = self._lines
        try:
            with self._file as file:
                is_last = False
                while not is_last:
                    is_last = self._closed.wait(INTERVAL)
                    if lines and self._is_regular and not file.tell():
                        file.truncate()
                    while lines:
                        file.write(f"{lines.popleft()}\n".encode())
                    file.flush()
        except OSError as error:
            self._has_failed = True
            lines.clear()
            log.warning("the trace ends here: %s cannot be written: %s", self._path, error.strerror or error)
