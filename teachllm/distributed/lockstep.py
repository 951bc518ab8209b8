"""Replicas that share experts step together: an idle one takes an empty step whenever any other has work.

    step         1      2      3      4      5
    replica 0   own    own    own    own    own      announces 4 and 5, which no other had before it
    replica 1   own    own    own   empty  empty     hears of them, has nothing to compute, and keeps up

Each counts the steps that it has begun. A replica that begins one no other has announced sends its number. One that has
work need do no more: its next step, whatever it computes, is the next one of all. Who has none takes empty steps up to
the highest number that it heard, then sleeps. So no replica is asked before a step, and none is waited for outside of
it.

Numbers go through pipes, one for each replica to read, which all others write to; so does the word that one leaves.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

_WORD = struct.Struct("=q")  # written at once, so that words of several writers do not mix
_LEAVES = -1  # in place of a number


class LockstepEnd(NamedTuple):
    """A replica's descriptors: where it hears the others, and where it tells each of them."""

    hears: int
    tells: tuple[int, ...]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors, to be passed on."""
        return self.hears, *self.tells


def lockstep_ends(num_replicas: int) -> list[LockstepEnd]:
    """Create one end per replica; the process that passes the ends on closes them, see `close_ends`."""
    pipes = [os.pipe() for _ in range(num_replicas)]
    writers = [writer for _, writer in pipes]
    return [LockstepEnd(pipes[i][0], (*writers[:i], *writers[i + 1 :])) for i in range(num_replicas)]


def close_ends(ends: Sequence[LockstepEnd]) -> None:
    """Close the ends of all replicas."""
    for descriptor in {each for end in ends for each in end.descriptors}:
        os.close(descriptor)


class Lockstep:
    """A replica's count.

    Attributes:
        hears: readable when another one has something to say.
    """

    def __init__(self, end: LockstepEnd) -> None:
        self.hears, self._tells = end
        os.set_blocking(self.hears, False)
        self._num_begun = self._num_wanted = self._num_left = 0

    @property
    def is_behind(self) -> bool:
        """Return whether others have begun a step that this replica has not."""
        return self._num_begun < self._num_wanted

    @property
    def all_leave(self) -> bool:
        """Return whether every other replica leaves as well: none will begin a step any more."""
        return self._num_left == len(self._tells)

    def begin(self) -> None:
        """Count a step that is about to begin."""
        self._num_begun += 1
        if self._num_begun > self._num_wanted:
            self._num_wanted = self._num_begun
            self._tell(self._num_begun)

    def leave(self) -> None:
        """Tell the others that from now on this replica begins no step by itself."""
        self._tell(_LEAVES)

    def hear(self) -> bool:
        """Receive pending messages; return False if no other replica is left."""
        try:
            data = os.read(self.hears, 1 << 16)
        except BlockingIOError:
            return True
        for (number,) in _WORD.iter_unpack(data):
            self._num_left += number == _LEAVES
            self._num_wanted = max(self._num_wanted, number)
        return bool(data)

    def _tell(self, number: int) -> None:
        for descriptor in self._tells:
            with contextlib.suppress(BrokenPipeError):  # it has died, as whoever started it will notice
                os.write(descriptor, _WORD.pack(number))
