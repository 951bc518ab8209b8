"""benchmarks/drafters.py: what it records, and that it fails where an answer is another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.h200_script import load_script
from tests.thorough import only_thorough

drafters = load_script("drafters")
FEW = ["--device", "cpu", "--dtype", "float32", "--limit", "1", "--max-tokens", "24", "--methods", "eagle", "ngram"]


@only_thorough
def test_it_records_what_each_drafter_yields_and_where_that_was_measured(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    drafters.main([*FEW, "--drafts", "2", "--commit", "abc", "--output", str(output)])
    found: dict[str, Any] = json.loads(output.read_text())
    assert (found["commit"], found["variant"]) == ("abc", "float32")
    assert found["command"].startswith("python3 benchmarks/drafters.py --device cpu")
    assert found["device"] and found["versions"]["torch"]
    for task, method, num_drafts in [("test", "eagle", 2), ("test", "ngram", 2), ("copy", "ngram", 6)]:
        figures = found[task][method]
        assert figures["num_speculative_tokens"] == num_drafts
        assert figures["num_answers"] == figures["num_same_answers"] == 1
        steps = max(figures["num_verifications"], 1)
        assert figures["mean_length"] == 1 + figures["num_accepted_tokens"] / steps
    assert 2 < found["test"]["eagle"]["mean_length"] <= 3
    assert found["copy"]["ngram"]["mean_length"] > found["test"]["ngram"]["mean_length"]


@only_thorough
def test_an_answer_that_is_not_the_one_without_drafts_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = drafters.answer

    def another(questions: Any, speculation: Any, args: Any) -> Any:
        answers, found = answer(questions, speculation, args)
        return [ids[:-1] for ids in answers] if speculation else answers, found

    monkeypatch.setattr(drafters, "answer", another)
    with pytest.raises(SystemExit, match="not all answers are those without drafts"):
        drafters.main([*FEW[:-1], "--tasks", "test"])


@only_thorough
def test_a_few_questions_are_taken_from_all_of_them() -> None:
    every, few = drafters.conversations("test", None), drafters.conversations("test", 5)
    assert len(few) == 5 and few[0] == every[0] and few[-1] in every[len(every) // 2 :]
    assert 0 < len(drafters.conversations("copy", None)) < len(every)
