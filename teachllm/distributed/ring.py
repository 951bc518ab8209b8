"""A ring of messages in shared memory: one process writes, all ranks read the same bytes.

    slot 0 | slot 1 | slot 2 | ...      writer ── a byte a filled slot ──▶ each reader     (a pipe)
                                        writer ◀── a byte an emptied slot ── each reader   (another one)

A message is written once, however many read it. The bytes in the pipes wake who sleeps and count for who does not: a
reader reads as many slots as it got bytes, the writer fills a slot only if every reader has emptied it. A message
larger than a slot goes through several. The memory has no name, so that nothing is left however the processes end.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import tempfile
from typing import NamedTuple

from teachllm.distributed.spin_wait import spin_until

_HEAD = struct.Struct("=q")  # bytes of the message that are still to come, those of this slot included
SLOT_BYTES, NUM_SLOTS = 1 << 18, 8  # a step of hundreds of decodes fills a tenth of a slot


class RingEnd(NamedTuple):
    """Describe what a reader's process inherits: descriptors, and the shape of the ring."""

    memory: int
    filled: int
    emptied: int
    slot_bytes: int
    num_slots: int

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors, to be passed on."""
        return self[:3]


class RingWriter:
    """The writer's end.

    Attributes:
        ends: of the readers; `hand_over` when they have been passed on.
    """

    def __init__(self, num_readers: int, slot_bytes: int = SLOT_BYTES, num_slots: int = NUM_SLOTS) -> None:
        self._slot_bytes, self._num_slots = slot_bytes, num_slots
        self._file = _memory(slot_bytes * num_slots)
        self._map = mmap.mmap(self._file, slot_bytes * num_slots)
        pipes = [(os.pipe(), os.pipe()) for _ in range(num_readers)]
        self.ends = [
            RingEnd(self._file, filled[0], emptied[1], slot_bytes, num_slots) for filled, emptied in pipes
        ]  # fmt: skip
        self._filled = [filled[1] for filled, _ in pipes]
        self._emptied = [emptied[0] for _, emptied in pipes]
        self._num_free = [num_slots] * num_readers
        self._slot = 0

    def hand_over(self) -> None:
        """Close the readers' ends: each reader has its own copy."""
        for end in self.ends:
            for descriptor in (end.filled, end.emptied):
                os.close(descriptor)
        self.ends = []

    def write(self, data: bytes) -> None:
        """Write a message, and wait as long as its slots are not empty.

        Raises:
            BrokenPipeError: a reader has gone.
        """
        room = self._slot_bytes - _HEAD.size
        for first in range(0, max(len(data), 1), room):
            self._wait_for_room()
            piece = data[first : first + room]
            at = self._slot * self._slot_bytes
            self._map[at : at + _HEAD.size + len(piece)] = _HEAD.pack(len(data) - first) + piece
            self._slot = (self._slot + 1) % self._num_slots
            for reader, descriptor in enumerate(self._filled):
                self._num_free[reader] -= 1
                os.write(descriptor, b"!")

    def _wait_for_room(self) -> None:
        for reader, descriptor in enumerate(self._emptied):
            if self._num_free[reader] == 0:
                told = os.read(descriptor, self._num_slots)
                if not told:
                    raise BrokenPipeError(f"reader {reader} of the ring has gone")
                self._num_free[reader] += len(told)

    def close(self) -> None:
        """Close the ring: readers read what is left, and then that it is the end."""
        self.hand_over()
        for descriptor in (*self._filled, *self._emptied):
            os.close(descriptor)
        self._filled, self._emptied = [], []
        if not self._map.closed:
            self._map.close()
            os.close(self._file)


class RingReader:
    """A reader's end.

    Args:
        spin_seconds: for how long it waits for a message before it goes to sleep.
    """

    def __init__(self, end: RingEnd, spin_seconds: float = 0.0) -> None:
        self._end, self._spin_seconds = end, spin_seconds
        self._poll = select.poll()
        self._poll.register(end.filled, select.POLLIN)
        self._map = mmap.mmap(end.memory, end.slot_bytes * end.num_slots)
        self._slot = 0

    def read(self) -> bytes | None:
        """Wait for the next message; return None if the writer has gone."""
        pieces: list[bytes] = []
        spin_until(lambda: self._poll.poll(0), self._spin_seconds)
        while True:
            if not os.read(self._end.filled, 1):
                return None
            at = self._slot * self._end.slot_bytes
            (missing,) = _HEAD.unpack_from(self._map, at)
            num_bytes = min(missing, self._end.slot_bytes - _HEAD.size)
            pieces.append(self._map[at + _HEAD.size : at + _HEAD.size + num_bytes])
            self._slot = (self._slot + 1) % self._end.num_slots
            with contextlib.suppress(BrokenPipeError):  # the reader has gone and waits for no room
                os.write(self._end.emptied, b"!")
            if num_bytes == missing:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        self._map.close()
        for descriptor in self._end.descriptors:
            os.close(descriptor)


def _memory(num_bytes: int) -> int:
    """Return the descriptor of memory without a name: it is gone with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("teachllm ring")
    else:
        with tempfile.TemporaryFile(prefix="teachllm-ring-") as file:  # has no name from the beginning
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor
