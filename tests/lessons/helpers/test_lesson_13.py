"""Lesson 13: settings that serve the workload well are found, and others are told what they waste."""

from __future__ import annotations

from typing import Any

import pytest

from teachllm_lessons.helpers.lesson_13 import SETTINGS, SMALL, bottom, draw_ladder, top, which_rung
from teachllm_lessons.results import committed
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough


def test_the_ladders_own_settings_are_right() -> None:
    keeps_contract(SETTINGS, "in 23 steps in place of 104")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_gpu_blocks_override": 64}, r"64 blocks of 16 are 1024 slots, and the memory has room for 576"),
        ({"block_size": SMALL.max_len}, "EngineConfig refuses it: enable_prefix_caching=True shares full blocks"),
        ({"batch": 8}, "EngineConfig refuses it: .*unexpected keyword argument 'batch'"),
        ({"max_model_len": 128}, "max_model_len must stay 192"),
    ],
)
def test_others_are_told_what_they_waste(changes: dict[str, Any], words: str) -> None:
    rejected(SETTINGS, lambda: top() | changes, words)


@only_thorough
def test_the_bottom_is_no_answer() -> None:
    rejected(SETTINGS, bottom, "computes 418 tokens")
    rejected(SETTINGS, lambda: top() | {"max_num_seqs": 4}, "takes 34 steps, 28 are enough")
    uncached = {"enable_prefix_caching": False}
    rejected(SETTINGS, lambda: top() | uncached, "418 tokens, 320 are enough: all eight prompts begin alike")


def test_what_are_no_settings_are_no_answer() -> None:
    rejected(SETTINGS, lambda: None, "give a dict of EngineConfig's fields")


@only_thorough
def test_without_a_fault_no_rung_changes_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    which_rung()
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 7 and all(line.endswith("the same answers") for line in told)


def test_the_committed_ladder_is_drawn_with_its_rungs() -> None:
    _, found = committed("ladder")
    (climbed,) = found["models"].values()
    drawn = draw_ladder(climbed["rungs"], "GPU")
    assert "recompute" in drawn.says and "graphs, running ahead" in drawn.says
    assert climbed["ratio"] > 50
    with pytest.raises(FileNotFoundError, match="no result named"):
        committed("nothing-of-the-kind")
