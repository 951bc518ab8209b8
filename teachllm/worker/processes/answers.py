"""Send a worker process's answers to the process that started it: frames in a pipe, each a kind, a number, and bytes.

Numbers are those of the plans and calls that a frame answers. JSON, but for outputs of steps, see `plan_codec.py`.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

_HEAD = struct.Struct("=bqq")


class Kind(IntEnum):
    FACTS = 1  # see `agreement.py`
    LOADING = 2  # bytes of weights that are loaded, and in all
    REFUSED = 3  # what, whether it is a fault, a table of where memory goes; nothing follows
    READY = 4  # KV blocks
    OUTPUT = 5  # of a step
    RESULT = 6  # of a call
    FAILED = 7  # a step or a call, and why
    WATCHED = 8  # what a rank did in a step, see `rank_watch.py`


class Answers:
    """The worker's end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, kind: Kind, content: Any, number: int = 0) -> None:
        """Send a frame; bytes as they are, anything else as JSON.

        Raises:
            BrokenPipeError: the reader has gone.
        """
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        frame = memoryview(_HEAD.pack(kind, number, len(body)) + body)
        while frame:
            frame = frame[os.write(self._descriptor, frame) :]


class Listener:
    """The other end: makes frames of what comes, in whatever pieces."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def frames(self, data: bytes) -> Iterator[tuple[Kind, int, bytes]]:
        """Yield the frames that are complete with these bytes."""
        self._unread += data
        while len(self._unread) >= _HEAD.size:
            kind, number, length = _HEAD.unpack_from(self._unread)
            end = _HEAD.size + length
            if len(self._unread) < end:
                return
            body = bytes(self._unread[_HEAD.size : end])
            del self._unread[:end]
            yield Kind(kind), number, body
