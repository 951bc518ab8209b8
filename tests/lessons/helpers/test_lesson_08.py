"""Lesson 08: the engine's own update keeps the contract, and wrong ones are told why they are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from teachllm.engine.overrides import EngineOverrides
from teachllm_kernels._triton import tl, triton
from teachllm_kernels.attention import decode_plan
from teachllm_lessons.helpers.lesson_08 import (
    RESCALINGS,
    UPDATE,
    draw_roofline,
    draw_tiles,
    long_answer,
    rescalings_of_all_orders,
    rising_scores,
)
from teachllm_lessons.helpers.lesson_08_kernels import Probe
from teachllm_lessons.watch import Watch
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough


@triton.jit
def without_shrinking(scores, v, largest, total, acc):
    higher = tl.maximum(largest, tl.max(scores, axis=1))
    base = tl.where(higher == -float("inf"), 0.0, higher)
    weight = tl.exp2(scores - base[:, None])
    return higher, total * tl.exp2(largest - base) + tl.sum(weight, axis=1), acc + tl.dot(weight, v)


@triton.jit
def without_a_base(scores, v, largest, total, acc):
    higher = tl.maximum(largest, tl.max(scores, axis=1))
    weight = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(largest - higher)
    return higher, total * shrink + tl.sum(weight, axis=1), acc * shrink[:, None] + tl.dot(weight, v)


@triton.jit
def of_this_tile(scores, v, largest, total, acc):
    higher = tl.max(scores, axis=1)
    base = tl.where(higher == -float("inf"), 0.0, higher)
    weight = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    return higher, total * shrink + tl.sum(weight, axis=1), acc * shrink[:, None] + tl.dot(weight, v)


@triton.jit
def of_all_rows(scores, v, largest, total, acc):
    higher = tl.maximum(largest, tl.max(tl.max(scores, axis=1), axis=0))
    base = tl.where(higher == -float("inf"), 0.0, higher)
    weight = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    return higher, total * shrink + tl.sum(weight, axis=1), acc * shrink[:, None] + tl.dot(weight, v)


@triton.jit
def in_base_e(scores, v, largest, total, acc):
    higher = tl.maximum(largest, tl.max(scores, axis=1))
    base = tl.where(higher == -float("inf"), 0.0, higher)
    weight = tl.exp(scores - base[:, None])
    shrink = tl.exp(largest - base)
    return higher, total * shrink + tl.sum(weight, axis=1), acc * shrink[:, None] + tl.dot(weight, v)


@triton.jit
def of_nothing(scores, v, largest, total, acc):
    raise NotImplementedError


def test_the_engines_own_is_right() -> None:
    keeps_contract(UPDATE, "tiles of 64 keys went through the kernel")


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (without_shrinking, r"a later tile with the largest score: .*acc is .* should be .*shrinks by 2\^\(1 - 4\)"),
        (without_a_base, r"a masked first tile: scores \[-inf, -inf\]: total is not a number"),
        (of_this_tile, r"\[3, 1\], then \[2, 0\]: largest is 2 and should be 3, of all tiles so far"),
        (of_all_rows, r"right for one row, and not for several: .* reduce along axis 1"),
        (in_base_e, r"total is 1\.13534 and should be 1\.25\..* so use tl\.exp2"),
    ],
)
def test_wrong_ones_are_told_why(piece: Any, words: str) -> None:
    rejected(UPDATE, piece, words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a compiler takes it for an error")
def test_an_empty_frame_is_not_called_wrong() -> None:
    from teachllm_lessons.exercise import LIMIT
    from teachllm_lessons.guard import run_guarded

    assert isinstance(run_guarded(lambda: UPDATE.contract(of_nothing), LIMIT).error, NotImplementedError)


@only_thorough
def test_without_a_fault_every_length_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    before = decode_plan._MULTIPROCESSORS
    rising_scores()
    assert before == decode_plan._MULTIPROCESSORS
    assert [line.split("off by ")[1] for line in capsys.readouterr().out.splitlines()] == ["0.000"] * 3


@only_thorough
def test_without_a_fault_the_answer_is_the_engines_own(capsys: pytest.CaptureFixture[str]) -> None:
    before = decode_plan._MULTIPROCESSORS
    long_answer()
    assert before == decode_plan._MULTIPROCESSORS
    assert capsys.readouterr().out == "the answer goes on with ' token is', behind 'A'\n"


def test_the_probe_keeps_what_a_decode_saw_and_counts_bytes() -> None:
    probe = Probe()
    with Watch(overrides=EngineOverrides(attention=probe), num_gpu_blocks_override=24, max_model_len=128) as watch:
        watch.add("A", list(range(10, 50)), 3)
        watch.step()
        layers, heads, kv_heads, size = 6, 8, 4, 64
        assert probe.scores == layers * heads * 40 * 40 * 8
        assert probe.once == layers * 40 * 2 * size * (2 * heads + 2 * kv_heads)
        watch.step()
    assert len(probe.decodes) == layers and len(probe.decodes[0]) == 1
    seen = probe.decodes[0][0]
    assert seen.scores.shape == (heads, 41) and seen.v.shape == (41, heads, size) and len(seen.blocks) == 3
    rises, behind = probe.rises(16)
    assert 0 < rises <= behind == layers * heads * 2
    assert "tile 2: largest" in draw_tiles(seen.scores[0], 16, seen.blocks).says
    assert sum(probe.peaks(16).values()) == layers * heads
    assert 0 < probe.weight_of_first() < 1


def test_random_orders_rescale_as_often_as_the_sum_says() -> None:
    for num_tiles in (2, 3, 6):
        expected = sum(1 / tile for tile in range(2, num_tiles + 1))
        assert rescalings_of_all_orders(num_tiles) == pytest.approx(expected)
    assert RESCALINGS.compare(1.45, rescalings_of_all_orders(6)).verdict == "right"
    assert "the first tile" in RESCALINGS.compare(2.45, rescalings_of_all_orders(6)).text


def test_labels_of_a_roofline_do_not_lie_on_each_other() -> None:
    points = [("a", 4.0, 17.1e12), ("b", 4.0, 16.9e12), ("c", 4.0, 7e12)]
    picture = draw_roofline({"read_bandwidth": 4.45e12, "flops": 7e14}, "flops", points, "a card")
    heights = sorted(text.get_position()[1] for text in picture.figure.axes[0].texts if text.get_text() in "abc")
    assert all(high / low > 1.3 for low, high in pairwise(heights))
    assert "a: 17.1 TFLOP/s, 96% of its roof" in picture.says
