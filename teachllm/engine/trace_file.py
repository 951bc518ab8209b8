"""A trace's file: what a recorder writes, line by line.

A trace holds what users wrote, so nobody but its owner may read it. Each line is there for others as soon as it is
written: a trace can be watched while it grows, and one that ends in the middle is whole up to there.
"""

from __future__ import annotations

import os
import stat


class TraceFile:
    """A recorder's sink.

    Args:
        path: the file, made or written over.

    Raises:
        ValueError: it cannot be written.
    """

    def __init__(self, path: str) -> None:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError as error:
            raise ValueError(f"trace_path={path!r} cannot be written: {error.strerror or error}") from error
        self._file = open(descriptor, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed by `close`)
        self._is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._is_empty = False
        if self._is_regular:
            os.fchmod(descriptor, 0o600)  # also of a file that was there

    def __call__(self, line: str) -> None:
        if self._is_regular and not self._is_empty:  # an engine that does not come to its header leaves the old trace
            self._file.truncate(0)
            self._is_empty = True
        self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()
