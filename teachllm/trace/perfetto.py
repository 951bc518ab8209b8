"""A trace as a timeline for https://ui.perfetto.dev or chrome://tracing: what the host did, and each request's life.

    engine     the host's parts of each step one after the other; the steps themselves, which overlap when it runs
               ahead; counters of blocks, tokens and requests
    requests   a row each: waiting, with the reason, then a slice for each step that schedules it
    ranks      if there are several, a row each: its part of each step, the exchanges inside, and bytes sent

Source: "Trace Event Format", the Chromium project.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from teachllm.trace.ranks import spans_of
from teachllm.trace.reader import Trace
from teachllm.trace.replay import Line

Event = dict[str, Any]

_ENGINE, _REQUESTS, _RANKS = 1, 2, 3  # processes, as the format calls them
_HOST = 1


def to_perfetto(trace: Trace) -> dict[str, Any]:
    """The trace in the Trace Event Format, to be written as JSON. Times are microseconds since its header."""
    rows = _Requests(trace.header["time"])
    events = [_named("process_name", _ENGINE, 0, "engine"), _named("process_name", _REQUESTS, 0, "requests")]
    events.append(_named("thread_name", _ENGINE, _HOST, "host"))
    events += _names_of_ranks(trace)
    for line in trace.lines:
        kind = line["event"]
        events += rows.events(line)
        events += _ranks(line, trace.header["time"])
        if kind == "step":
            events += _step(line, trace.header["time"])
        elif kind == "error":
            ts = _us(line["time"] - trace.header["time"])
            args = {"message": line["message"]}
            events.append({"ph": "i", "s": "p", "name": "error", "pid": _ENGINE, "tid": _HOST, "ts": ts, "args": args})
    last = max((event["ts"] for event in events if "ts" in event), default=0.0)
    return {"traceEvents": events + list(rows.still_waiting(last)), "displayTimeUnit": "ms"}


def _step(line: Line, began: float) -> Iterator[Event]:
    """Yield what the host did, the step's span, and the counters at its end."""
    number, start, end = line["step"], line["time"] - began, line["end"] - began
    arrived = end - line["update"]
    parts = {"schedule": start, "execute": start + line["schedule"], "wait": arrived - line["wait"], "update": arrived}
    for name, at in parts.items():
        args = {"step": number}
        yield _slice(name, _ENGINE, _HOST, at, at + line[name], args)
    what = {name: line[name] for name in ("graph_mode", "roofline", "preempted", "finished") if line.get(name)}
    span = {"cat": "step", "id": number, "name": f"step {number}", "pid": _ENGINE, "tid": _HOST}
    yield {"ph": "b", "ts": _us(start), **span, "args": what}
    yield {"ph": "e", "ts": _us(end), **span}
    tokens: Counter[str] = Counter(prefill=0, decode=0)
    for scheduled in line["scheduled"]:
        tokens[scheduled["phase"]] += scheduled["num_tokens"]
    requests = {"scheduled": len(line["scheduled"]), "waiting": len(line["waiting"])}
    for name, values in (("KV blocks", line["blocks"]), ("tokens", dict(tokens)), ("requests", requests)):
        yield {"ph": "C", "name": name, "pid": _ENGINE, "tid": _HOST, "ts": _us(end), "args": values}


def _names_of_ranks(trace: Trace) -> Iterator[Event]:
    told: list[Line] = next((line["ranks"] for line in trace.lines if line.get("ranks")), [])
    if told:
        yield _named("process_name", _RANKS, 0, "ranks")
    for rank, each in enumerate(told):
        yield _named("thread_name", _RANKS, rank + 1, f"rank {rank}, stage {each['stage']}")


def _ranks(line: Line, began: float) -> Iterator[Event]:
    """Yield what each rank did in a step; a slice that lies in another one is drawn below it."""
    name = f"step {line['step']}" if "step" in line else "empty step"
    for rank, told in enumerate(line.get("ranks", ())):
        row, begin, end = rank + 1, told["begin"] - began, told["end"] - began
        sent = {operation: f"{calls} calls, {count} bytes" for operation, (calls, count) in told["sent"].items()}
        yield _slice(name, _RANKS, row, begin, end, sent)
        for operation, at, until in spans_of(told):
            yield _slice(operation, _RANKS, row, at - began, until - began, {})
        num_bytes = {operation: count for operation, (_, count) in told["sent"].items()}
        yield {"ph": "C", "name": f"bytes of rank {rank}", "pid": _RANKS, "tid": row, "ts": _us(end), "args": num_bytes}


class _Requests:
    """The rows of requests, as far as the lines have come. A request waits from `since` on, or has not ended there."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._row: dict[str, int] = {}
        self._since: dict[str, float] = {}  # of live requests: the end of their last slice
        self._reason: dict[str, str] = {}

    def events(self, line: Line) -> Iterator[Event]:
        kind = line["event"]
        if kind == "arrival":
            name = line["request_id"]
            if name not in self._row:
                self._row[name] = len(self._row) + 1
                yield _named("thread_name", _REQUESTS, self._row[name], f"request {name}")
            self._since[name] = line["time"] - self._began
        elif kind == "step":
            yield from self._step(line)
        elif kind in ("abort", "stop") and line["request_id"] in self._since:
            yield from self._end(line["request_id"], kind, line["time"] - self._began)

    def _step(self, line: Line) -> Iterator[Event]:
        start, end = line["time"] - self._began, line["end"] - self._began
        for name in line["preempted"]:
            if name in self._row:
                yield self._instant(name, "preempted", start)
        for scheduled in line["scheduled"]:
            name = scheduled["request_id"]
            if name not in self._since:
                continue  # it had ended before this step's result came
            if name in self._reason:
                yield from self._waited(name, start)
            begin = max(start, self._since[name])  # running ahead, steps overlap; what is shown of one does not
            names = ("start", "num_tokens", "num_draft", "num_proposed", "num_accepted")
            args = {"step": line["step"], **{name: scheduled[name] for name in names if name in scheduled}}
            if "next_draft" in scheduled:
                num_next, why = scheduled["next_draft"]
                args["next_draft"] = f"{num_next}: {why}"
            if "text" in scheduled:
                args["text"] = "".join(scheduled["text"])
            yield _slice(scheduled["phase"], _REQUESTS, self._row[name], begin, end, args)
            self._since[name] = end
        for name, reason in line["finished"].items():
            yield from self._end(name, reason, end)
        self._reason = {name: why for name, (_, why) in line["waiting"].items()}

    def _waited(self, name: str, until: float) -> Iterator[Event]:
        reason, since = self._reason.pop(name), self._since[name]
        if until > since:
            yield _slice("waiting", _REQUESTS, self._row[name], since, until, {"reason": reason})

    def _end(self, name: str, reason: str, at: float) -> Iterator[Event]:
        if name in self._reason:
            yield from self._waited(name, at)
        self._since.pop(name, None)
        yield self._instant(name, reason, at)

    def _instant(self, name: str, what: str, at: float) -> Event:
        return {"ph": "i", "s": "t", "name": what, "pid": _REQUESTS, "tid": self._row[name], "ts": _us(at)}

    def still_waiting(self, last_us: float) -> Iterator[Event]:
        """Slices of those that wait when the trace ends."""
        for name in list(self._reason):
            if name in self._since:
                yield from self._waited(name, last_us / 1e6)


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(name: str, pid: int, tid: int, begin: float, end: float, args: dict[str, Any]) -> Event:
    duration = max(_us(end) - _us(begin), 0.0)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": _us(begin), "dur": duration, "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
