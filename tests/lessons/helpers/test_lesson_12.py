"""Lesson 12: the engine's own choice of a replica keeps the contract, and wrong ones are told why they are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from teachllm.distributed.layout import Layout
from teachllm.distributed.step_bytes import step_bytes
from teachllm.engine.replicas.data_parallel import least_loaded
from teachllm_lessons.helpers.lesson_12 import (
    BYTES_SENT,
    CHOOSE_REPLICA,
    RoundRobin,
    on_gpus,
    one_and_two_ranks,
    serve,
    shared_experts,
    weight_bytes,
)
from teachllm_lessons.helpers.pictures.lesson_12 import draw_gains, draw_ranks
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


@pytest.mark.parametrize(("operation", "words"), [("all_reduce", "within the step"), ("recv", "waits for one")])
def test_the_picture_of_ranks_says_what_its_parts_mean(operation: str, words: str) -> None:
    spans = [[operation, 0.002, 0.002]]
    told = {"stage": 0, "begin": 0.0, "end": 0.01, "exchanges": spans, "sent": {operation: (1, 64)}}
    (legend,) = draw_ranks([{"event": "step", "step": 3, "ranks": [told]}]).figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    assert len(named) == 3 and words in named[1] and named[2] == "nothing to compute"


@only_thorough
def test_two_replicas_that_share_experts_exchange_four_times_a_layer() -> None:
    load, sent = shared_experts()
    assert sent == "24 x all_to_all"
    assert [len(layer) for layer in load] == [8] * 6
    assert len({sum(layer) for layer in load}) == 1  # each layer's router picks as many for each token


def test_bytes_by_hand_are_those_of_the_models_shape() -> None:
    counts = step_bytes(Layout(tensor=2).coords(0), 6, 256, 4, num_tokens=4, num_sampled=4)
    found = sum(num_bytes for _, num_bytes in counts.values())
    stage = step_bytes(Layout(pipeline=2).coords(0), 3, 256, 4, num_tokens=4, num_sampled=4)["send"][1]
    assert BYTES_SENT.compare(13 * 4 * 256 * 4 + 4 * 16, found, stage=stage).verdict == "right"
    assert "best logits" in BYTES_SENT.compare(53_248, found, stage=stage).text
    for wrong in (57_344, 57_408):
        assert "no sum" in BYTES_SENT.compare(wrong, found, stage=stage).text
    assert found // stage == 13
