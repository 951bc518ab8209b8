"""Faults that lessons plant are where they are said to be; that tests find them is what `make mutants` checks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from teachllm_lessons import mutants
from teachllm_lessons.faults import FAULTS, ROOT, Fault, find_fault
from tests.thorough import THOROUGH


def test_there_are_some_for_every_concept_with_names_of_their_own() -> None:
    assert len(FAULTS) >= 15
    assert len({fault.name for fault in FAULTS}) == len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert all(re.fullmatch(r"\d\d[a-z]", fault.id) for fault in FAULTS)  # which says nothing of what it is
    assert {fault.lesson for fault in FAULTS} == {f"{number:02}" for number in range(14)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_it_changes_one_place_and_leaves_a_program(fault: Fault) -> None:
    planted = fault.planted()
    assert planted != (ROOT / fault.path).read_text(encoding="utf-8")
    ast.parse(planted)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_the_test_that_is_named_is_there(fault: Fault) -> None:
    file, _, name = fault.test.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {re.escape(name.partition('[')[0])}\(", text, re.MULTILINE)


def test_a_fault_whose_place_has_gone_is_named(tmp_path: Path) -> None:
    fault = FAULTS[0]
    gone = Fault(**{**vars(fault), "before": "no such line"})
    with pytest.raises(ValueError, match=rf"{fault.id}: 'no such line' stands 0 times in {fault.path}"):
        gone.planted()


def test_one_that_is_found_and_one_that_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.copy_to(tmp_path)
    found = find_fault("03a")
    run_test = mutants.run_test

    def only_with_the_fault(folder: Path, test: str) -> tuple[int, str]:
        """Return that the test passes without it, as this suite has it run anyway."""
        is_planted = (folder / found.path).read_text(encoding="utf-8") == found.planted()
        return run_test(folder, test) if is_planted else (0, "1 passed")

    if not THOROUGH:
        monkeypatch.setattr(mutants, "run_test", only_with_the_fault)
    outcome = mutants.try_fault(tmp_path, found)
    assert outcome.is_good and "assert" in outcome.message
    harmless = Fault(**{**vars(found), "after": "        return not num_running\n"})
    outcome = mutants.try_fault(tmp_path, harmless)
    assert not outcome.is_found and outcome.is_clean and not outcome.is_good
    assert (tmp_path / found.path).read_text() == (ROOT / found.path).read_text()
