"""Ways of running a model beside each other, by benchmarks/quantized.py and parallel.py: figures, goals, failures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.bench.h200_script import load_script

quantized, parallel = load_script("quantized"), load_script("parallel")
Result = tuple[int, dict[str, Any], str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs the script with an engine that reports its settings as figures."""
    asked: list[dict[str, Any]] = []

    def benchmark(
        settings: dict[str, Any], workloads: dict[str, Any], on_result: Callable[..., None], **how: Any
    ) -> None:
        common = ("model", "load_format", "skip_tokenizer_init", "device", "max_model_len", "gpu_memory_utilization")
        asked.append({name: value for name, value in settings.items() if name not in common} | how)
        for name in workloads:
            failed = settings.get("quantization") == "int4" and name == "mixed"
            on_result(name, {"error": "no room"} if failed else {"tpot_ms": 2.4, "step_ms": 5.4, "tok_s": 12_000.0})

    def start(*arguments: str, script: ModuleType = quantized) -> Result:
        ways = sys.modules["h200_parts.ways"]
        monkeypatch.setattr(ways, "benchmark", benchmark)
        monkeypatch.setattr(ways, "give_back", lambda: None)
        monkeypatch.setattr(ways, "device_name", lambda device: "My Card")
        output = tmp_path / "result.json"
        code = script.main([*arguments, "--commit", "abc", "--output", str(output)])
        return code, json.loads(output.read_text()) | {"asked": asked}, capsys.readouterr().out

    return start


def test_every_way_gets_its_settings_and_workloads(run: Callable[..., Result]) -> None:
    code, found, _ = run()
    assert code == 1  # one has failed
    assert (found["device"], found["commit"]) == ("My Card", "abc")
    assert found["asked"] == [
        {"with_cold": False},
        {"quantization": "fp8", "with_cold": False},
        {"quantization": "int8", "with_cold": False},
        {"quantization": "int4", "with_cold": False},
        {"kv_cache_dtype": "fp8", "with_cold": False},
    ]
    cells = found["workloads"]["qwen3-8b"]
    assert list(cells) == list(quantized.WAYS)
    assert set(cells["fp8"]) == {"single", "batch64", "mixed"} and set(cells["fp8-kv"]) == {"batch64", "long", "mixed"}
    assert cells["int4"]["mixed"] == {"error": "no room"}


def test_figures_stand_beside_what_is_to_be_reached_and_the_peer(run: Callable[..., Result]) -> None:
    code, found, shown = run("--ways", "fp8,int4", "--workloads", "single", "--quick")
    assert code == 0 and found["asked"][0] == {
        **{"quantization": "fp8", "with_cold": False},
        **{"num_warmups": 1, "num_runs": 1},
    }
    assert "qwen3-8b fp8     single tpot_ms: 2.4, to reach 2.5: yes, vLLM 3.68" in shown
    assert "qwen3-8b int4    single tpot_ms: 2.4, to reach 1.9: NO\n" in shown


def test_ways_of_sharing_have_goals_of_their_own(run: Callable[..., Result]) -> None:
    arguments = ("--ways", "one,tp2,tp2pp2,pp2,dp2", "--workloads", "single,mixed")
    code, found, shown = run(*arguments, script=parallel)
    assert code == 0 and [
        {name: value for name, value in each.items() if name != "with_cold"} for each in found["asked"]
    ] == [
        {},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
    ]
    assert "qwen3-8b one     single tpot_ms: 2.4, to reach 4.2: yes, vLLM 5.22" in shown
    assert "qwen3-8b tp2     single tpot_ms: 2.4 (1.00 times as good as one), to reach 2.9: yes, vLLM 3.77" in shown
    assert "tp2     mixed tok_s: 1.2e+04 (1.00 times as good as one), to reach 1.75e+04: NO, vLLM 1.52e+04" in shown
    assert (
        "pp2     mixed tok_s: 1.2e+04 (1.00 times as good as one, the bytes allow 1.55), to reach 1.4e+04: NO" in shown
    )
    assert "dp2     mixed tok_s: 1.2e+04 (1.00 times as good as one)\n" in shown
