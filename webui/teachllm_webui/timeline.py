"""What a tab is told: timelines, what stands around them, and what it has seen of both."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from teachllm_webui.compare import Tally
from teachllm_webui.live import LiveRun
from teachllm_webui.plan import Plan
from teachllm_webui.trace_log import FollowedFile, TraceLog


@dataclass
class Timeline:
    """One side: a trace, and the engine that writes it or the file that it comes from, if there is one.

    Attributes:
        since: the step after which it differs from the other side.
    """

    title: str
    log: TraceLog
    run: LiveRun | None = None
    file: FollowedFile | None = None
    since: int = -1

    def __post_init__(self) -> None:
        self.tally = Tally(self.log, self.since)

    def close(self) -> None:
        if self.run is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self.run.close()
        if self.file is not None:
            self.file.close()


def start_all(plans: Sequence[tuple[str, Plan]], changed: threading.Condition, since: int = -1) -> list[Timeline]:
    """An engine for each titled plan, or none at all.

    Raises:
        ValueError: the settings of one are refused.
    """
    with ExitStack() as undo:
        timelines = []
        for title, plan in plans:
            run = LiveRun(plan, changed)
            undo.callback(run.close)
            timelines.append(Timeline(title, run.log, run, since=since))
        undo.pop_all()
    return timelines


@dataclass(frozen=True)
class Seen:
    """What a tab has: of which generation, how many lines of each trace, and which status."""

    generation: int = -1
    cursors: Sequence[int] = ()
    status: int = -1


@dataclass
class Status:
    """What a tab shows around the views.

    Attributes:
        title, look_at: what runs, and what to look at.
        loading: what is being loaded, None if nothing is.
        error: the last one, in words.
        is_done: nothing is left to do, on any side.
        sides_done: on each.
        speed: steps a second, None as fast as it goes.
        is_live: an engine is behind it.
        is_fork: the second side can be closed.
    """

    title: str = ""
    look_at: str = ""
    preset: str | None = None
    loading: str | None = None
    error: str | None = None
    playing: bool = False
    is_done: bool = False
    speed: float | None = None
    is_live: bool = False
    can_fork: bool = False
    is_fork: bool = False
    titles: list[str] = field(default_factory=list)
    sides_done: list[bool] = field(default_factory=list)
