"""The lines between an engine and its ranks, whoever starts these and wherever they are.

    RankProcesses    of this machine        one message through shared memory, a pipe back from each
    RankHosts        of several machines    one message to each other machine, and there the same

`MultiprocessExecutor` speaks through either: a message goes to all ranks, frames come back from each, and the death of
one is the end of all, since half of a model computes nothing.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from teachllm.config import EngineConfig
from teachllm.distributed.rendezvous import Rendezvous
from teachllm.worker.processes.answers import Kind

Frame: TypeAlias = tuple[int, Kind, int, bytes]  # a rank, and what it says, see `answers.py`


@dataclass(frozen=True)
class RankWork:
    """Describe what ranks are started for.

    Attributes:
        config: resolved for the model; its device is that of a machine's first rank.
        replica: which of several that share experts.
        rendezvous: where the ranks meet; None: whoever starts them decides.
        times_steps: as of `Worker`.
    """

    config: EngineConfig
    replica: int = 0
    rendezvous: Rendezvous | None = None
    times_steps: bool = False


class RankLines(Protocol):
    """All but `end` is for one thread.

    Attributes:
        frames: what was received and has not been taken yet, in the order of each rank.
        sentinel: readable once one has ended without being told to.
    """

    frames: deque[Frame]
    sentinel: int

    @property
    def death(self) -> str | None:
        """Return why all ranks have ended, if they have."""

    def start(self, work: RankWork) -> None:
        """Start the ranks.

        Raises:
            ValueError: they cannot be there; names the setting.
            EngineDeadError: one has ended already.
        """

    def write(self, message: bytes) -> None:
        """Send a message to all ranks.

        Raises:
            EngineDeadError: one has ended.
        """

    def receive(self, seconds: float | None = None) -> None:
        """Wait until any rank sends something, or for `seconds`; `frames` has it then.

        Raises:
            EngineDeadError: one has ended.
        """

    def end(self, why: str) -> None:
        """End all ranks at once. The first reason counts; what it leads to does not."""

    def kill(self) -> None:
        """Stop the ranks at once, so that `close` need not wait: a rank that loads may take minutes."""

    def close(self) -> None:
        """End all ranks, after what they are doing, and wait for that."""


@contextlib.contextmanager
def whole(end: Callable[[str], None]) -> Iterator[None]:
    """End the engine on Ctrl-C in here: it would leave half of a message, and a reader waiting for the rest."""
    try:
        yield
    except KeyboardInterrupt:
        end("interrupted in the middle of a message")
        raise
