"""Lesson 12: who gets a request, and engines of several processes that a notebook looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from teachllm.engine.data_parallel import least_loaded
from teachllm_lessons.lesson_12 import CHOOSE_REPLICA, contract_choose_replica, gains, lanes, run, two_halves
from teachllm_lessons.results import committed
from tests.lessons.wrong_answers import accepted, rejected


def by_the_lists(num_waiting: list[int], num_running: list[int]) -> int:
    num_waiting.sort()
    return 0


def by_sum(num_waiting: Sequence[int], num_running: Sequence[int]) -> int:
    loads = [waiting + running for waiting, running in zip(num_waiting, num_running, strict=True)]
    return loads.index(min(loads))


def the_last_of_equals(num_waiting: Sequence[int], num_running: Sequence[int]) -> int:
    loads = [4 * waiting + running for waiting, running in zip(num_waiting, num_running, strict=True)]
    return len(loads) - 1 - loads[::-1].index(min(loads))


def test_the_engines_own_choice_is_right() -> None:
    assert "Two engines in two processes ran with it" in accepted(CHOOSE_REPLICA).message
    assert contract_choose_replica(least_loaded) == 12


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (lambda waiting, running: 0, r"waiting=\[0, 0\], running=\[1, 0\]\) is 0: 4 x waiting \+ running are \[1, 0\]"),
        (by_sum, r"waiting=\[1, 0\], running=\[0, 3\]\) is 0: 4 x waiting \+ running are \[4, 3\]"),
        (the_last_of_equals, "the first of those that are equal is replica 0"),
        (by_the_lists, "changes the lists that it was given|is 0: 4 x waiting"),
        (lambda waiting, running: len(waiting), "there is replica 0 only"),
    ],
)
def test_others_are_told_why_not(piece: Any, words: str) -> None:
    rejected(CHOOSE_REPLICA, piece, words)


def test_ranks_say_what_one_process_says_and_their_lanes_are_drawn() -> None:
    tensor = run(4, tensor_parallel_size=2)
    assert {name: len(ids) for name, ids in tensor.tokens.items()} == dict.fromkeys("ABCD", 4)
    assert tensor.sent(2)[0]["all_reduce"] == [13, 13 * 4 * 256 * 4]
    assert lanes(tensor.steps[1:3]).says == "what 2 ranks do in 2 steps"


def test_two_halves_are_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    two_halves()
    assert capsys.readouterr().out.count("off by 0.000") == 2


def test_what_two_gpus_gain_is_drawn_from_the_committed_result() -> None:
    _, found = committed("parallel")
    says = gains(found["workloads"]["qwen3-8b"]).says
    assert "tensor parallel 3.1" in says and "data parallel 12,996" in says
