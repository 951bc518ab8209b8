"""Lesson 09: the engine's own loop keeps the contract, and wrong ones are told why they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from teachllm.engine.engine_core import EngineCore
from teachllm_lessons.guard import Seconds
from teachllm_lessons.helpers.lesson_09 import (
    IN_VAIN,
    ONE_BY_ONE,
    TURN,
    counting,
    ends_and_begins,
    in_vain,
    pretend,
)
from teachllm_lessons.helpers.pictures.lesson_09 import draw_launches
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough
from tests.waiting import HANG_SECONDS


def plain(core: Any) -> Any:
    return core.collect() if core.launch() else []


def collects_first(core: Any) -> Any:
    updates = core.collect() if core.num_pending else []
    core.launch()
    return updates


def forgets_the_last(core: Any) -> Any:
    core.launch()
    return core.collect() if core.num_pending > 1 else []


def two_ahead(core: Any) -> Any:
    launched = core.launch()
    return core.collect() if core.num_pending > 2 or (core.num_pending and not launched) else []


def always_collects(core: Any) -> Any:
    core.launch()
    return core.collect()


def says_nothing(core: Any) -> Any:
    launched = core.launch()
    if core.num_pending > 1 or (core.num_pending and not launched):
        core.collect()
    return []


def returns_none(core: Any) -> Any:
    launched = core.launch()
    if core.num_pending > 1 or (core.num_pending and not launched):
        return core.collect()
    return None


def test_the_engines_own_is_right() -> None:
    keeps_contract(TURN, "the device works 100% of the time in place of 77%")


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (plain, r"2 steps to do: launch 0, collect 0, launch 1, collect 1\. The device stood still in between"),
        (collects_first, r"launch 0, collect 0, launch 1, .* should be: launch 0, launch 1, collect 0, collect 1"),
        (forgets_the_last, r"1 step to do: launch 0; then turn\(\) did nothing, with 1 step under way"),
        (two_ahead, r"launch 0, launch 1; 2 steps are under way when turn\(\) returns\. One ahead is enough"),
        (always_collects, r"collect\(\) was called and nothing is under way"),
        (says_nothing, r"turn\(\) returned \[\] and should return \['tokens of step 0'\]"),
        (returns_none, r"nothing to do: turn\(\) returned None"),
    ],
)
def test_wrong_ones_are_told_why(piece: Any, words: str) -> None:
    rejected(TURN, piece, words)


def test_a_loop_that_never_ends_is_stopped() -> None:
    def goes_round(core: Any) -> Any:
        while core.num_pending < 2 and core.num_steps:
            core.launch()
        return core.collect() if core.num_pending else []

    from teachllm_lessons.exercise import check

    assert "does a loop of it never end" in check(TURN, goes_round, Seconds(0.2, HANG_SECONDS)).message


@only_thorough
def test_without_a_fault_blocks_are_held_and_b_answers_its_own_question(capsys: pytest.CaptureFixture[str]) -> None:
    ends_and_begins()
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "A1 to A4 have ended, step 9 is under way: 0 blocks are free"
    assert last == "B: 'A token is a piece of text, as the'"


def test_one_ahead_the_device_works_all_the_time_and_its_picture_says_so() -> None:
    alone, ahead = pretend(async_scheduling=False), pretend(async_scheduling=True)
    assert alone.busy < 0.8 < 0.99 < ahead.busy <= 1.0
    assert alone.tokens == ahead.tokens == 320
    for begun, after in zip(ahead.device, ahead.device[1:], strict=False):
        assert begun[1] <= after[0] + 1e-12
    assert ahead.draw(4, 4).says == "host and device in steps 4 to 7; the device works 100% of the time"
    assert pretend(costs=ONE_BY_ONE, async_scheduling=False).rate < alone.rate < ahead.rate


def test_a_graph_is_one_launch() -> None:
    assert draw_launches(12, 5.0, {"one by one": 8.0, "graph": 10.0}).says == (
        "one by one: 12 kernels in 101 us; graph: 12 kernels in 70 us"
    )


@only_thorough
def test_operators_that_compute_are_counted() -> None:
    x = torch.ones(4)
    with counting() as counted:
        (x.view(2, 2) + 1).T.sum()
    assert counted.count == 2  # a sum, and an addition; views launch nothing


def test_the_engines_loop_is_the_pieces_default() -> None:
    assert TURN.reference is EngineCore.turn


def test_only_an_end_that_depends_on_an_id_costs_a_token() -> None:
    by_a_stop = in_vain(max_tokens=12, stop_token_ids=[281])
    assert by_a_stop == 1
    assert IN_VAIN.compare(0, in_vain(max_tokens=5), by_a_stop=by_a_stop).verdict == "right"
    assert "stop token" in IN_VAIN.compare(1, 0, by_a_stop=by_a_stop).text
