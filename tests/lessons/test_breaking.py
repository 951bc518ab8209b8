"""A planted fault shows in the scenario that its lesson names, and is found by who looks for it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from teachllm_lessons.breaking import plant
from teachllm_lessons.broken_process import BrokenProcess
from teachllm_lessons.mutants import copy_to
from tests.thorough import only_thorough

FAULT = "00b"
SCENARIOS = {  # those that notebooks name and do not run
    "00b": "lesson_00:a_stream",
    "02b": "lesson_02:blocks_of_prompts",
    "02c": "lesson_02:one_beginning_for_two",
    "06b": "lesson_06:an_urgent_newcomer",
    "08a": "lesson_08:rising_scores",
}


def assert_shown(said: str) -> None:
    """Fail unless what a scenario prints with a fault is another thing than what it prints without."""
    whole, broken = said.split("With the fault:")
    assert whole.count("```") == broken.count("```") == 2
    assert whole.split("```")[1].strip() != broken.split("```")[1].strip() != ""


@only_thorough  # a notebook that the usual run executes asks all of it but for the words
def test_a_process_shows_the_fault_then_tells_what_the_test_that_notices_says_and_then_it_may_end() -> None:
    broken = plant(FAULT)
    assert_shown(broken.symptom(f"teachllm_lessons.helpers.{SCENARIOS[FAULT]}").text)
    said = broken.reveal().text
    assert "- " in said and "+ " in said and "text.rstrip(" in said
    assert "::test_an_unfinished_character_is_shown_only_when_nothing_more_comes" in said
    assert "fails: `AssertionError: assert" in said
    assert broken._asked("scenario", "os:nobody")[1].startswith("AttributeError: module 'os' has no attribute")
    assert broken._asked("scenario", "os:abort") == (-signal.SIGABRT, "it ended without a word")


@only_thorough
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != FAULT])
def test_a_scenario_shows_the_fault(name: str) -> None:
    assert_shown(plant(name).symptom(f"teachllm_lessons.helpers.{SCENARIOS[name]}").text)


def test_a_guess_is_judged_file_by_file_and_function_by_function() -> None:
    broken = plant("06a")
    assert broken.guess("teachllm/core/block_pool.py").text.startswith("✗ Not in")
    assert broken.guess("teachllm/core/scheduler.py").text == "✓ It is in `teachllm/core/scheduler.py`. Which function?"
    assert plant("11a").guess("gptq.py").text.startswith("? Which one: `teachllm/quantization/algorithms/gptq.py`, ")
    assert broken.guess("scheduler.py", "_preempt").text == "The file is right. `_preempt` is as it should be."
    assert broken.guess("scheduler.py", "_make_room").text.startswith("✓ It is in `teachllm/core/scheduler.py`, in")


@only_thorough
def test_a_process_that_ends_or_never_answers_is_followed_by_another_one(tmp_path: Path) -> None:
    copy_to(tmp_path)
    process = BrokenProcess(tmp_path)
    with pytest.raises(TimeoutError, match="is the machine busy"):
        process.ask("scenario", "signal:pause", 2.0)
    assert not process.is_there
    broken = plant("06a")
    assert broken._asked("scenario", "os:abort")[0] == -signal.SIGABRT
    assert broken._asked("scenario", "os:getpid") == (0, "")
