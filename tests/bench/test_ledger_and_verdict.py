"""benchmarks/ledger.py and verdict.py: as far as they go without a GPU, and what they say there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm import EngineConfig
from teachllm.engine.capacity import num_undisturbed
from teachllm.engine.observability import ceilings
from teachllm.engine.observability.ceilings import device_name, remember
from teachllm.roofline import Ceilings
from tests.bench.h200_script import SMALL_SHAPE, h200, load_script

ledger, verdict = load_script("ledger"), load_script("verdict")


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Of a model of a few kilobytes on a CPU."""
    monkeypatch.setattr(h200, "SHAPES", {"small": SMALL_SHAPE})
    return h200.engine_settings(h200.write_shape("small", tmp_path), "cpu") | {"num_gpu_blocks_override": 40}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
@pytest.mark.parametrize(("script", "what"), [(ledger, "the ledger is a GPU's"), (verdict, "the verdicts are a GPU's")])
def test_without_a_gpu_they_say_so(script: Any, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        script.main([])
    assert stopped.value.code == 2 and what in capsys.readouterr().err


def test_the_ledger_runs_as_many_requests_as_predicted_and_one_more(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "INPUT_LEN", 30)
    monkeypatch.setattr(ledger, "OUTPUT_LEN", 40)
    config = EngineConfig(**settings).resolve(40960)
    count = num_undisturbed(config, 40, 30, 40)
    assert count >= 40 // 5
    assert ledger.disturbances(settings, 64, count) == (0, False)
    assert ledger.disturbances(settings, 64, count + 1) != (0, False)


def test_a_case_of_the_verdict_counts_steps_and_floors(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TEACHLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(verdict, "engine_settings", lambda path, device: settings)
    remember(Ceilings(device_name("cpu"), "float32", 1e18, 1e18, 1e18, 1e18))
    found = verdict.steps_of(Path(settings["model"]), 8, 10, 2)
    assert (found["bounds"], found["floors_above"]) == (["overhead"], 0)
    assert 0 < found["floor"] < 1e-9 < found["seconds"] and found["num_flops"] > 0
    (tmp_path / "ceilings.json").unlink()
    monkeypatch.setattr(ceilings, "_KNOWN", [Ceilings(device_name("cpu"), "float32", 1.0, 1.0, 1.0, 1.0)])
    assert verdict.steps_of(Path(settings["model"]), 8, 10, 2)["floors_above"] == 7
