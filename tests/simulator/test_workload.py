"""A workload is the same for the same seed, and its parts do not depend on each other."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from teachllm.simulator.workload import Arrival, Workload, arrivals_of

VOCABULARY = 4096
SOME = Workload(num_requests=50, rate=10.0, prompt_len=(5, 40), output_len=(3, 9), priorities=(0, 1), seed=7)


def test_the_same_seed_gives_the_same_requests_and_another_gives_others() -> None:
    assert SOME.arrivals(VOCABULARY) == SOME.arrivals(VOCABULARY)
    assert SOME.arrivals(VOCABULARY) != replace(SOME, seed=8).arrivals(VOCABULARY)


def test_another_rate_or_output_length_meets_the_same_prompts() -> None:
    prompts = [arrival.prompt_token_ids for arrival in SOME.arrivals(VOCABULARY)]
    for other in (replace(SOME, rate=None), replace(SOME, rate=99.0, burst=5), replace(SOME, output_len=(1, 500))):
        assert [arrival.prompt_token_ids for arrival in other.arrivals(VOCABULARY)] == prompts


def test_numbers_are_in_their_ranges() -> None:
    made = SOME.arrivals(VOCABULARY)
    assert all(5 <= len(arrival.prompt_token_ids) <= 40 for arrival in made)
    assert len({len(arrival.prompt_token_ids) for arrival in made}) > 15
    assert {arrival.max_tokens for arrival in made} == set(range(3, 10))
    assert {arrival.priority for arrival in made} == {0, 1}
    assert all(0 <= token_id < VOCABULARY for arrival in made for token_id in arrival.prompt_token_ids)


def test_arrivals_come_at_their_rate_with_gaps_that_vary() -> None:
    times = [arrival.time for arrival in replace(SOME, num_requests=4000, start=5.0).arrivals(VOCABULARY)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] > 5.0
    assert statistics.fmean(gaps) == pytest.approx(1 / 10, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 10, rel=0.1)  # of an exponential distribution: its mean


def test_a_burst_arrives_together_and_the_rate_stays() -> None:
    times = [arrival.time for arrival in replace(SOME, num_requests=4000, burst=8).arrivals(VOCABULARY)]
    assert all(len(set(times[i : i + 8])) == 1 for i in range(0, 4000, 8))
    assert len(set(times)) == 500
    assert times[-1] == pytest.approx(4000 / 10, rel=0.15)
    assert {arrival.time for arrival in replace(SOME, rate=None, start=2.5).arrivals(VOCABULARY)} == {2.5}


def test_a_shared_prefix_is_the_same_in_all_and_what_follows_is_not() -> None:
    made = replace(SOME, shared_len=32, num_prefixes=2).arrivals(VOCABULARY)
    assert len({tuple(arrival.prompt_token_ids[:32]) for arrival in made}) == 2
    assert len({tuple(arrival.prompt_token_ids[32:]) for arrival in made}) == 50
    assert all(37 <= len(arrival.prompt_token_ids) <= 72 for arrival in made)


def test_parts_with_the_same_seed_draw_different_prompts_and_come_in_order_of_arrival() -> None:
    late = Arrival(1.0, [1, 2, 3], 4)
    made = arrivals_of([SOME, late, SOME], VOCABULARY)
    assert len(made) == 101 and late in made
    assert [arrival.time for arrival in made] == sorted(arrival.time for arrival in made)
    assert len({tuple(arrival.prompt_token_ids) for arrival in made}) == 101


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_requests": 0}, "num_requests=0: must be at least 1"),
        ({"n": 0}, "n=0: must be at least 1"),
        ({"burst": 0}, "burst=0: must be at least 1"),
        ({"shared_len": -1}, "shared_len=-1: must be 0 or more"),
        ({"rate": 0.0}, "rate=0.0: must be more than 0 requests per second, or None for all at once"),
        ({"prompt_len": (9, 3)}, r"prompt_len=\(9, 3\): must be a number of at least 1, or \(shortest, longest\)"),
        ({"output_len": 0}, "output_len=0: must be a number of at least 1"),
        ({"priorities": ()}, "priorities is empty"),
    ],
)
def test_a_number_out_of_its_range_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Workload(**fields)
    assert "\n" not in str(error.value)


def test_an_empty_workload_is_refused() -> None:
    with pytest.raises(ValueError, match="the workload is empty: give a Workload"):
        arrivals_of([], VOCABULARY)
