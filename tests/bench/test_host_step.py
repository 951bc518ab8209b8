"""benchmarks/host_step.py: phases, calls, tables, and where it finds the engine's parts. Nothing depends on a clock."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.bench.h200_script import load_script

script = load_script("host_step")
worker, meter = sys.modules["host_step_worker"], sys.modules["host_step_meter"]


@pytest.mark.parametrize("symbol", worker.SYMBOLS)
def test_every_symbol_is_in_this_checkout(symbol: str) -> None:
    assert callable(worker.load(symbol))


def test_a_symbol_is_taken_from_the_first_place_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ("teachllm.core.nowhere:Request", "teachllm.worker.executor.deeper:Request", "teachllm.core:Request")
    monkeypatch.setitem(worker.SYMBOLS, "Request", (*absent, "teachllm.core.request:Request", "json:loads"))
    assert worker.load("Request").__module__ == "teachllm.core.request"
    monkeypatch.setitem(worker.SYMBOLS, "Request", absent)
    with pytest.raises(ImportError, match=r"Request is at none of teachllm\.core\.nowhere:Request, .* SYMBOLS"):
        worker.load("Request")


def test_a_member_goes_by_the_first_name_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(worker.MEMBERS, "Batch.update", ("refresh", "update", "copy"))
    assert worker.name_of({}, "Batch.update") == "update"
    with pytest.raises(AttributeError, match=r"Batch\.update is none of refresh, update, copy"):
        worker.get(object(), "Batch.update")


@pytest.mark.parametrize("runner", worker.RUNNERS)
def test_every_window_and_every_run_makes_the_same_calls(runner: str) -> None:
    with meter.call_meter(caller=worker._HERE) as calls:
        first, second = worker.measure(runner, 3, num_windows=2, meter=calls)
    assert first == second == worker.measure_calls(runner, 3, num_windows=1)
    assert set(first) == set(meter.PHASES) and all(count > 0 for count in first.values())


def test_calls_of_the_measuring_itself_are_not_counted() -> None:
    class Idle:
        def schedule(self) -> None:
            json.dumps("")

    with meter.call_meter(caller=__file__) as calls:
        idle = Idle()
        calls.attach(idle, "schedule", "schedule")
        costs = calls.window(idle.schedule, num_steps=4)
    assert costs["schedule"] > 0 and sum(costs.values()) == costs["schedule"]


def test_a_worker_prints_its_package_and_every_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr("gc.disable", lambda: None)
    worker.main(["--requests", "1,2", "--windows", "1"])
    found = json.loads(capsys.readouterr().out)
    assert found["package"] == str(script.ROOT / "teachllm")
    shape = {
        runner: {count: set(costs) for count, costs in counts.items()} for runner, counts in found["cells"].items()
    }
    kinds = (*worker.RUNNERS, worker.ARRIVALS)
    assert shape == {kind: {count: set(meter.PHASES) for count in ("1", "2")} for kind in kinds}


def test_two_checkouts_are_compared_after_the_noise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[Path] = []

    def run_worker(checkout: Path, *options: str) -> worker.Cells:  # type: ignore[name-defined]
        cost = 40.0
        if "--count-calls" not in options:
            turns.append(checkout)
            cost = {1: 3.0, 2: 4.0, 3: 8.0, 4: 4.0, 5: 2.0, 6: 2.0}[len(turns)]
        return {"gpu": {"64": dict.fromkeys(meter.PHASES, cost)}}

    monkeypatch.setattr(script, "run_worker", run_worker)
    output = tmp_path / "result.json"
    arguments = ["--against", str(tmp_path), "--processes", "2", "--runners", "gpu", "--requests", "64"]
    assert script.main([*arguments, "--commit", "abc", "--output", str(output)]) == 0
    assert turns == [script.ROOT, script.ROOT, tmp_path, tmp_path, script.ROOT, script.ROOT]
    shown = capsys.readouterr().out
    assert "here (abc): us of CPU time and calls per step" in shown
    tables = [line.split() for line in shown.splitlines() if line.startswith("  gpu")]
    assert tables == [
        ["gpu", "64", *["1.0000"] * 6],
        ["gpu", "64", *["0.5000"] * 5, "1.0000"],
        ["gpu", "64", *["2.0"] * 4, "8.0", "160.0"],
        ["gpu", "64", *["4.0"] * 4, "16.0", "160.0"],
    ]
    assert shown.index("here / here again") < shown.index("here / there")
    found = json.loads(output.read_text())
    assert (found["commit"], found["against_commit"], found["processes"]) == ("abc", "unknown", 2)
    assert found["us_per_step"]["there"]["gpu"]["64"] == dict.fromkeys(meter.PHASES, 4.0)
    assert set(found) == {
        *("device", "commit", "versions", "command", "against_commit"),
        *("processes", "us_per_step", "calls_per_step"),
    }
