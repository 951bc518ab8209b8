"""benchmarks/batch_invariant.py: figures side by side, and a workload that fails in its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench.h200_script import load_script

script = load_script("batch_invariant")


@pytest.mark.parametrize("failing", [None, False, True])
def test_figures_stand_side_by_side_and_a_failure_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], failing: bool | None
) -> None:
    def benchmark(
        settings: dict[str, Any], workloads: object, on_result: Callable[[str, dict[str, Any]], None], **how: object
    ) -> None:
        is_fixed = settings["batch_invariant"]
        figures = {"tpot_ms": 2.0 if is_fixed else 1.0, "prefill_tok_s": 50.0 if is_fixed else 100.0}
        on_result("single", {"error": "no room"} if is_fixed == failing else figures)

    monkeypatch.setattr(script, "benchmark", benchmark)
    monkeypatch.setattr(script, "give_back", lambda: None)
    monkeypatch.setattr(script, "device_name", lambda device: "My Card")
    output = tmp_path / "result.json"
    code = script.main(["--models", "qwen3-0.6b", "--commit", "abc", "--output", str(output)])
    found, shown = json.loads(output.read_text()), capsys.readouterr().out
    assert (found["device"], found["commit"]) == ("My Card", "abc")
    cells = found["workloads"]["qwen3-0.6b"]["single"]
    if failing is None:
        assert code == 0 and cells == {"tpot_ms": [1.0, 2.0], "prefill_tok_s": [100.0, 50.0]}
        assert "single tpot_ms: 1, 2, 2.00" in shown and "single prefill_tok_s: 100, 50, 2.00" in shown
    else:
        assert code == 1 and cells["error"] == ([None, "no room"] if failing else ["no room", None])
        assert cells["tpot_ms"] == ([1.0, None] if failing else [None, 2.0]) and "no room" in shown
