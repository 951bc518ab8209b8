"""What tests of lessons share: an answer that must be rejected, and the words that have to say why."""

from __future__ import annotations

import re
from typing import Any

from teachllm_lessons.exercise import Checked, Exercise, check
from tests.thorough import THOROUGH


def accepted(exercise: Exercise, words: str = "") -> None:
    """Fail unless the engine's own piece keeps its contract, and the engine runs with it and says these words."""
    checked = check(exercise, exercise.reference)
    assert checked.is_right, checked.message
    assert re.search(words, checked.message), checked.message


def keeps_contract(exercise: Exercise, words: str) -> None:
    """Fail unless the engine's own piece keeps its contract; that the engine runs with it is for the thorough half."""
    if THOROUGH:
        accepted(exercise, words)
    else:
        assert exercise.contract(exercise.reference) > 0


def rejected(exercise: Exercise, piece: Any, words: str) -> Checked:
    """A wrong answer is found out, by a message that has these words; what is left is the engine's own piece."""
    checked = check(exercise, piece)
    assert not checked.is_right
    assert checked.verdict == "wrong"
    assert re.search(words, checked.message), checked.message
    assert checked.piece is exercise.reference
    return checked
