"""A trace from its lines: as far as it is sound, and what is wrong with the rest.

Each line is checked for what its readers take for granted and then replayed. A state follows from all lines before it,
so the first one that is broken ends the trace: what stands before it can be shown, and `problem` says which line it
was. A file that is cut off in the middle of a line, as of an engine that was killed, is a trace too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from teachllm.trace.recorder import TRACE_VERSION
from teachllm.trace.replay import Line, Replay, ReplayError

MAX_BLOCKS = 10_000_000  # of a pool: one that says more is not to be believed, and would fill the memory
# What a line raises that cannot follow those before it; all but the first: a field deep inside of it is missing or odd.
BAD_LINE = (ReplayError, KeyError, TypeError, ValueError, AttributeError)
_NUMBER = (int, float)
_FIELDS: dict[str, dict[str, Any]] = {
    "header": {"version": int, "time": _NUMBER, "config": dict, "model": dict, "num_blocks": int},
    "arrival": {"time": _NUMBER, "request_id": str, "num_prompt_tokens": int, "params": dict},
    "step": {
        **{name: _NUMBER for name in ("time", "schedule", "execute", "wait", "update", "end")},
        **{name: list for name in ("scheduled", "preempted", "block_events")},
        **{name: dict for name in ("finished", "waiting", "blocks")},
        "step": int,
    },
    "abort": {"time": _NUMBER, "request_id": str, "block_events": list},
    "stop": {"time": _NUMBER, "request_id": str, "block_events": list},
    "error": {"time": _NUMBER, "message": str, "block_events": list},
    "serve": {"time": _NUMBER, "end": _NUMBER},
    "fork": {"time": _NUMBER, "step": int, "requests": list, "waiting": dict, "block_events": list},
}


class TraceError(ValueError):
    """There is nothing in it that could be shown."""


@dataclass(slots=True)
class Trace:
    """A trace that replays.

    Attributes:
        header: its first line.
        lines: those after it.
        problem: what is wrong with the line that ended it; None if nothing is.
        note: what should be known of the whole; None if nothing.
        replay: the state after the last line.
    """

    header: Line
    lines: list[Line] = field(default_factory=list)
    problem: str | None = None
    note: str | None = None
    replay: Replay = field(init=False)

    def __post_init__(self) -> None:
        self.replay = Replay(self.header)

    @property
    def steps(self) -> list[Line]:
        return [line for line in self.lines if line["event"] == "step"]

    def state_after(self, num_lines: int) -> Replay:
        """The state after the first lines behind the header."""
        replay = Replay(self.header)
        for line in self.lines[:num_lines]:
            replay.apply(line)
        return replay


def read_trace(path: str | Path) -> Trace:
    """Reads a trace's file.

    Raises:
        TraceError: it cannot be read, or does not begin with a header.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return parse_trace(file, str(path))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error


def parse_trace(texts: Iterable[str], name: str = "the trace") -> Trace:
    """A trace from its lines of text.

    Args:
        name: what errors call it.

    Raises:
        TraceError: it does not begin with a header.
    """
    trace: Trace | None = None
    for number, text in enumerate(texts, start=1):
        try:
            line = parse_line(text)
            if trace is None:
                trace = _begin(line)
            elif line["event"] == "header":
                raise ReplayError("a second header: two engines wrote to one file")
            else:
                trace.replay.apply(line)
                trace.lines.append(line)
        except BAD_LINE as error:
            wrong = str(error)
            if not isinstance(error, ReplayError):
                wrong = f"not as such lines are ({type(error).__name__}: {error})"
            if trace is None:
                raise TraceError(f"{name} is no trace: line {number}: {wrong}") from error
            trace.problem = f"line {number}: {wrong}; it and what comes after it are left out"
            return trace
    if trace is None:
        raise TraceError(f"{name} is empty")
    return trace


def _begin(line: Line) -> Trace:
    if line["event"] != "header":
        raise ReplayError(f"a trace begins with a header, not with {line['event']!r}")
    if not 0 <= line["num_blocks"] <= MAX_BLOCKS:
        raise ReplayError(f"{line['num_blocks']} blocks: 0 to {MAX_BLOCKS:,} are believed")
    trace = Trace(line)
    if line["version"] > TRACE_VERSION:
        trace.note = (
            f"written in version {line['version']} of the format, of which this teachllm knows {TRACE_VERSION}: "
            "some of it may be missing here; update teachllm to see all"
        )
    return trace


def parse_line(text: str) -> Line:
    """One line, with the fields that its kind must have.

    Raises:
        ReplayError: it is none; one sentence says why.
    """
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        cut_off = not text.endswith("\n")
        raise ReplayError("cut off in the middle" if cut_off else f"not JSON ({error})") from error
    if not isinstance(line, dict) or not isinstance(line.get("event"), str):
        raise ReplayError('not an object with an "event"')
    for name, kinds in _FIELDS.get(line["event"], {}).items():
        if name not in line:
            raise ReplayError(f"{line['event']} without {name!r}")
        if not isinstance(line[name], kinds) or isinstance(line[name], bool):
            raise ReplayError(f"{name!r} of {line['event']} is {line[name]!r}")
    if line["event"] == "step":
        _check_step(line)
    _check_ranks(line)
    return line


def _check_step(line: Line) -> None:
    for name in ("used", "cached", "free"):
        if not isinstance(line["blocks"].get(name), int):
            raise ReplayError(f"blocks without {name!r}")
    load = line.get("expert_load", [])
    if not isinstance(load, list) or not all(map(_are_counts, load)):
        raise ReplayError(f"'expert_load' is {load!r}, not the tokens of each expert by layer")
    for scheduled in line["scheduled"]:
        if not {"request_id", "start", "num_tokens", "phase"} <= scheduled.keys():
            raise ReplayError("a scheduled request without request_id, start, num_tokens or phase")
        if scheduled.get("num_sampled", 0) > scheduled["num_tokens"]:
            raise ReplayError(f"{scheduled['num_tokens']} scheduled tokens yield {scheduled['num_sampled']}")
        match scheduled.get("next_draft", [0, ""]):
            case [int(), str()]:
                continue
        raise ReplayError(f"'next_draft' of a scheduled request is {scheduled['next_draft']!r}, no number and reason")


def _check_ranks(line: Line) -> None:
    ranks = line.get("ranks", [])
    if not isinstance(ranks, list):
        raise ReplayError(f"'ranks' is {ranks!r}, not what each of them did")
    for told in ranks:
        match told:
            case {"stage": int(), "begin": int() | float(), "end": int() | float(), "sent": dict()} if all(
                map(_are_sent, (told["sent"], told.get("expected", {})))
            ) and all(map(_is_exchange, told.get("exchanges", []))):
                continue
        raise ReplayError(f"a rank without 'stage', 'begin', 'end' or 'sent', or one that is odd: {told!r}")


def _are_sent(counts: Any) -> bool:
    return isinstance(counts, dict) and all(_are_counts(each) and len(each) == 2 for each in counts.values())


def _is_exchange(value: Any) -> bool:
    match value:
        case [str(), int() | float(), int() | float()]:
            return True
    return False


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(count) is int and count >= 0 for count in value)
