"""The exported timeline keeps to the trace event format, and says of each request what the trace does."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from teachllm.trace.perfetto import to_perfetto
from teachllm.trace.reader import parse_trace
from tests.trace.traced import busy, traced_engine
from tests.worker.engines import drain

Event = dict[str, Any]


@cache
def exported(ahead: bool) -> tuple[list[Event], list[dict[str, Any]]]:
    changes = {"num_gpu_blocks_override": 18, "max_num_batched_tokens": 48, "async_scheduling": ahead}
    engine, lines = traced_engine(**changes)
    busy(engine, num_requests=12)
    for _ in range(6):
        engine.step()
    engine.abort_request("7")
    drain(engine)
    found = json.loads(json.dumps(to_perfetto(parse_trace(lines))))
    return found["traceEvents"], [json.loads(line) for line in lines]


@pytest.mark.parametrize("ahead", [False, True])
def test_every_event_is_as_the_format_wants_it(ahead: bool) -> None:
    events, _ = exported(ahead)
    needed = {"X": {"ts", "dur"}, "b": {"ts", "id", "cat"}, "e": {"ts", "id", "cat"}, "C": {"ts", "args"}}
    needed |= {"i": {"ts", "s"}, "M": {"args"}}
    for event in events:
        assert {"ph", "pid", "tid", "name"} | needed[event["ph"]] <= event.keys(), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
    assert {event["ph"] for event in events} == set(needed)
    assert all(isinstance(v, int) for event in events if event["ph"] == "C" for v in event["args"].values())
    begun, ended = ([event["id"] for event in events if event["ph"] == ph] for ph in "be")
    assert begun == ended and len(set(begun)) == len(begun)


@pytest.mark.parametrize("ahead", [False, True])
def test_slices_of_one_row_do_not_overlap(ahead: bool) -> None:
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    events, _ = exported(ahead)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    assert len(rows) > 10
    for slices in rows.values():
        slices.sort(key=lambda event: event["ts"])
        for one, next_one in pairwise(slices):
            assert one["ts"] + one["dur"] <= next_one["ts"] + 0.01, (one, next_one)


def test_each_request_has_a_row_with_its_tokens_its_waits_and_its_end() -> None:
    events, lines = exported(False)
    of_requests = [event for event in events if event["pid"] == 2]
    rows = {event["args"]["name"]: event["tid"] for event in of_requests if event["name"] == "thread_name"}
    arrived = [line["request_id"] for line in lines if line["event"] == "arrival"]
    assert list(rows) == [f"request {name}" for name in arrived]
    for name in arrived:
        shares = [s for line in lines for s in line.get("scheduled", ()) if s["request_id"] == name]
        mine = [event for event in of_requests if event["tid"] == rows[f"request {name}"]]
        slices = [event for event in mine if event["name"] in ("prefill", "decode")]
        assert [e["args"]["num_tokens"] for e in slices] == [share["num_tokens"] for share in shares]
        texts = "".join(event["args"].get("text", "") for event in slices)
        assert texts == "".join(text for share in shares for text in share.get("text", ()))
        (end,) = [event["name"] for event in mine if event["ph"] == "i" and event["name"] != "preempted"]
        assert end == ("abort" if name == "7" else "length")
    reasons = {event["args"]["reason"] for event in of_requests if event["name"] == "waiting"}
    assert "behind the head of the queue" in reasons
    assert sum(event["name"] == "preempted" for event in of_requests) == sum(
        len(line["preempted"]) for line in lines if line["event"] == "step"
    )


def test_counters_say_what_the_steps_do() -> None:
    events, lines = exported(False)
    blocks = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "KV blocks"]
    assert blocks == [line["blocks"] for line in lines if line["event"] == "step"]
