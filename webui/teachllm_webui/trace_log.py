"""A trace that grows while others read it: who writes appends lines, and each reader has a place of its own in them.

Whoever waits for more waits on a condition, which several logs may share: so a tab waits for all that it shows at once.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

_LOOK_S = 0.1  # how often a file is looked at for more


class TraceLog:
    """Lines so far.

    Args:
        changed: notified at every line; None makes one.
    """

    def __init__(self, lines: list[str] | None = None, changed: threading.Condition | None = None) -> None:
        self._lines = list(lines or ())
        self.changed = changed or threading.Condition()

    def append(self, line: str) -> None:
        with self.changed:
            self._lines.append(line)
            self.changed.notify_all()

    def __len__(self) -> int:
        return len(self._lines)

    def upto(self, end: int | None = None, begin: int = 0) -> list[str]:
        """A copy of some of the lines."""
        with self.changed:
            return self._lines[begin:end]


class FollowedFile:
    """Reads a trace's file, and goes on while it grows.

    Args:
        append: gets each whole line, also one that makes no sense: who shows it says so.
        on_end: called in the follower's thread if there is no going on: with None when another trace has been written
            over this one, else with what is wrong.

    Raises:
        ValueError: it is no file that can be read.
    """

    def __init__(self, path: Path, append: Callable[[str], None], on_end: Callable[[str | None], None]) -> None:
        self._path, self._append, self._on_end, self._rest = path, append, on_end, b""
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise ValueError(f"{path}: not a regular file")
            self._file = open(path, "rb")  # noqa: SIM115 (closed by the thread)
            self._head = self._read_head()
            self._read()
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}") from error
        self._is_closed = threading.Event()
        threading.Thread(target=self._follow, name="trace file", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    def _follow(self) -> None:
        with self._file:
            while not self._is_closed.wait(_LOOK_S):
                try:
                    if self._is_another():
                        return self._on_end(None)
                    self._read()
                except OSError as error:
                    return self._on_end(f"{self._path}: {error.strerror or error}")

    def _is_another(self) -> bool:
        """An engine that is started with the same name writes over the file, or another one takes its place."""
        now, mine = self._path.stat(), os.fstat(self._file.fileno())
        before, self._head = self._head, self._read_head()
        is_same = (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino) and self._head.startswith(before)
        return not is_same or now.st_size < self._file.tell()

    def _read_head(self) -> bytes:
        """The beginning of the header, which has the time."""
        return os.pread(self._file.fileno(), 256, 0)

    def _read(self) -> None:
        """Whole lines only: the last one may still be written."""
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in whole:
            if line.strip():
                self._append(line.decode(errors="replace"))
