"""Lines to two ranks that exist in a test alone: it writes what they say."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from teachllm import EngineConfig
from teachllm.worker.errors import EngineDeadError
from teachllm.worker.processes import multiprocess
from teachllm.worker.processes.answers import Kind
from teachllm.worker.processes.multiprocess import MultiprocessExecutor, Peers
from teachllm.worker.processes.rank_lines import Frame, RankWork
from tests.worker.engines import tiny

TWO = {"tensor_parallel_size": 2}
READY: list[Frame] = [(rank, Kind.READY, 0, b"120") for rank in range(2)]


def frame(rank: int, kind: Kind, content: Any, number: int = 0) -> Frame:
    """Return what a rank says in JSON."""
    return rank, kind, number, json.dumps(content).encode()


class Scripted:
    """Stands for `RankProcesses`.

    Attributes:
        script: what is to be received, in turn: a frame, or an error that is raised instead. After its end time passes
            and nobody says anything.
        now: what the executor's clock shows.
    """

    sentinel = -1
    first: Sequence[Frame] = READY

    def __init__(self, ranks: Sequence[int]) -> None:
        self.frames, self.script = deque[Frame](), deque[Frame | BaseException]()
        self.death: str | None = None
        self.now, self.is_killed, self.is_closed = 0.0, False, False

    def start(self, work: RankWork) -> None:
        self.frames.extend(self.first)

    def write(self, message: bytes) -> None:
        assert self.death is None

    def receive(self, seconds: float | None = None) -> None:
        if self.death is not None:
            raise EngineDeadError(self.death)
        if not self.script:
            assert seconds is not None, "waits for somebody who says nothing any more"
            self.now += seconds
            return
        said = self.script.popleft()
        if isinstance(said, BaseException):
            raise said
        self.frames.append(said)

    def end(self, why: str) -> None:
        self.death = self.death or why

    def kill(self) -> None:
        self.is_killed = True

    def close(self) -> None:
        self.is_closed = True


def scripted(
    patch: pytest.MonkeyPatch, first: Sequence[Frame] = READY, peers: Peers | None = None
) -> tuple[MultiprocessExecutor, Scripted]:
    """Return an executor whose ranks have said what `first` holds, and its lines to them.

    Raises:
        Exception: whatever the executor makes of what they have said; it has ended them then.
    """
    made: list[Scripted] = []

    def make(ranks: Sequence[int]) -> Scripted:
        made.append(Scripted(ranks))
        made[0].first = first
        return made[0]

    patch.setattr(multiprocess, "RankProcesses", make)
    patch.setattr(multiprocess, "time", SimpleNamespace(monotonic=lambda: made[0].now, sleep=lambda seconds: None))
    try:
        executor = MultiprocessExecutor(EngineConfig(**tiny(**TWO)), peers=peers)
    except BaseException:
        assert made[0].is_killed and made[0].is_closed
        raise
    return executor, made[0]
