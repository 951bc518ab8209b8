"""`teachllm ladder`: a rung a line, and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from teachllm.bench import ladder
from teachllm.bench.ladder import RUNGS, Result, Run
from teachllm.simulator.workload import Arrival
from tests.bench.test_ladder import CEILINGS
from tests.simulator.engines import run


def results(*_: Any, **__: Any) -> Iterator[Result]:
    """What a CPU climbs, each rung faster than the one before it; all have the same tokens."""
    figures = run([Arrival(0.0, [5] * 20, 5)]).figures
    for height, rung in enumerate(RUNGS, start=1):
        why_not = rung.why_not("cpu", 0)
        found = Run(replace(figures, output_tokens_per_s=100.0 * height), 0.01, [[5]], [[7, 8]], "m", "float32")
        yield Result(rung, None if why_not else found, why_not)


def test_the_command_shows_a_rung_a_line_and_draws_them(
    teachllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "climb", results)
    monkeypatch.setattr("teachllm.bench.ceilings.ceilings_of", lambda config: CEILINGS)
    written = ("--plot", str(tmp_path / "ladder.svg"), "--output-json", str(tmp_path / "ladder.json"))
    result = teachllm("ladder", "--device", "cpu", *written)
    assert result.exit_code == 0, result.stderr
    for rung in RUNGS:
        assert rung.name in result.stdout
    assert "two GPUs: two ranks would share this CPU's cores" in result.stdout
    assert "from the first rung to the best lossless one: 9.0 times the tokens/s" in result.stdout
    assert "<svg" in (tmp_path / "ladder.svg").read_text()
    assert json.loads((tmp_path / "ladder.json").read_text())["ratio"] == 9


def test_a_token_that_has_changed_is_an_error_after_the_table(teachllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*_: Any, **__: Any) -> Iterator[Result]:
        for each in results():
            is_changed = each.rung.name == "paged blocks" and each.run is not None
            yield replace(each, run=replace(each.run, tokens=[[7, 9]])) if is_changed else each

    monkeypatch.setattr(ladder, "climb", changed)
    monkeypatch.setattr("teachllm.bench.ceilings.ceilings_of", lambda config: CEILINGS)
    result = teachllm("ladder", "--device", "cpu")
    assert result.exit_code == 1 and "a rung that must not change a greedy token has changed one" in result.stderr
    assert "paged blocks: request 0 has another token 1" in result.stdout
