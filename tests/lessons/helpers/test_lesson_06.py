"""Lesson 06: a key that lets no request starve, and what is said of others."""

from __future__ import annotations

from typing import Any

import pytest

from teachllm.core.policy import FirstComeFirstServed, Priority
from teachllm.core.request import Request
from teachllm.engine.overrides import EngineOverrides
from teachllm_lessons.helpers.lesson_06 import KEY, aged, contract_key, overtaken, three_in_a_tight_pool
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough


def restless(request: Request) -> tuple[int, ...]:
    return (request.arrival_index + 8 * request.priority - request.num_computed_tokens, request.arrival_index)


def test_a_key_with_patience_is_right() -> None:
    keeps_contract(KEY, "a patient request was overtaken by 7 of 24 urgent ones")
    assert contract_key(aged) > 200


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (Priority().key, "starves: arrival 0 of priority 1 is still overtaken by arrival 8 of priority 0"),
        (FirstComeFirstServed().key, "lets arrival 0 of priority 1 go before arrival 1 of priority 0"),
        (lambda request: (request.arrival_index + 8 * request.priority,), "the same key .*: no order between them"),
        (lambda request: (-request.arrival_index,), "puts arrival 1 before arrival 0, of the same priority"),
        (lambda request: request.arrival_index, "give a tuple of integers"),
        (restless, "changes while a request runs"),
    ],
)
def test_others_are_told_why_not(piece: Any, words: str) -> None:
    rejected(KEY, piece, words)


@only_thorough
def test_by_priority_alone_the_patient_one_is_the_last() -> None:
    assert overtaken(EngineOverrides(policy=Priority()), num_urgent=12) == 12
    assert overtaken(EngineOverrides(), num_urgent=12) == 0


@only_thorough
def test_who_came_first_is_not_preempted(capsys: pytest.CaptureFixture[str]) -> None:
    three_in_a_tight_pool()
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("A: preempted 0 times, done in step 59")
    assert "1 times" not in "".join(told)
    assert "never" not in "".join(told)
