"""What a trace says of ranks is summed up as by hand, refused where it is odd, and exported a row each."""

from __future__ import annotations

from typing import Any

import pytest

from teachllm.trace.perfetto import to_perfetto
from teachllm.trace.ranks import RankFigures, covered, rank_figures
from teachllm.trace.reader import parse_trace
from teachllm.trace.summary import summary
from tests.trace.staged import STEPS, lines, rank, step


def test_shares_of_two_stages_counted_by_hand() -> None:
    """Some rank is in a step from 0 to 16 and from 20 to 24."""
    assert rank_figures(STEPS) == [
        RankFigures(
            rank=0,
            stage=0,
            num_steps=3,
            seconds=20,
            computes=(4 + 4 + 2) / 20,
            exchanges=0,
            bubble=(1 + 3 + 4 + 2) / 20,
            operations={"send": 4 / 20},
            sent={"send": (1, 1000)},
        ),
        RankFigures(
            rank=1,
            stage=1,
            num_steps=3,
            seconds=20,
            computes=(4 + 0.5 + 4 + 2) / 20,
            exchanges=0.5 / 20,
            bubble=(5 + 2 + 2) / 20,
            operations={"recv": 9 / 20, "all_gather": 0.5 / 20},
            sent={"recv": (1, 0), "all_gather": (1, 50)},
        ),
    ]


def test_what_overlaps_is_counted_once() -> None:
    assert covered([(3, 4), (0, 2), (1, 2.5), (1.5, 2)]) == 3.5
    assert covered([]) == 0


def test_without_times_of_exchanges_all_of_a_step_is_computing() -> None:
    """As where CUDA graphs exchange."""
    told = [{name: each[name] for name in ("stage", "begin", "end", "sent")} for each in STEPS[0]["ranks"]]
    first, second = rank_figures([step(0, 0.0, 10.0, told)])
    assert (first.computes, first.exchanges, first.bubble, first.operations) == (0.5, 0, 0.5, {})
    assert (second.computes, second.bubble, second.sent) == (1, 0, {"recv": (1, 0), "all_gather": (1, 50)})


def test_empty_steps_count_and_a_trace_without_ranks_has_no_figures() -> None:
    served = {"event": "serve", "time": 30.0, "end": 31.0, "ranks": [rank(0, 30, 31, {}), rank(1, 30, 31, {})]}
    trace = parse_trace(lines([*STEPS, served]))
    assert trace.problem is None
    assert [each.num_steps for each in rank_figures(trace.lines)] == [4, 4]
    alone = [{name: value for name, value in each.items() if name != "ranks"} for each in STEPS]
    assert rank_figures(alone) == []
    assert not any("rank" in name for name, _ in summary(parse_trace(lines(alone))))


def test_the_summary_has_a_row_for_each_rank() -> None:
    told = dict(summary(parse_trace(lines())))
    assert told["ranks"] == "2 in 2 stages; shares are of the 20 s in which any of them had a step"
    shares = "stage 0: computes 50%, exchanges 0%, bubble 50%"
    assert told["rank 0"] == f"{shares}; sends 1.0 kB per step; in send 20%"
    shares = "stage 1: computes 52%, exchanges 2%, bubble 45%"
    assert told["rank 1"] == f"{shares}; sends 0.1 kB per step; in recv 45%, all_gather 2%"


@pytest.mark.parametrize(
    "wrong",
    [
        {"stage": "first"},
        {"begin": None},
        {"sent": [["send", 1, 2]]},
        {"sent": {"send": [1]}},
        {"expected": {"send": [1, -2]}},
        {"exchanges": [["send", 1]]},
        {"exchanges": [[1.0, 1.0, 1.0]]},
    ],
    ids=str,
)
def test_a_rank_that_is_odd_ends_the_trace(wrong: dict[str, Any]) -> None:
    [first, second] = STEPS[1]["ranks"]
    trace = parse_trace(lines([STEPS[0], STEPS[1] | {"ranks": [first, second | wrong]}, STEPS[2]]))
    assert trace.problem is not None
    assert trace.problem.startswith("line 3: a rank without 'stage', 'begin', 'end' or 'sent', or one that is odd: {")
    assert len(trace.steps) == 1


def test_ranks_that_are_no_list_end_the_trace() -> None:
    trace = parse_trace(lines([STEPS[0] | {"ranks": 2}]))
    assert trace.problem is not None and trace.problem.startswith("line 2: 'ranks' is 2, not what each of them did")


def test_the_timeline_has_a_row_for_each_rank_with_its_exchanges_inside_of_its_steps() -> None:
    events = to_perfetto(parse_trace(lines()))["traceEvents"]
    of_ranks = [event for event in events if event["pid"] == 3]
    names = {event["tid"]: event["args"]["name"] for event in of_ranks if event["name"] == "thread_name"}
    assert names == {1: "rank 0, stage 0", 2: "rank 1, stage 1"}
    slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in of_ranks if e["ph"] == "X" and e["ts"] < 5e6]
    assert slices == [
        (1, "step 0", 0, 5e6),
        (1, "send", 4e6, 1e6),
        (2, "step 0", 0, 10e6),
        (2, "recv", 0, 5e6),
    ]
    assert [e["args"] for e in of_ranks if e["name"] == "bytes of rank 0"] == [{"send": 1000}] * 3
    assert not [e for e in to_perfetto(parse_trace(lines([])))["traceEvents"] if e["pid"] == 3]
