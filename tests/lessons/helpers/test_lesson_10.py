"""Lesson 10: the engine's own drafter and rule keep their contracts, and wrong ones are told why they are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from teachllm_kernels.speculation.rejection_reference import judge
from teachllm_lessons.helpers import lesson_10
from teachllm_lessons.helpers.lesson_10 import (
    JUDGE,
    PROPOSE,
    QUESTION,
    TOKENS_PER_STEP,
    Noted,
    greedy_and_random,
    speculating,
    tokens_a_step,
    told_lengths,
)
from teachllm_lessons.helpers.pictures.lesson_10 import where_it_comes_from
from teachllm_lessons.results import committed
from tests.lessons.wrong_answers import keeps_contract, rejected

Pair = tuple[torch.Tensor, torch.Tensor]


def by_one_token(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(token_ids)
    ends = [end for end in range(1, len(tokens)) if tokens[end - 1] == tokens[-1]]
    return tokens[ends[-1] : ends[-1] + num_tokens] if ends else []


def with_the_match_itself(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(token_ids)
    starts = [start for start in range(len(tokens) - 1) if tokens[start] == tokens[-1]]
    return tokens[starts[-1] : starts[-1] + num_tokens] if starts else []


def always_something(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    return list(token_ids[-num_tokens:])


def one_that_pops(token_ids: list[int], num_tokens: int) -> list[int]:
    token_ids.pop()
    return []


def of_nothing(token_ids: Sequence[int], num_tokens: int) -> None:
    """Has no return."""


def takes_all(p: torch.Tensor, q: torch.Tensor, token: torch.Tensor, coin: torch.Tensor) -> Pair:
    return coin < 2.0, judge(p, q, token, coin)[1]


def draws_from_p(p: torch.Tensor, q: torch.Tensor, token: torch.Tensor, coin: torch.Tensor) -> Pair:
    return judge(p, q, token, coin)[0], p


def takes_none(p: torch.Tensor, q: torch.Tensor, token: torch.Tensor, coin: torch.Tensor) -> Pair:
    return coin > 2.0, p


def without_scale(p: torch.Tensor, q: torch.Tensor, token: torch.Tensor, coin: torch.Tensor) -> Pair:
    return judge(p, q, token, coin)[0], (p - q).clamp(min=0.0)


def where_p_is_likely(p: torch.Tensor, q: torch.Tensor, token: torch.Tensor, coin: torch.Tensor) -> Pair:
    return coin < p.gather(1, token), judge(p, q, token, coin)[1]


def flat(p: torch.Tensor, q: torch.Tensor, token: torch.Tensor, coin: torch.Tensor) -> Pair:
    found = judge(p, q, token, coin)
    return found[0][:, 0], found[1]


def test_the_engines_own_are_right() -> None:
    keeps_contract(PROPOSE, r"the same words, 1\.\d\d tokens per step, \d\d% of drafts")
    keeps_contract(JUDGE, r"the same words in 3 random requests, \d\d% of a draft")


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (by_one_token, r"is \[40, 12\]: 13 alone was followed by 40, but 12 13 by 14"),
        (with_the_match_itself, r"propose\(\[1, 2, 1\], 1\) is \[1\]: 1 stood here before, and 2 followed"),
        (always_something, r"propose\(\[5\], 4\) is \[5\]: nothing stood before"),
        (one_that_pops, r"propose changed the request's own tokens: \[5\] to \[\]"),
        (of_nothing, r"is None: give a list of ids"),
    ],
)
def test_wrong_drafters_are_told_why(piece: object, words: str) -> None:
    rejected(PROPOSE, piece, words)


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (takes_all, r"p = \[1, 0\], q = \[0, 1\] .*: of 1,000 tokens 0 are token 0, and by the model's own p .* 1000"),
        (draws_from_p, r"changes what the model says. p = \[0.5, 0.5\], q = \[1, 0\] \(the drafter is certain\)"),
        (takes_none, r"is right and of little use. .* 0% of drafts are accepted, and 100% could be"),
        (without_scale, r"what is left adds up to 0.5 and not to 1: a probability for each token is wanted"),
        (where_p_is_likely, r"what is left|is right and of little use|changes what the model says"),
        (flat, r"judge gives shapes \[1000\] and \[1000, 2\]: give \[1000, 1\] and \[1000, 2\]"),
    ],
)
def test_wrong_rules_are_told_why(piece: object, words: str) -> None:
    rejected(JUDGE, piece, words)


def test_without_a_fault_draws_are_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    greedy_and_random()
    said = capsys.readouterr().out
    assert "greedy: 'A KV cache" in said
    assert float(said.split()[-1]) > 0.001


def test_the_picture_of_a_verification_says_what_the_step_gave() -> None:
    noted = Noted(PROPOSE.reference)
    with speculating("custom", drafter=noted) as watch:
        watch.add("A", QUESTION, 12)
        watch.run()
        said = repr(lesson_10.verification(watch, noted, "A", 0))
        assert "1 of 4 drafts accepted; the step gives 2 tokens, the last is recovered" in said
        assert "[' cache', '?', '<|im_end|>'" in said and "gained [' cache', ' keeps']" in said
        assert 1.0 < tokens_a_step(watch, "A") == tokens_a_step(watch) < 1.2


def test_committed_results_are_there() -> None:
    assert committed("-speculation-", "many")[1]["many"]["ngram_0.8_against_plain"] < 1
    assert committed("-drafters-", "test")[1]["test"]


def test_a_step_with_coins_gives_as_many_tokens_as_the_sum_says() -> None:
    assert pytest.approx(sum(0.8**k for k in range(5)), abs=0.005) == TOKENS_PER_STEP.answer
    assert TOKENS_PER_STEP.compare(3.36, 3.4, num_steps=500).verdict == "right"
    assert "after a rejected one" in TOKENS_PER_STEP.compare(4.2, 3.4, num_steps=500).text


def test_no_label_of_the_picture_of_the_rule_lies_on_a_bar() -> None:
    picture = where_it_comes_from(p=[0.5, 0.25, 0.15, 0.1], q=[0.1, 0.2, 0.2, 0.5])
    ax = picture.figure.axes[0]
    picture.figure.canvas.draw()
    bars = [patch.get_window_extent() for patch in ax.patches if patch.get_height() > 0]
    for text in ax.texts:
        assert not any(text.get_window_extent().overlaps(bar) for bar in bars), text.get_text()


def test_what_the_bars_of_64_requests_were_drafted_with() -> None:
    _, found = committed("-speculation-", "many")
    assert "2: 84.2%" in told_lengths(found["many"]["ngram_0.8_lengths"])
    assert told_lengths(found["many"]["draft_model_0.8_lengths"]) == "0: 99.9%, 1: 0.1%"
