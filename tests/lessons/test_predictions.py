"""The predictions of lessons: each answer is right, no trap is, and nothing is told before there is a number."""

from __future__ import annotations

import importlib
import string
from collections.abc import Iterator

import pytest

from teachllm_lessons.faults import ROOT
from teachllm_lessons.predict import Prediction

HELPERS = sorted((ROOT / "lessons" / "teachllm_lessons" / "helpers").glob("lesson_*.py"))


def declared() -> Iterator[tuple[str, Prediction]]:
    for path in HELPERS:
        module = importlib.import_module(f"teachllm_lessons.helpers.{path.stem}")
        for name, found in vars(module).items():
            if isinstance(found, Prediction):
                yield f"{path.stem}.{name}", found


@pytest.mark.parametrize("prediction", [pytest.param(found, id=name) for name, found in declared()])
def test_only_the_answer_is_right_and_each_trap_is_told_apart(prediction: Prediction) -> None:
    values = {name: 0 for _, name, _, _ in string.Formatter().parse(prediction.because) if name}
    nothing = prediction.compare(None, prediction.answer, **values)
    assert nothing.verdict == "open"
    assert f"{prediction.answer:,}" not in nothing.text.removeprefix(f"**{prediction.asks}:**")
    assert prediction.compare(prediction.answer, prediction.answer, **values).verdict == "right"
    assert 2 <= len(set(prediction.traps.values())) <= 5
    for number, told in prediction.traps.items():
        compared = prediction.compare(number, prediction.answer, **values)
        assert compared.verdict == "wrong" and told in compared.text
