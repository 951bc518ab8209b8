"""A trace's file: what a recorder writes, line by line.

A trace holds what users wrote, so nobody but its owner may read it. Each line is there for others as soon as it is
written: a trace can be watched while it grows, and one that ends in the middle is whole up to there.
"""

from __future__ import annotations

import os


class TraceFile:
    """A recorder's sink.

    Args:
        path: the file, made or written over.

    Raises:
        ValueError: it cannot be written.
    """

    def __init__(self, path: str) -> None:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.chmod(path, 0o600)  # also of a file that was there
        except OSError as error:
            raise ValueError(f"trace_path={path!r} cannot be written: {error.strerror or error}") from error
        self._file = open(descriptor, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed by `close`)

    def __call__(self, line: str) -> None:
        self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()
