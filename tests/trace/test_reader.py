"""A trace that is broken says in which line and how, and shows what comes before."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from teachllm.trace.reader import TraceError, parse_trace, read_trace
from tests.trace.traced import busy, traced_engine
from tests.worker.engines import drain


@pytest.fixture(scope="module")
def lines() -> list[str]:
    engine, lines = traced_engine()
    busy(engine, num_requests=4)
    drain(engine)
    return [line + "\n" for line in lines]


def changed(line: str, **fields: Any) -> str:
    return json.dumps(json.loads(line) | fields) + "\n"


def test_a_trace_without_a_fault_is_read_whole(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(lines))
    trace = read_trace(path)
    assert trace.problem is None and trace.note is None and len(trace.lines) == len(lines) - 1
    assert [line["step"] for line in trace.steps] == list(range(len(trace.steps)))


def test_one_that_is_cut_off_is_shown_up_to_its_last_whole_line(lines: list[str]) -> None:
    trace = parse_trace([*lines[:12], lines[12][:40]])
    assert trace.problem == "line 13: cut off in the middle; it and what comes after it are left out"
    assert len(trace.lines) == 11


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("what?\n", "line 13: not JSON"),
        ("[1, 2]\n", 'line 13: not an object with an "event"'),
        ('{"event": "abort", "time": 1.0, "request_id": "0"}\n', "line 13: abort without 'block_events'"),
        (
            '{"event": "abort", "time": "now", "request_id": "0", "block_events": []}\n',
            "line 13: 'time' of abort is",
        ),
        (
            '{"event": "stop", "time": 1, "request_id": "x", "block_events": []}\n',
            "line 13: request 'x' has never",
        ),
        (
            '{"event": "error", "time": 1, "message": "", "block_events": [["free", 119, "0"]]}\n',
            "line 13: request '0' frees block 119 and does not use it",
        ),
        (
            '{"event": "error", "time": 1, "message": "", "block_events": [["hit", 120, "0"]]}\n',
            "line 13: block 120 is not one of the 120",
        ),
        (
            '{"event": "error", "time": 1, "message": "", "block_events": [["allocate", 119, "0"]]}\n',
            "line 13: block 119 is allocated and was not the next free one",
        ),
        (
            '{"event": "error", "time": 1, "message": "", "block_events": [["lend", 1, "0"]]}\n',
            "line 13: 'lend' is no block event",
        ),
        (
            '{"event": "error", "time": 1, "message": "", "block_events": [7]}\n',
            "line 13: not as such lines are (TypeError",
        ),
    ],
)
def test_a_broken_line_is_named_and_ends_what_is_shown(lines: list[str], wrong: str, says: str) -> None:
    trace = parse_trace([*lines[:12], wrong, *lines[12:]])
    assert trace.problem is not None and trace.problem.startswith(says)
    assert len(trace.lines) == 11


@pytest.mark.parametrize("load", [7, [3, 4], [[3, -1]], [[True]], [["a"]]], ids=str)
def test_a_load_that_is_no_number_of_tokens_by_layer_and_expert_is_refused(lines: list[str], load: Any) -> None:
    at = next(index for index, line in enumerate(lines) if json.loads(line)["event"] == "step")
    sound = parse_trace([*lines[:at], changed(lines[at], expert_load=[[3, 0], [1, 2]])])
    assert sound.problem is None
    trace = parse_trace([*lines[:at], changed(lines[at], expert_load=load)])
    assert trace.problem is not None and trace.problem.startswith(f"line {at + 1}: 'expert_load' is {load!r}, not")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda step: step["blocks"].pop("cached"), "blocks without 'cached'"),
        (lambda step: step["scheduled"][0].pop("phase"), "a scheduled request without request_id"),
        (lambda step: step["scheduled"][0].update(num_sampled=99, num_tokens=98), "98 scheduled tokens yield 99"),
        (
            lambda step: step["scheduled"][0].update(next_draft=["", 0]),
            r"'next_draft' of a scheduled request is \['', 0\]",
        ),
    ],
)
def test_a_step_that_is_not_as_steps_are_is_refused(
    lines: list[str], change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    at = next(index for index, line in enumerate(lines) if json.loads(line)["event"] == "step")
    step = json.loads(lines[at])
    change(step)
    trace = parse_trace([*lines[:at], json.dumps(step) + "\n"])
    assert trace.problem is not None and re.match(f"line {at + 1}: {says}", trace.problem)


def test_a_line_that_is_missing_is_noticed_where_the_pool_no_longer_adds_up(lines: list[str]) -> None:
    first_step = next(i for i, line in enumerate(lines) if '"step"' in line)
    trace = parse_trace(lines[:first_step] + lines[first_step + 1 :])
    assert trace.problem is not None and trace.problem.startswith("line ") and len(trace.lines) < len(lines) - 2


def test_a_request_that_arrives_twice_is_refused(lines: list[str]) -> None:
    trace = parse_trace([*lines[:2], lines[1]])
    assert trace.problem is not None and trace.problem.startswith("line 3: request '0' arrives a second time")


def test_two_traces_in_one_file_are_refused(lines: list[str]) -> None:
    trace = parse_trace([*lines[:5], lines[0]])
    assert trace.problem is not None and trace.problem.startswith("line 6: a second header")


def test_a_newer_version_is_shown_as_far_as_it_is_understood(lines: list[str]) -> None:
    new = '{"event": "migration", "time": 1.0}\n'
    trace = parse_trace([changed(lines[0], version=2), *lines[1:], new])
    assert trace.note is not None and "version 2" in trace.note and "update teachllm" in trace.note
    assert trace.problem is None and len(trace.lines) == len(lines)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("hello\n", "line 1: not JSON"),
        ('{"event": "step"}\n', "line 1: step without"),
        (
            '{"event": "header", "version": 1, "time": 0, "config": {}, "model": {}, "num_blocks": 4}\n',
            "line 1: not as",
        ),
        (
            '{"event": "header", "version": 1, "time": 0, "config": {}, "model": {}, "num_blocks": 1000000000}\n',
            "line 1: 1000000000 blocks: 0 to 10,000,000 are believed",
        ),
    ],
)
def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(TraceError, match=says) as caught:
        read_trace(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(TraceError, match="no/such/file: No such file"):
        read_trace("no/such/file")
