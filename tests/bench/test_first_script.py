"""benchmarks/first.py sets each figure of a first run beside the later one's, for rates and for times."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

SPEC = importlib.util.spec_from_file_location("first", Path(__file__).parents[2] / "benchmarks" / "first.py")
assert SPEC is not None and SPEC.loader is not None
first = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(first)

FIGURES = {
    **{"ready_s": 30.0, "first_step_ms": 5.0, "first_prefill_tok_s": 90.0, "step_ms": 4.0, "prefill_tok_s": 100.0},
    **{"cached_ready_s": 9.0, "cached_first_step_ms": 4.0, "cached_step_ms": 4.0},
}


def test_the_share_of_the_later_speed_is_below_one_where_the_first_run_is_slower() -> None:
    assert first.rows(FIGURES) == [
        ("first_step_ms", 5.0, 4.0, 0.8),
        ("first_prefill_tok_s", 90.0, 100.0, 0.9),
        ("cached_first_step_ms", 4.0, 4.0, 1.0),
    ]


def test_it_measures_each_workload_of_each_model_and_records_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[tuple[str, str]] = []

    def first_run(settings: dict[str, Any], workload: str) -> dict[str, float]:
        asked.append((Path(settings["model"]).name, workload))
        return FIGURES

    monkeypatch.setattr(first, "first_run", first_run)
    output = tmp_path / "result.json"
    assert first.main(["--models", "qwen3-8b", "--commit", "abc", "--output", str(output)]) == 0
    assert asked == [("qwen3-8b", "mixed"), ("qwen3-8b", "batch64")]
    result = json.loads(output.read_text())
    assert result["commit"] == "abc" and result["first"] == {"qwen3-8b": {"mixed": FIGURES, "batch64": FIGURES}}
    printed = capsys.readouterr().out
    assert "qwen3-8b batch64: ready after 30.0 s, with cached kernels 9.0" in printed and "80%" in printed
