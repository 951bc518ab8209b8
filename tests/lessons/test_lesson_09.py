"""Lesson 09: a loop that is one step ahead, and what is said of others."""

from __future__ import annotations

from typing import Any

import pytest

from teachllm.engine.engine_core import EngineCore
from teachllm_lessons.lesson_09 import TURN, contract_turn, lanes, simulated, who_owns_the_block
from tests.lessons.wrong_answers import accepted, rejected


def plain(core: Any) -> list[Any]:
    core.launch()
    return core.collect()


def never(core: Any) -> list[Any]:
    core.launch()
    return []


def two_ahead(core: Any) -> list[Any]:
    launched = core.launch()
    return core.collect() if core.num_pending > 2 or (core.num_pending and not launched) else []


def forgetful(core: Any) -> list[Any]:
    launched = core.launch()
    if core.num_pending > 1 or (core.num_pending and not launched):
        core.collect()
    return []


def twice(core: Any) -> list[Any]:
    core.launch()
    core.launch()
    return core.collect()


def test_the_engines_own_loop_is_right() -> None:
    message = accepted(TURN).message
    assert "A pretended H200 works 98% of the time, with the plain loop 78%" in message
    assert contract_turn(EngineCore.turn) == 20


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (plain, "with 2 steps to do, turn 0 did: launch step 0, collect step 0. It waits for the step it has just"),
        (never, "with 1 steps to do, the last step's tokens are never collected"),
        (two_ahead, "Then 2 steps are under way: one at most is ahead"),
        (forgetful, r"it returned \[\], not every step's tokens in order"),
        (twice, "One launch a turn, no more and no less"),
    ],
)
def test_others_are_told_why_not(piece: Any, words: str) -> None:
    rejected(TURN, piece, words)


def test_the_device_of_the_picture_works_all_the_time_when_the_host_is_ahead() -> None:
    busy = [simulated(async_scheduling=ahead).figures.device_busy or 0.0 for ahead in (False, True)]
    assert busy[0] < 0.8 and busy[1] > 0.95
    assert "host and device in steps 2 to 8" in lanes(simulated(async_scheduling=True).lines).says


def test_a_block_under_a_plan_stays_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    who_owns_the_block()
    assert "B gets no block" in capsys.readouterr().out
