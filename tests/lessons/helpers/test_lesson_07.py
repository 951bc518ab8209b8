"""Lesson 07: the engine's own nucleus keeps the contract, wrong ones are told why they are, and a draw is as drawn."""

from __future__ import annotations

import re

import pytest
import torch

from teachllm.spec_decode.chi_square import chi_square_test
from teachllm_lessons.helpers import lesson_07
from teachllm_lessons.helpers.lesson_07 import (
    COUNT_NUCLEUS,
    KEPT,
    QUESTION,
    Looked,
    another_word,
    num_left,
    peak_and_tail,
)
from teachllm_lessons.helpers.pictures import lesson_07 as pictures
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough


def without_the_one_that_fills_it(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    return (probabilities.cumsum(dim=-1) < top_p[:, None]).sum(dim=-1, keepdim=True)


def with_one_too_many(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    return (probabilities.cumsum(dim=-1) - probabilities <= top_p[:, None]).sum(dim=-1, keepdim=True)


def by_the_first_rows_p(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    return (probabilities.cumsum(dim=-1) - probabilities < top_p[0]).sum(dim=-1, keepdim=True)


def by_a_sum_that_rounds(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    return (probabilities.cumsum(dim=-1) - probabilities < top_p[:, None]).sum(dim=-1, keepdim=True)


def flat(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    return by_a_sum_that_rounds(probabilities, top_p)[:, 0]


def those_as_likely_as_p(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    return (probabilities >= 1 - top_p[:, None]).sum(dim=-1, keepdim=True)


def a_mask(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    return by_a_sum_that_rounds(probabilities, top_p) > 0


def test_the_engines_own_is_right() -> None:
    keeps_contract(COUNT_NUCLEUS, r"the same words in 5 random requests, and from 1 to \d{3} tokens in a nucleus")


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (without_the_one_that_fills_it, r"\[0.6\]\) is \[1\]: the first has 0.5 of the 0.6, so the second is needed"),
        (with_one_too_many, r"\[0.5\]\) is \[2\]: the first reaches 0.5 all by itself, and the fewest are wanted"),
        (by_the_first_rows_p, r"is \[1, 1\]: every row has a top_p of its own; keep \[1, 3\]"),
        (by_a_sum_that_rounds, r"59 of them\]\], \[1.0\]\) is \d\d: a top_p of 1 cuts nothing, so keep 59"),
        (flat, r"has shape \[1\]: give \[1, 1\], one count for each row"),
        (those_as_likely_as_p, r"keep \[2\]"),
        (a_mask, r"is of torch.bool: give integers"),
    ],
)
def test_wrong_ones_are_told_why(piece: object, words: str) -> None:
    rejected(COUNT_NUCLEUS, piece, words)


@only_thorough
def test_without_a_fault_a_penalty_makes_the_word_that_was_said_rarer(capsys: pytest.CaptureFixture[str]) -> None:
    another_word()
    plain, penalized = re.findall(r"(\d+) tokens", capsys.readouterr().out)
    assert int(penalized) < 0.7 * int(plain)


def test_what_is_drawn_is_what_the_engine_draws() -> None:
    look = Looked(num_gpu_blocks_override=32, max_model_len=64)
    asked = {"temperature": 2.0, "top_p": 0.95, "seed": 4}
    look.watch.add("A", QUESTION, 3, **asked)
    for index in range(3):
        look.watch.step()
        chosen = look.word(look.watch.tokens("A")[-1])
        assert repr(chosen) in repr(pictures.draw(look.logits, look.word, output_index=index, **asked))


def test_tokens_that_are_cut_are_grey_and_have_no_share() -> None:
    logits = torch.tensor([5.0, 4.0, *[-3.0 - number / 10 for number in range(30)]])
    drawn = pictures.draw(logits, lambda token_id: f"w{token_id}", seed=1, output_index=0, top_k=2)
    shares, scores = drawn.figure.axes[2].texts, drawn.figure.axes[3].texts
    assert [text.get_text() for text in shares[2:]] == ["0%"] * 6
    assert [text.get_text() for text in scores[2:]] == ["cut"] * 6
    assert {text.get_color() for text in (*shares[2:], *scores[2:])}.isdisjoint({shares[0].get_color()})


def test_draws_are_counted_beside_what_is_to_be_expected() -> None:
    logits = torch.tensor([1.0, 0.5, 0.0, -1.0, -4.0])
    counts, exact = lesson_07.many_draws(logits, 2000, temperature=1.5, top_p=0.9)
    assert sum(counts) == 2000 and sum(exact) == pytest.approx(2000)
    assert counts[4] == exact[4] == 0 and chi_square_test(counts, exact)[2] > 0.001


def test_the_toy_keeps_one_token_at_temperature_1_and_what_the_lesson_expects_at_2() -> None:
    logits = peak_and_tail()
    assert num_left(logits, temperature=1.0, top_p=0.9) == 1
    found = num_left(logits, temperature=2.0, top_p=0.9)
    assert KEPT.compare(3667, found, cool=3, hot=498).verdict == "right"
    for wrong, words in ((1, "less than 5%"), (1687, "square root"), (3686, "0.9 of all tokens")):
        assert words in KEPT.compare(wrong, found, cool=3, hot=498).text
