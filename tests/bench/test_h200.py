"""benchmarks/h200.py: what it writes, what it prints, and what it does when a workload fails."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial

import pytest

from teachllm.bench import workloads
from teachllm.roofline import Ceilings
from tests.bench.h200_script import SMALL_SHAPE, h200, load_script

CEILINGS = Ceilings("My Card", "bfloat16", 1e9, 1e9, 1e9, 1e9)

SMALL = {
    "mixed": partial(workloads.mixed, num_requests=2, shortest=2, longest=5),
    "single": partial(workloads.single, prompt_len=8, output_len=3),
}
FIGURES = {  # as every result file has them
    "mixed": {"tok_s"},
    "single": {"tpot_ms", "ttft_ms"},
    "batch64": {"step_ms", "prefill_tok_s"},
    "long": {"step_ms"},
    "prefill16k": {"ttft_ms"},
    "shared": {"s"},
    "cold": {"s", "warm_s"},
}


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run the script with a model of a few kilobytes, two small workloads and made-up ceilings."""
    settings = h200.engine_settings
    monkeypatch.setattr(h200, "SHAPES", dict.fromkeys(h200.SHAPES, SMALL_SHAPE))
    monkeypatch.setattr(h200, "engine_settings", lambda *given: settings(*given) | {"kv_cache_memory_bytes": 1 << 25})
    monkeypatch.setattr(h200, "WORKLOADS", dict(SMALL))
    monkeypatch.setattr(h200, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(h200, "cold", lambda settings, num_runs: {"s": 3.0, "warm_s": 1.5})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def start(*arguments: str):
        output = tmp_path / "result.json"
        code = h200.main([*arguments, "--quick", "--commit", "abc", "--output", str(output)])
        return code, json.loads(output.read_text()), capsys.readouterr().out

    return start


def test_the_result_has_every_field_and_the_table_every_figure(run) -> None:
    code, result, shown = run("--models", "qwen3-0.6b", "--workloads", "mixed,single,cold")
    assert code == 0, result
    assert list(result) == ["device", "commit", "versions", "command", "variant", "ceilings", "workloads"]
    assert (result["device"], result["commit"], result["variant"]) == ("My Card", "abc", "bf16")
    assert result["command"].startswith("python3 benchmarks/h200.py --models qwen3-0.6b")
    assert {"torch", "triton", "transformers", "python", "teachllm"} <= result["versions"].keys()
    assert result["ceilings"]["read_bandwidth"] == 1e9
    cells = result["workloads"]["qwen3-0.6b"]
    assert {name: set(figures) for name, figures in cells.items()} == {
        name: FIGURES[name] for name in ("mixed", "single", "cold")
    }
    shown = " ".join(shown.split())
    for text in ("mixed tok_s", "22,900-23,300 │ 34,000-35,200 │ 66%", "≥ 28,000", "≤ 0.7", "25.1", "nano-vllm"):
        assert text in shown
    for text in ("here: My Card, reads 0.00 TB/s", "the peers': NVIDIA H200, reads 4.18 TB/s, products 690 TFLOP/s"):
        assert text in shown
    assert "15.33" not in shown  # another card's speed is not compared with theirs


def test_speeds_are_compared_on_a_card_of_the_same_name(capsys) -> None:
    peers = {"ceilings": asdict(CEILINGS), "models": {"m": {"single": {"ttft_ms": {"vllm": 6.0, "limit": 1.5}}}}}
    load_script("h200_parts/h200_table").print_table(
        {"m": {"single": {"ttft_ms": 3.0}}}, {"m": {"single": {"ttft_ms": 1.0}}}, peers, asdict(CEILINGS)
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert "│ single ttft_ms │ 3 │ 1 │ 33% │ 6 │ 1.5 │ 25% │ │ │ │ 2.00 │" in shown


def test_a_workload_that_fails_is_an_error_in_its_place_and_the_others_run(run, monkeypatch) -> None:
    def fail(clock, vocab_size, seed):
        raise RuntimeError("no more\nmemory")

    monkeypatch.setitem(h200.WORKLOADS, "single", fail)
    monkeypatch.setattr(h200, "model_limits", lambda *_: {})
    code, result, shown = run("--models", "qwen3-8b", "--workloads", "single,mixed")
    assert code == 1
    cells = result["workloads"]["qwen3-8b"]
    assert cells["single"] == {"error": "RuntimeError: no more memory"}
    assert cells["mixed"]["tok_s"] > 0
    assert "qwen3-8b single: RuntimeError: no more memory" in shown


def test_an_engine_that_does_not_start_is_an_error_in_every_place(run, monkeypatch) -> None:
    def refuse(**settings):
        raise ValueError("it does not fit")

    monkeypatch.setattr(h200, "LLM", refuse)
    code, result, _ = run("--models", "qwen3-0.6b", "--workloads", "mixed,single")
    assert code == 1
    assert set(result["workloads"]["qwen3-0.6b"]) == {"mixed", "single"}
    assert result["workloads"]["qwen3-0.6b"]["mixed"] == {"error": "no engine: ValueError: it does not fit"}


def test_an_unknown_workload_is_named(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        h200.main(["--workloads", "mixed,singel"])
    assert stopped.value.code == 2
    assert "no 'singel' here: choose from mixed,single,batch64,long,prefill16k,shared,cold" in capsys.readouterr().err


def test_the_engine_gets_the_settings_that_the_peers_had(tmp_path) -> None:
    settings = h200.engine_settings(h200.write_shape("qwen3-8b", tmp_path), "cuda")
    assert (settings["max_model_len"], settings["gpu_memory_utilization"]) == (20480, 0.85)
    assert h200.EngineConfig(**settings).resolve(40960).async_scheduling


def test_peers_have_every_figure_a_target_that_beats_or_meets_no_more_than_the_limit() -> None:
    assert h200.PEERS["models"].keys() == h200.SHAPES.keys()
    for cells in h200.PEERS["models"].values():
        for workload, figures in cells.items():
            assert figures.keys() == FIGURES[workload]
            for figure, peer in figures.items():
                if peer["limit"] is not None and peer["to_reach"] is not None:
                    limit = max(peer["limit"]) if isinstance(peer["limit"], list) else peer["limit"]
                    assert (peer["to_reach"] < limit) == workloads.is_rate(figure), (workload, figure)
