"""Lesson 04: a chunk that is polite, and what is said of others."""

from __future__ import annotations

from typing import Any

import pytest

from teachllm_lessons.helpers.lesson_04 import (
    CHUNK,
    TALKERS,
    contract_chunk,
    first_token_steps,
    newcomers,
    polite,
    talk,
    who_waits,
)
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough


def test_a_polite_chunk_is_right() -> None:
    keeps_contract(CHUNK, "A, B and C have their first tokens in step 0, where they had to wait")
    assert contract_chunk(polite) > 10


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (
            lambda request, most: most,
            r"chunk\(a prompt of 65, 17\) is 17: of a prompt beyond 64 tokens a step takes 16",
        ),
        (lambda request, most: min(most, 16), r"chunk\(a prompt of 64, 17\) is 16: a prompt of up to 64 tokens is to"),
        (lambda request, most: 16, r"chunk\(a prompt of 2, 2\) is 16: more than budget and prompt allow"),
        (lambda request, most: 0, "then nothing of it is ever computed"),
        (lambda request, most: most / 2, r"is 1\.0: give a number of tokens"),
        (
            lambda request, most: most if request.num_uncomputed_tokens <= 64 else min(most, 16),
            "the last 40 tokens of a prompt of 500 get 40: it is still a long one",
        ),
    ],
)
def test_others_are_told_why_not(piece: Any, words: str) -> None:
    rejected(CHUNK, piece, words)


@only_thorough
def test_in_chunks_no_step_is_as_large_as_the_whole_prompt() -> None:
    whole, pieces = talk(enable_chunked_prefill=False, max_num_batched_tokens=512), talk(max_num_batched_tokens=64)
    largest = [
        max(sum(s["num_tokens"] for s in step["scheduled"]) for step in each.trace.steps) for each in (whole, pieces)
    ]
    assert largest[0] > 400 and largest[1] == 64
    assert whole.all_tokens == pieces.all_tokens


@only_thorough
def test_the_engines_own_policy_lets_short_prompts_wait() -> None:
    assert all(first_token_steps(newcomers())[name] > 2 for name in TALKERS)


def test_without_a_fault_who_answers_gets_a_token_in_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    who_waits()
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 4 and all(line.endswith("gets nothing in 0 of them") for line in told)
