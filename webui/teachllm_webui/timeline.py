"""Tell a tab its timelines, what stands around them, and track what it has seen of both."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from teachllm_webui.attach import AttachedServer
from teachllm_webui.live import LiveRun
from teachllm_webui.plan import Plan
from teachllm_webui.trace_log import FollowedFile, TraceLog


@dataclass
class Timeline:
    """One side: a trace, and the engine that writes it, or the file or server that it comes from, if there is one.

    Attributes:
        since: the step after which it differs from the other side.
        work_before: of a fork, the original's seconds of work up to there.
    """

    title: str
    log: TraceLog
    run: LiveRun | None = None
    source: FollowedFile | AttachedServer | None = None
    since: int = -1
    work_before: float = 0.0

    def close(self) -> None:
        if self.run is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self.run.close()
        if self.source is not None:
            self.source.close()


def start_all(plans: Sequence[tuple[str, Plan]], changed: threading.Condition, since: int = -1) -> list[Timeline]:
    """An engine for each titled plan, or none at all. They take their steps in turn, so that none slows another down.

    Raises:
        ValueError: the settings of one are refused.
    """
    with ExitStack() as undo:
        timelines = []
        turn = threading.Lock()
        for title, plan in plans:
            run = LiveRun(plan, changed, turn)
            undo.callback(run.close)
            timelines.append(Timeline(title, run.log, run, since=since, work_before=plan.work_before))
        undo.pop_all()
    return timelines


def drop(sides: Sequence[Timeline], kept: Sequence[Timeline]) -> None:
    """Closes what is not in use any more."""
    in_use = [owner for side in kept for owner in (side.run, side.source) if owner is not None]
    for side in sides:
        if (side.run or side.source) not in in_use:
            side.close()


@dataclass(frozen=True)
class Seen:
    """Describe what a tab has: of which generation, how many lines of each trace, and which status.

    Attributes:
        tab: its name; "" has none.
    """

    generation: int = -1
    cursors: Sequence[int] = ()
    status: int = -1
    tab: str = ""


@dataclass
class Status:
    """Describe what a tab shows around the views.

    Attributes:
        title, look_at: what runs, and what to look at.
        loading: what is being loaded, None if nothing is.
        error: the last one, in words.
        is_done: nothing is left to do, on any side.
        sides_done: on each.
        speed: steps per second, None as fast as it goes.
        is_live: an engine is behind it.
        is_simulation: no engine has computed it.
        is_fork: the second side can be closed.
        follows: the first side shows the newest step, though no engine here makes it.
        connection: how it stands with the server that the trace comes from, in a few words.
        notice: what should be known of that trace.
        axis: of the batch timelines at first: "steps" or "ms".
        show_at: the step at which a finished run is opened; None is that at which most blocks are in use.
        since: the step after which two sides differ.
        work_before: the seconds of work up to there.
        has_ended: an engine is gone.
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
    is_simulation: bool = False
    is_fork: bool = False
    follows: bool = False
    connection: str = ""
    notice: str | None = None
    titles: list[str] = field(default_factory=list)
    sides_done: list[bool] = field(default_factory=list)
    axis: str = "steps"
    show_at: int | None = None
    since: int = -1
    work_before: float = 0.0
    has_ended: bool = False

    def refresh(self, sides: Sequence[Timeline], speed: float | None) -> None:
        """Takes over what the engines and servers say; an engine's error is told once."""
        runs = [side.run for side in sides if side.run is not None]
        servers = [side.source for side in sides if isinstance(side.source, AttachedServer)]
        self.playing, self.is_live = any(run.is_playing and not run.is_done for run in runs), bool(runs)
        self.sides_done = [side.run is None or side.run.is_done for side in sides]
        self.has_ended = any(run.has_ended for run in runs)
        self.is_done = bool(runs) and all(self.sides_done)
        self.connection, self.notice = (servers[0].connection, servers[0].notice) if servers else ("", None)
        self.titles, self.speed = [side.title for side in sides], speed
        self.since = max((side.since for side in sides), default=-1)
        self.work_before = max((side.work_before for side in sides), default=0.0)
        for run in runs:
            if run.error is not None:
                self.error, run.error = run.error, None
