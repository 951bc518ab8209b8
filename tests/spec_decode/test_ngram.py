"""The n-gram drafter: prompt lookup over one request's known tokens."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teachllm.spec_decode.ngram import NgramDrafter
from teachllm_lessons.helpers.lesson_10 import contract_propose


def test_it_proposes_what_followed_the_same_tokens_before() -> None:
    tokens = [12, 13, 14, 15, 13, 40, 12, 13]
    assert NgramDrafter(max_ngram=3, min_ngram=1).propose(tokens, 2) == [14, 15]
    assert NgramDrafter(max_ngram=1, min_ngram=1).propose(tokens, 2) == [40, 12]


def test_fewer_tokens_are_proposed_where_fewer_are_known_and_none_where_nothing_matches() -> None:
    drafter = NgramDrafter(max_ngram=3, min_ngram=2)
    assert drafter.propose([1, 2, 5, 1, 2], 8) == [5, 1, 2]
    assert drafter.propose([1, 2, 5, 2], 8) == []  # one token alone is too short
    assert drafter.propose([1], 8) == []
    assert drafter.propose([], 8) == []


def test_it_is_what_its_lesson_says() -> None:
    assert contract_propose(NgramDrafter(max_ngram=4, min_ngram=1).propose) > 400


def test_no_proposals_are_made_where_none_are_asked_for() -> None:
    assert NgramDrafter(2, 1).propose([1, 2, 1, 2], 0) == []


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 5))
def test_every_kind_of_sequence_gives_the_same_plain_integers(tokens: list[int], num_tokens: int) -> None:
    drafter = NgramDrafter(3, 1)
    expected = drafter.propose(tokens, num_tokens)
    assert all(type(token) is int for token in expected)
    for same in (array("q", tokens), np.array(tokens, dtype=np.int32), tuple(tokens)):
        assert drafter.propose(same, num_tokens) == expected


def test_a_requests_tokens_can_grow_after_a_proposal() -> None:
    tokens = array("q", [4, 5, 4])
    drafter = NgramDrafter(2, 1)
    assert drafter.propose(tokens, 1) == [5]
    tokens.append(5)  # refused while anything still views the array
    assert drafter.propose(tokens, 1) == [4]


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(2, 3), (2, 0), (0, 0)])
def test_sizes_that_cannot_match_are_refused(max_ngram: int, min_ngram: int) -> None:
    with pytest.raises(ValueError, match="min_ngram"):
        NgramDrafter(max_ngram, min_ngram)
