"""Lesson 03: a policy that fills every place with the shortest answer, and what is said of others."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from teachllm.core.policy import FirstComeFirstServed, Key
from teachllm.core.request import Request
from teachllm_lessons.helpers.lesson_03 import (
    BATCHING,
    BYTES_OF_A_BATCH,
    ShortestFirst,
    bytes_of_a_step,
    ceilings,
    crowd,
    decode_seconds,
    live_steps,
    measured_points,
    seats,
    serve,
    simulated_step,
    two_ways,
    waits,
)
from teachllm_lessons.helpers.pictures.lesson_03 import places, roofline
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough


class Closed(ShortestFirst):
    def opens_batch(self, num_running: int) -> bool:
        return num_running == 0


class Full(ShortestFirst):
    def opens_batch(self, num_running: int) -> bool:
        return num_running > 0


class Alike(ShortestFirst):
    def key(self, request: Request) -> Key:
        return (request.max_len - request.num_prompt_tokens,)


class OfPrompts(ShortestFirst):
    def key(self, request: Request) -> Key:
        return request.num_prompt_tokens, request.arrival_index


class OfBoth(ShortestFirst):
    def key(self, request: Request) -> Key:
        return request.max_len, request.arrival_index


class WithoutANumber(ShortestFirst):
    def key(self, request: Request) -> Any:
        return request.sampling_params.max_tokens, request.arrival_index


class LastFirst(ShortestFirst):
    def key(self, request: Request) -> Key:
        return request.max_len - request.num_prompt_tokens, -request.arrival_index


class Restless(ShortestFirst):
    def __init__(self) -> None:
        self._asked = count()

    def key(self, request: Request) -> Key:
        return request.max_len - request.num_prompt_tokens, next(self._asked)


class ANumber(ShortestFirst):
    def key(self, request: Request) -> Any:
        return request.max_len - request.num_prompt_tokens


def test_the_shortest_first_is_right() -> None:
    keeps_contract(BATCHING, "the same words")


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (Closed, r"opens_batch\(1\) is false: a place that has become free stays empty .* static batching"),
        (Full, r"opens_batch\(0\) is false: nothing runs, and no request may begin"),
        (FirstComeFirstServed, "wants 3 tokens go before one that wants 2 and came later"),
        (Alike, "gives arrival 0 and arrival 1 the same key"),
        (OfPrompts, "wants 3 tokens go before one that wants 2|9 tokens to a short prompt"),
        (OfBoth, "an answer of 9 tokens to a short prompt go before one of 4 tokens to a long prompt"),
        (WithoutANumber, "the one that says no number .* have no order"),
        (LastFirst, "puts arrival 1 before arrival 0, of the same length"),
        (Restless, "another one when asked again"),
        (ANumber, "give a tuple of numbers"),
    ],
)
def test_others_are_told_why_not(piece: object, words: str) -> None:
    rejected(BATCHING, piece, words)


@only_thorough
def test_a_static_batch_is_longer_and_has_more_empty_places(capsys: pytest.CaptureFixture[str]) -> None:
    two_ways()
    static, continuous = capsys.readouterr().out.splitlines()
    assert static.startswith("static 17 steps, 19 empty places") and "D in 10" in static
    assert continuous.startswith("fcfs   13 steps,  7 empty places") and "D in 2, E in 3, F in 7" in continuous


@only_thorough
def test_places_are_taken_by_one_at_a_time_and_handed_on() -> None:
    with serve() as watch:
        watch.run()
    table = seats(watch.trace.lines)
    assert [row[1] and row[1][0] for row in table] == [*"BBBEEEEFFFFFF"]
    assert [row[2] for row in table[1:4]] == [("C", False), ("D", True), ("D", False)]
    assert places({"one": watch}).says == "one: 13 steps, 7 of 39 places empty"


@only_thorough
def test_a_batch_costs_little_until_the_knee_and_agrees_with_what_was_measured() -> None:
    assert simulated_step(64) < 1.1 * simulated_step(1)
    assert simulated_step(512) > 1.8 * simulated_step(256)
    measured, where = measured_points()
    assert "NVIDIA H200" in where
    assert simulated_step(64, 1088) == pytest.approx(measured["64 x 1,088"].seconds, rel=0.1)
    assert simulated_step(1, 256) == pytest.approx(measured["1 x 256"].seconds, rel=0.1)


def test_a_batch_reads_the_bytes_that_the_prediction_says_and_takes_nearly_as_many_times_as_long() -> None:
    points, _ = measured_points()
    alone, long, many = (points[name] for name in ("1 x 256", "8 x 16,448", "64 x 1,088"))
    ratio = bytes_of_a_step(long.step) / bytes_of_a_step(alone.step)
    assert ratio == pytest.approx(BYTES_OF_A_BATCH.answer, rel=0.001)
    assert long.seconds / alone.seconds == pytest.approx(2.1, abs=0.01)
    floors = [bytes_of_a_step(point.step) / ceilings().read_bandwidth for point in (alone, long, many)]
    beyond = [point.seconds / floor - 1 for point, floor in zip((alone, long, many), floors, strict=True)]
    assert [round(1 / each) for each in beyond] == [7, 17, 7]  # a seventh, a seventeenth, a seventh
    in_all_layers = 36 * 2 * 8 * 128 * 2
    assert bytes_of_a_step(long.step) - bytes_of_a_step(alone.step) == (8 * 16_448 - 256) * in_all_layers
    for point in points.values():
        assert point.seconds > bytes_of_a_step(point.step) / ceilings().read_bandwidth
    assert (
        "measured 64 x 1,088 at 40 FLOPs per byte reaches 156 TFLOP/s, 88% of the roof"
        in roofline(measured=points).says
    )


@only_thorough
def test_shortest_first_lowers_the_mean_wait_and_raises_the_longest() -> None:
    shortest, in_order = (waits(crowd(policy)) for policy in (ShortestFirst, FirstComeFirstServed))
    assert sum(shortest) < 0.8 * sum(in_order)
    assert max(shortest) > 1.2 * max(in_order)


def test_a_step_is_timed_from_the_one_before_it_and_only_among_decodes() -> None:
    kinds = ((1.0, ["prefill"]), (2.0, ["decode"]), (2.5, ["decode"]), (4.0, ["decode", "decode"]))
    lines = [{"event": "step", "end": end, "scheduled": [{"phase": phase} for phase in each]} for end, each in kinds]
    assert decode_seconds(lines) == {1: 0.5, 2: 1.5}


@only_thorough
def test_a_live_run_has_steps_of_every_power_of_two() -> None:
    assert list(live_steps(doublings=2, apart=4, num_runs=1)) == [1, 2, 4]
