"""Hold what the page shows: one timeline, or two side by side, and what may replace them.

Any number of tabs watch one session. Whatever replaces the timelines (a preset, a fork, a what-if) raises the
generation, at which every tab begins anew; in between a tab has a place in each trace and asks for the news since then.
Engines are loaded in a thread, so that the page is up meanwhile and says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

from teachllm.config import EngineConfig
from teachllm_webui.attach import AttachedServer
from teachllm_webui.live import LiveRun
from teachllm_webui.loader import Loader
from teachllm_webui.plan import FORKABLE, UNTRUSTED, PlannedRequest, engine_plan, fork_plan
from teachllm_webui.presets import Preset
from teachllm_webui.timeline import Seen, Status, Timeline, drop, start_all
from teachllm_webui.trace_log import FollowedFile, TraceLog
from teachllm_webui.what_if import WhatIf, run_what_if

MAX_LINES = 1500  # in one answer, so that the first picture of a long trace comes soon
SPEEDS = (0.1, 1000.0)  # steps per second
_TAB_S = 8.0  # a tab that has not asked for news for so long is closed

_Made = tuple[list[Timeline], Status]


class LiveSession:
    """Timelines, and the buttons that act on all of them at once.

    Attributes:
        changed: notified whenever a tab may have news.
        generation: of the timelines; it differs from those of a server that ran before this one.
        home: what the page began with, to come back to: its title, and what starts it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.generation = time.time_ns() // 1_000_000
        self.sides: list[Timeline] = []
        self.status = Status()
        self.home: tuple[str, Callable[[], None]] | None = None
        self._speed: float | None = 10.0
        self._plays = False  # what is being loaded
        self._status_version = 0
        self._shown: Status | None = None
        self._is_awaited = False  # what is being loaded, by who has asked for it
        self._failure: str | None = None  # told to that one alone
        self._is_closed = False
        self._tabs: dict[str, float] = {}  # when each asked for news
        self._loader = Loader[_Made](self._arrive, self._fail)

    # -- what is shown -------------------------------------------------------------------------------------

    def start(self, config: EngineConfig, requests: Sequence[PlannedRequest] = (), play: bool = True) -> None:
        """An engine with these settings."""

        def make() -> _Made:
            timelines = start_all([("", engine_plan(config, requests))], self.changed)
            return timelines, Status(title=config.model, can_fork=config.trace_text)

        self._load(f"loading {config.model}", make, play)

    def start_preset(self, preset: Preset, play: bool = True) -> None:
        def make() -> _Made:
            plans = [(v.title, engine_plan(preset.config(v), preset.requests)) for v in preset.variants]
            status = Status(title=preset.title, look_at=preset.look_at, preset=preset.name, can_fork=True)
            status.axis, status.show_at = preset.axis, preset.show_at
            return start_all(plans, self.changed), status

        self._load(f"loading “{preset.title}”", make, play)

    def replay(self, path: Path) -> None:
        """A trace's file, finished or growing.

        Raises:
            ValueError: it cannot be read.
        """
        log = TraceLog(changed=self.changed)

        def end(problem: str | None) -> None:
            if problem is not None:
                self._say(problem)
            elif any(side.source is file for side in self.sides) and not self.status.loading:
                self.replay(path)  # another trace

        self._refuse_while_loading()
        file = FollowedFile(path, log.append, end)
        self._install(([Timeline(path.name, log, source=file)], Status(title=path.name, can_fork=True)))

    def attach(self, url: str, api_key: str | None = None) -> None:
        """The trace of a running server, from here on.

        Raises:
            ValueError: it cannot be had.
        """
        self._refuse_while_loading()
        server = AttachedServer(url, api_key, self._show_again, self.changed)
        self._show(server)
        server.follow()

    def _show(self, server: AttachedServer) -> None:
        status = Status(title=server.name, can_fork=not server.is_partial, follows=True)
        self._install(([Timeline(server.name, server.log, source=server)], status))

    def _show_again(self, server: AttachedServer) -> None:
        """Its log is another one."""
        with self.changed:
            self.changed.wait_for(lambda: not self.status.loading or self._is_closed)
            is_shown = any(side.source is server for side in self.sides)
        if is_shown:
            self._show(server)

    def what_if(self, form: WhatIf) -> None:
        """A simulation in place of an engine."""

        def make() -> _Made:
            log = TraceLog(run_what_if(form).lines, self.changed)
            title = f"what if: {form.requests} requests on {form.model}"
            return [Timeline("", log)], Status(title=title, is_simulation=True)

        self._load("simulating", make, play=False)

    def fork(self, step: int, changes: dict[str, Any]) -> None:
        """A second engine beside the first timeline, from after a step of it on; other settings, the same requests.

        Raises:
            ValueError: there is nothing to fork.
        """
        if not self.sides or not self.status.can_fork:
            raise ValueError("there is nothing to fork: start a preset or an engine first")
        left, status = self.sides[0], replace(self.status, is_fork=True)

        def make() -> _Made:
            lines, coming = left.run.so_far() if left.run else (left.log.upto(), [])
            told = ", ".join(f"{FORKABLE[name]} {value}" for name, value in changes.items()) or "the same settings"
            plan = fork_plan(lines, step, changes if left.run else changes | UNTRUSTED, coming)
            original = Timeline("original", left.log, left.run, left.source, since=step)
            (fork,) = start_all([(f"fork at step {step}: {told}", plan)], self.changed, since=step)
            return [original, fork], status

        self._load("forking", make, play=left.run is None or left.run.is_done or left.run.is_playing)

    def fork_and_wait(self, step: int, changes: dict[str, Any]) -> None:
        """Fork, and wait until the second engine is there.

        Raises:
            ValueError: there is nothing to fork, or its settings are refused.
        """
        with self.changed:
            self.fork(step, changes)
            self._is_awaited = True
            self.changed.wait_for(lambda: not self.status.loading or self._is_closed)
            failure, self._failure = self._failure, None
        if failure is not None:
            raise ValueError(failure)

    def drop_fork(self) -> None:
        """The first timeline alone.

        Raises:
            ValueError: there is no fork, or something is being loaded.
        """
        with self.changed:
            self._refuse_while_loading()
            if not self.status.is_fork:
                raise ValueError("there is no fork to close")
            left = self.sides[0]
            self._plays = left.run is not None and left.run.is_playing
            status = replace(self.status, is_fork=False)
        self._install(([Timeline("", left.log, left.run, left.source)], status))

    # -- what is done --------------------------------------------------------------------------------------

    @property
    def runs(self) -> list[LiveRun]:
        return [side.run for side in self.sides if side.run is not None]

    def play(self) -> None:
        self._plays, self.status.error = True, None
        for run in self.runs:
            run.play()

    def pause(self) -> None:
        self._plays = False
        for run in self.runs:
            run.pause()

    def step(self) -> None:
        self._plays = False
        for run in self.runs:
            run.step()

    def set_speed(self, steps_per_s: float | None) -> None:
        """None is as fast as it goes.

        Raises:
            ValueError: it is out of range.
        """
        if steps_per_s is not None and not SPEEDS[0] <= steps_per_s <= SPEEDS[1]:
            raise ValueError(f"{steps_per_s} steps per second: choose {SPEEDS[0]} to {SPEEDS[1]:.0f}")
        self._speed = steps_per_s
        for run in self.runs:
            run.set_speed(steps_per_s)
        self._tell()

    def submit(self, request: PlannedRequest) -> None:
        """To all engines, or to none.

        Raises:
            ValueError: one refuses it, or there is no engine, or another one is on its way.
        """
        self._refuse_while_loading()
        runs = [(side.title, side.run) for side in self.sides if side.run is not None]
        if not runs:
            raise ValueError("no engine is running here: start a preset first")
        names = (f"mine-{i}" for i in count(1))
        name = next(name for name in names if not any(run.knows(name) for _, run in runs))
        for i, (title, run) in enumerate(runs):
            try:
                run.submit(replace(request, name=name))
            except ValueError as error:
                for _, taken in runs[:i]:
                    taken.abort(name)
                raise ValueError(f"{title}: {error}" if len(runs) > 1 else str(error)) from error
        self.status.error = None

    def abort(self, index: int, name: str) -> None:
        """Abort one side's request."""
        run = self.sides[index].run if 0 <= index < len(self.sides) else None
        if run is not None:
            run.abort(name)

    def close(self) -> None:
        self._loader.close()
        with self.changed:
            self._is_closed = True
            self.generation += 1
            sides, self.sides = self.sides, []
            self.changed.notify_all()
        for side in sides:
            side.close()

    # -- what tabs ask -------------------------------------------------------------------------------------

    def news(self, seen: Seen, wait_s: float = 0.0) -> dict[str, Any]:
        """All that a tab has not seen; waits so long if there is nothing."""
        with self.changed:
            self._tabs[seen.tab] = time.monotonic()
            self.changed.wait_for(lambda: self._has_news(seen), wait_s)
            is_new = seen.generation != self.generation or len(seen.cursors) != len(self.sides)
            cursors = [0] * len(self.sides) if is_new else seen.cursors
            lines = [side.log.upto(at + MAX_LINES, at) for side, at in zip(self.sides, cursors, strict=True)]
            answer = {"generation": self.generation, "status": self._status_version, "lines": lines}
            return answer | {"now": asdict(self.status)}

    def would_disturb(self, tab: str) -> bool:
        """Return whether another tab than this one watches a run that has not ended."""
        with self.changed:
            now = time.monotonic()
            self._tabs = {name: asked for name, asked in self._tabs.items() if now - asked < _TAB_S}
            self._refresh()
            return self.status.is_live and not self.status.is_done and bool(self._tabs.keys() - {tab, ""})

    def _has_news(self, seen: Seen) -> bool:
        self._refresh()
        if self._is_closed or seen.generation != self.generation or seen.status != self._status_version:
            return True
        return any(len(side.log) > at for side, at in zip(self.sides, seen.cursors, strict=False))

    def _refresh(self) -> None:
        """Takes over what the engines say; every change gives the status a new version."""
        status = self.status
        status.refresh(self.sides, self._speed)
        if status != self._shown:
            self._status_version += 1
            self._shown = replace(status)

    def _tell(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _say(self, error: str) -> None:
        with self.changed:
            self.status.error = error
            self.changed.notify_all()

    # -- replacing -----------------------------------------------------------------------------------------

    def _load(self, loading: str, make: Callable[[], _Made], play: bool) -> None:
        """Makes timelines in the loader's thread and shows them; what is shown stays until then."""
        with self.changed:
            self._loader.load(make)
            self.status.loading, self.status.error, self._plays = loading, None, play
            self._is_awaited, self._failure = False, None
            self.changed.notify_all()

    def _arrive(self, made: _Made) -> None:
        with self.changed:
            is_outdated, sides = self._loader.is_outdated, self.sides
        if is_outdated:
            drop(made[0], kept=sides)
        else:
            self._install(made)

    def _install(self, made: _Made) -> None:
        """Never with `changed` held: to end an engine is to wait for its thread, which may want that."""
        sides, status = made
        with self.changed:
            old, self.sides, self.status = self.sides, sides, replace(status, loading=None, error=None)
            self.generation += 1
            for run in self.runs:
                run.set_speed(self._speed)
                if self._plays:
                    run.play()
            self.changed.notify_all()
        drop(old, kept=sides)

    def _fail(self, error: Exception) -> None:
        """What is shown stays."""
        with self.changed:
            if self._loader.is_outdated:
                return
            self.status.loading = None
            words = (str(error) or type(error).__name__).splitlines()[0]
            if self._is_awaited:
                self._failure = words
                self._tell()
            else:
                self._say(words)

    def _refuse_while_loading(self) -> None:
        if self.status.loading:
            raise ValueError(f"{self.status.loading}: try again when that is there")
