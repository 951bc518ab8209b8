"""A drafter that somebody wrote: whatever it does, the text is the model's, and what went wrong is said."""

from __future__ import annotations

import re
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from teachllm import LLM, SamplingParams
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.request import Request, RequestStatus
from teachllm.engine.host_drafting import HostDrafting
from teachllm.spec_decode.drafter import check_drafter
from tests.checkpoints import VOCAB_SIZE
from tests.worker.engines import random_ids, tiny, tokens

CUSTOM = {"method": "custom", "num_speculative_tokens": 3, "adaptive": False}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": random_ids(length, seed=length)} for length in (5, 9, 20)]

Propose = Callable[[Sequence[int], int], Any]


class Drafter:
    """One that does what a function does, and counts how often."""

    def __init__(self, does: Propose) -> None:
        self._does = does
        self.num_calls = 0

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> Any:
        self.num_calls += 1
        return self._does(token_ids, num_tokens)


@cache
def plain() -> list[list[list[int]]]:
    return [tokens(output) for output in LLM(**tiny()).generate(PROMPTS, GREEDY, use_tqdm=False)]


def run(does: Propose, adaptive: bool = False, **settings: Any) -> tuple[list[list[list[int]]], list[str], int]:
    """The tokens with a drafter, the warnings, and how often it was asked."""
    drafter = Drafter(does)
    llm = LLM(**tiny(speculative_config=CUSTOM | {"adaptive": adaptive}, **settings), drafter=drafter)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [tokens(output) for output in outputs], [str(each.message) for each in caught], drafter.num_calls


def raises(token_ids: Sequence[int], num_tokens: int) -> Any:
    raise KeyError("no idea")


def fails_half_way(token_ids: Sequence[int], num_tokens: int) -> Iterator[int]:
    yield 3
    raise OSError("gone")


def closed(token_ids: Sequence[int], num_tokens: int) -> Any:
    raise StopIteration


FAILS: dict[str, tuple[Propose, str]] = {
    "raises": (raises, "Drafter failed, and the step goes on without drafts: KeyError('no idea')"),
    "fails half way": (fails_half_way, "OSError('gone')"),
    "closed": (closed, "StopIteration()"),
    "none": (lambda ids, n: None, "'NoneType' object is not iterable"),
    "a number": (lambda ids, n: 7, "'int' object is not iterable"),
    "floats": (lambda ids, n: [1.0, 2.0], "'float' object cannot be interpreted as an integer"),
    "text": (lambda ids, n: "abc", "'str' object cannot be interpreted as an integer"),
    "a float tensor": (lambda ids, n: torch.tensor([0.5]), "TypeError"),
    "nones": (lambda ids, n: [None], "'NoneType' object cannot be interpreted as an integer"),
    "too large": (lambda ids, n: [VOCAB_SIZE], f"proposed id {VOCAB_SIZE}, not in the vocabulary of {VOCAB_SIZE}"),
    "negative": (lambda ids, n: [-1] * n, "Drafter proposed id -1, not in the vocabulary"),
    "huge": (lambda ids, n: [1 << 80], f"Drafter proposed id {1 << 80}"),
}


@pytest.mark.parametrize("how", ["raises", "fails half way", "too large"])
def test_one_that_fails_costs_its_drafts_and_nothing_else(how: str) -> None:
    does, says = FAILS[how]
    found, warned, num_calls = run(does)
    assert found == plain()
    assert num_calls == len(warned) == 3 and all(says in each for each in warned)
    assert [each.endswith("failure 3 in a row: it is asked no more") for each in warned] == [False, False, True]


@pytest.mark.parametrize("how", FAILS)
def test_what_cannot_be_taken_is_named_and_left_out(how: str) -> None:
    does, says = FAILS[how]
    update = updated(3)
    with pytest.warns(UserWarning, match=re.escape(says)):
        HostDrafting(Drafter(does), VOCAB_SIZE).propose([update])
    assert update.request.draft_token_ids == []


TAKEN: dict[str, tuple[Propose, list[int]]] = {
    "none": (lambda ids, n: [], []),
    "fewer": (lambda ids, n: iter([1]), [1]),
    "without end": (lambda ids, n: count(5), [5, 6, 7]),
    "too many": (lambda ids, n: range(50), [0, 1, 2]),
    "numpy": (lambda ids, n: np.array([1, 2, 3], dtype=np.int32), [1, 2, 3]),
    "torch": (lambda ids, n: torch.tensor([4, 5]), [4, 5]),
    "a set": (lambda ids, n: {6, 7}, [6, 7]),
    "an array": (lambda ids, n: array("q", [1]), [1]),
}


@pytest.mark.parametrize("how", TAKEN)
def test_ids_in_any_form_and_number_are_taken_without_a_word(how: str) -> None:
    does, ids = TAKEN[how]
    update = updated(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HostDrafting(Drafter(does), VOCAB_SIZE).propose([update])
    assert update.request.draft_token_ids == ids
    assert all(type(each) is int for each in update.request.draft_token_ids)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_whatever_it_proposes_the_tokens_are_the_models(async_scheduling: bool) -> None:
    found, warned, num_calls = run(TAKEN["without end"][0], async_scheduling=async_scheduling)
    assert found == plain()
    assert num_calls > 10 and warned == []


def test_requests_that_wait_for_their_ids_while_plans_are_in_flight_are_not_taken_for_new_ones() -> None:
    """Between their steps nothing can be planned. Of a batch that grows an adaptive length tries nothing."""
    found, _, num_calls = run(lambda ids, n: [5], adaptive=True, async_scheduling=True)
    assert found == plain() and num_calls > 0


def test_one_that_fails_now_and_then_is_asked_again() -> None:
    num_calls = count()

    def fails_twice_of_three(token_ids: Sequence[int], num_tokens: int) -> list[int]:
        return [5] if next(num_calls) % 3 == 2 else raises(token_ids, num_tokens)

    found, warned, num_asked = run(fails_twice_of_three)
    assert found == plain()
    assert num_asked > 10 and len(warned) > 6
    assert not any("asked no more" in each for each in warned)


def test_one_that_is_right_before_it_is_wrong_is_asked_again() -> None:
    found, warned, num_asked = run(lambda ids, n: [5, VOCAB_SIZE])
    assert found == plain()
    assert num_asked > 10 and not any("asked no more" in each for each in warned)


def test_one_may_do_with_what_it_is_given_whatever_it_likes() -> None:
    def destroys(token_ids: Any, num_tokens: int) -> Any:
        del token_ids[2:]
        token_ids[0] = 999_999
        token_ids.extend([1, 2, 3])
        return token_ids

    kept: list[Any] = []

    def keeps(token_ids: Any, num_tokens: int) -> Any:
        kept.append(token_ids)
        return memoryview(token_ids)[:2]  # which would keep a request from growing

    for does in (destroys, keeps):
        found, _, _ = run(does)
        assert found == plain()
    assert len(kept) > 10


def test_it_is_told_all_that_is_known_and_how_many_tokens_are_wanted() -> None:
    told: list[tuple[list[int], int]] = []

    def listens(token_ids: Sequence[int], num_tokens: int) -> list[int]:
        told.append((list(token_ids), num_tokens))
        return []

    run(listens)
    wholes = [each["prompt_token_ids"] + output[0] for each, output in zip(PROMPTS, plain(), strict=True)]
    for known, num_tokens in told:
        (whole,) = [each for each in wholes if each[: len(known)] == known]
        # The step brings one token itself, so of the last wanted ones nothing is left to guess.
        assert num_tokens == min(3, len(whole) - len(known) - 1)


def test_what_it_says_right_saves_steps() -> None:
    wholes = [each["prompt_token_ids"] + output[0] for each, output in zip(PROMPTS, plain(), strict=True)]

    def knows(token_ids: Sequence[int], num_tokens: int) -> list[int]:
        (whole,) = [each for each in wholes if each[: len(token_ids)] == list(token_ids)]
        return whole[len(token_ids) : len(token_ids) + num_tokens]

    found, warned, num_calls = run(knows)
    assert found == plain() and warned == []
    assert num_calls <= 3 * len(PROMPTS)  # 12 tokens: one, then four a step


# -- by itself -------------------------------------------------------------------------------------------------


def updated(num_asked: int, status: RequestStatus = RequestStatus.RUNNING) -> RequestUpdate:
    request = Request("a", [1, 2, 3], GREEDY)
    request.status, request.draft_token_ids = status, [-1] * num_asked
    return RequestUpdate(request, [3], 0, 0, None, None, 0)


def test_ids_before_one_that_is_none_are_kept() -> None:
    update = updated(4)
    with pytest.warns(UserWarning, match="proposed id 99, not in the vocabulary of 50: left out"):
        HostDrafting(Drafter(lambda ids, n: [5, 6, 99, 7]), 50).propose([update])
    assert update.request.draft_token_ids == [5, 6]


def test_nobody_is_asked_for_requests_that_have_ended_or_want_nothing() -> None:
    drafter = Drafter(lambda ids, n: [1] * n)
    updates = [updated(0), updated(3, RequestStatus.FINISHED), updated(2)]
    HostDrafting(drafter, 50).propose(updates)
    assert drafter.num_calls == 1
    assert updates[2].request.draft_token_ids == [1, 1]
    assert all(type(each) is int for each in updates[2].request.draft_token_ids)


# -- how it is passed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, {"method": "ngram"}, CUSTOM], ids=["nothing", "another", "no drafter"])
def test_a_drafter_and_the_method_custom_need_each_other(config: dict[str, Any] | None) -> None:
    drafter = None if config is CUSTOM else Drafter(lambda ids, n: [])
    with pytest.raises(ValueError) as error:
        LLM(**tiny(speculative_config=config), drafter=drafter)
    assert "need each other: pass drafter=..., or choose another method" in str(error.value)
    assert "\n" not in str(error.value)


class WithoutPropose:
    propose = 3


class TooFew:
    def propose(self, token_ids: Sequence[int]) -> list[int]:
        return []


class OneMore:
    def propose(self, token_ids: Sequence[int], num_tokens: int, *, temperature: float) -> list[int]:
        return []


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        (Drafter, "drafter=Drafter is a class: pass an object of it, drafter=Drafter()"),
        (WithoutPropose(), "of type WithoutPropose, which has no method propose(token_ids, num_tokens): give it one"),
        ("ngram", "of type str, which has no method propose(token_ids, num_tokens)"),
        (TooFew(), "TooFew.propose(token_ids: 'Sequence[int]') -> 'list[int]' is not: too many positional arguments"),
        (OneMore(), "is not: missing a required"),
    ],
)
def test_what_is_no_drafter_is_refused_at_once(drafter: Any, says: str) -> None:
    with pytest.raises(ValueError) as error:
        LLM(**tiny(speculative_config=CUSTOM), drafter=drafter)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


class Wide:
    def propose(self, *arguments: Any, **more: Any) -> list[int]:
        return []


class Compiled:
    """Its `propose` is no function."""

    def __init__(self) -> None:
        self.propose = partial(max, 1)  # of compiled code


@pytest.mark.parametrize("drafter", [Wide(), Compiled(), Drafter(lambda ids, n: [])])
def test_what_can_be_called_as_a_drafter_is_one(drafter: Any) -> None:
    check_drafter(drafter)


def test_a_drafter_cannot_cross_into_a_process_of_its_own() -> None:
    from teachllm import EngineConfig
    from teachllm.engine.llm_engine import Engine

    with pytest.raises(ValueError, match=r"objects of this process.*: set own_process=False and data_parallel_size=1"):
        Engine(EngineConfig(**tiny(speculative_config=CUSTOM)), own_process=True, drafter=Drafter(lambda ids, n: []))
