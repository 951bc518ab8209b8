"""`teachllm ladder`: a rung a line, and a picture."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from teachllm.bench import ladder
from teachllm.bench.ladder import RUNGS
from tests.bench.test_ladder import CEILINGS, TINY


def test_the_command_shows_a_rung_a_line_and_draws_them(
    teachllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "LAPTOP", TINY)
    monkeypatch.setattr(ladder, "climb", partial(ladder.climb, num_passes=1))
    monkeypatch.setattr("teachllm.bench.ceilings.ceilings_of", lambda config: CEILINGS)
    written = ("--plot", str(tmp_path / "ladder.svg"), "--output-json", str(tmp_path / "ladder.json"))
    result = teachllm("ladder", "--device", "cpu", *written)
    assert result.exit_code == 0, result.stderr
    for rung in RUNGS:
        assert rung.name in result.stdout
    assert "two GPUs: two ranks would share this CPU's cores" in result.stdout
    assert "from the first rung to the best lossless one: " in result.stdout
    assert "<svg" in (tmp_path / "ladder.svg").read_text()
    assert json.loads((tmp_path / "ladder.json").read_text())["ratio"] > 1
