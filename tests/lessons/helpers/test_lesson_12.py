"""Lesson 12: the engine's own choice of a replica keeps the contract, and wrong ones are told why they are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from teachllm.engine.replicas.data_parallel import least_loaded
from teachllm_lessons.helpers.lesson_12 import (
    CHOOSE_REPLICA,
    RoundRobin,
    on_gpus,
    one_and_two_ranks,
    serve,
    shared_experts,
    weight_bytes,
)
from teachllm_lessons.helpers.lesson_12_pictures import draw_gains
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough


def fewest(num_waiting: Sequence[int], num_running: Sequence[int]) -> int:
    loads = [waiting + running for waiting, running in zip(num_waiting, num_running, strict=True)]
    return loads.index(min(loads))


def only_who_waits(num_waiting: Sequence[int], num_running: Sequence[int]) -> int:
    return list(num_waiting).index(min(num_waiting))


def the_last_of_equals(num_waiting: Sequence[int], num_running: Sequence[int]) -> int:
    loads = [4 * waiting + running for waiting, running in zip(num_waiting, num_running, strict=True)]
    return max(place for place, load in enumerate(loads) if load == min(loads))


def the_load(num_waiting: Sequence[int], num_running: Sequence[int]) -> int:
    return min(4 * waiting + running for waiting, running in zip(num_waiting, num_running, strict=True))


def counts_in(num_waiting: list[int], num_running: list[int]) -> int:
    chosen = least_loaded(num_waiting, num_running)
    num_waiting[chosen] += 1
    return chosen


def test_the_engines_own_is_right() -> None:
    keeps_contract(CHOOSE_REPLICA, "in processes of their own: 3 and 3 requests, the same words")


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (fewest, r"choose_replica\(\[1, 0\], \[0, 3\]\) is 0 and should be 1: who waits counts as much as four"),
        (only_who_waits, r"choose_replica\(\[0, 0\], \[1, 0\]\) is 0 and should be 1: replica 1 has nothing to do"),
        (the_last_of_equals, r"choose_replica\(\[0, 0\], \[0, 0\]\) is 1 and should be 0: of equals the first"),
        (the_load, r"choose_replica\(\[5\], \[3\]\) is 23: give the number of a replica, from 0 to 0"),
        (counts_in, r"choose_replica\(\[0\], \[0\]\) changes its arguments"),
        (RoundRobin(), r"is \d and should be \d"),
    ],
)
def test_wrong_ones_are_told_why(piece: object, words: str) -> None:
    rejected(CHOOSE_REPLICA, piece, words)


@only_thorough
def test_by_load_all_have_answered_sooner_than_in_turn() -> None:
    in_turn, by_load = serve(RoundRobin()), serve(least_loaded)
    assert by_load.num_steps < in_turn.num_steps
    said = [{name: watch.text(name) for watch in each.watches for name in watch.outputs} for each in (in_turn, by_load)]
    assert said[0] == said[1]


@only_thorough
def test_without_a_fault_two_ranks_say_what_one_process_says(capsys: pytest.CaptureFixture[str]) -> None:
    one_and_two_ranks()
    lines = capsys.readouterr().out.splitlines()
    assert ["one process" in line for line in lines] == [True, False, True, False]
    said = [line.partition("'")[2] for line in lines]
    assert said[0] == said[1]
    assert said[2] == said[3] != said[0]


def test_two_ranks_have_about_half_the_weights_each() -> None:
    (whole,) = weight_bytes()
    assert all(0.5 < each / whole < 0.55 for each in (*weight_bytes(tensor=2), *weight_bytes(pipeline=2)))


def test_what_two_gpus_gain_is_found() -> None:
    ways, source = on_gpus()
    assert ways.keys() >= {"one", "tp2", "pp2", "dp2"}
    assert "commit" in source
    assert "tensor parallel 2, one request, a token: 1." in draw_gains(ways).says


@only_thorough
def test_two_replicas_that_share_experts_exchange_four_times_a_layer() -> None:
    load, sent = shared_experts()
    assert sent == "24 x all_to_all"
    assert [len(layer) for layer in load] == [8] * 6
    assert len({sum(layer) for layer in load}) == 1  # each layer's router picks as many for each token
