"""`teachllm bench`: figures beside the machine's ceilings, on the embedded model."""

from __future__ import annotations

import json
from functools import partial

import pytest

from teachllm.bench import ceilings, step_profile

ENGINE = ("--device", "cpu", "--load-format", "dummy", "--max-model-len", "256", "--max-num-seqs", "8")
SHORT = ("--input-len", "5", "--output-len", "4")
LATENCY = (*SHORT, "--batch-size", "2", "--num-iters-warmup", "1", "--num-iters", "3")
THROUGHPUT = (*SHORT, "--num-prompts", "6", "--random-range-ratio", "0.4", "--num-warmups", "1")


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr("teachllm.bench.batch._settle", lambda llm: None)
    tiny = ceilings.Sizes(num_bytes=1 << 20, gemm_size=64, attention_len=64, num_heads=2, head_size=16, repeats=3)
    monkeypatch.setattr(ceilings, "_ON_CPU", tiny)


def test_latency_writes_and_shows_every_figure_with_its_limit(teachllm, tmp_path) -> None:
    output = tmp_path / "latency.json"
    result = teachllm("bench", "latency", *LATENCY, *ENGINE, "--output-json", str(output))
    assert result.exit_code == 0, result.stderr
    found = json.loads(output.read_text())
    assert len(found["latencies"]) == 3
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 3)
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert found["percentiles"]["50"] == sorted(found["latencies"])[1]
    assert found["figures"]["latency"]["value"] == pytest.approx(1000 * found["percentiles"]["50"])
    assert list(found["figures"]) == ["latency", "ttft", "tpot"]
    for figure in found["figures"].values():
        assert figure["of_ceiling"] == pytest.approx(figure["limit"] / figure["value"])
    assert found["ceilings"]["dtype"] == "float32"
    assert found["options"] == {
        **{"input_len": 5, "output_len": 4, "batch_size": 2},
        **{"num_iters_warmup": 1, "num_iters": 3},
    }
    assert (found["engine"]["model"], found["engine"]["load_format"]) == ("teachlm", "dummy")
    for text in ("teachlm: 2 x (5 tokens in, 4 out)", "latency", "ttft", "tpot", "%", "as reached at best"):
        assert text in result.stdout


def test_a_profile_shows_where_a_step_goes_and_writes_a_trace(teachllm, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(step_profile, "profile_decode", partial(step_profile.profile_decode, num_steps=4))
    trace, output = tmp_path / "trace.json", tmp_path / "latency.json"
    files = ("--profile-trace", str(trace), "--output-json", str(output))
    result = teachllm("bench", "latency", *LATENCY, *ENGINE, *files)
    assert result.exit_code == 0, result.stderr
    assert json.loads(trace.read_text())["traceEvents"]
    for text in ("A decode step, mean of 4", "matrix products", "gaps between kernels", "the host is at work"):
        assert text in result.stdout
    found = json.loads(output.read_text())
    assert len(found["latencies"]) == 3
    assert 0 < found["profile"]["host_ms"] <= found["profile"]["unprofiled_ms"]
    assert found["profile"]["floors"]["matrix products"]["bound"] in ("bandwidth", "compute")


def test_a_profile_that_cannot_be_made_is_refused_before_anything_runs(teachllm, tmp_path) -> None:
    nowhere = str(tmp_path / "none" / "trace.json")
    result = teachllm("bench", "latency", *LATENCY, *ENGINE, "--profile-trace", nowhere)
    assert result.exit_code == 1 and f"--profile-trace {nowhere}: there is no folder" in result.stderr
    result = teachllm("bench", "latency", *LATENCY, *ENGINE, "--profile", "--max-model-len", "40")
    assert result.exit_code == 1 and "more than max_model_len=40" in result.stderr
    assert "ttft" not in result.stdout


def test_one_output_token_has_no_time_per_output_token(teachllm, tmp_path) -> None:
    output = tmp_path / "latency.json"
    teachllm("bench", "latency", *LATENCY, *ENGINE, "--output-len", "1", "--output-json", str(output))
    assert list(json.loads(output.read_text())["figures"]) == ["latency", "ttft"]


def test_throughput_counts_the_tokens_of_requests_of_many_lengths(teachllm, tmp_path) -> None:
    output = tmp_path / "throughput.json"
    result = teachllm("bench", "throughput", *THROUGHPUT, *ENGINE, "--output-json", str(output))
    assert result.exit_code == 0, result.stderr
    found = json.loads(output.read_text())
    assert found["num_requests"] == 6
    assert 6 * (3 + 2) <= found["total_num_tokens"] <= 6 * (7 + 6)
    assert found["requests_per_second"] == pytest.approx(6 / found["elapsed_time"])
    assert found["tokens_per_second"] == pytest.approx(found["total_num_tokens"] / found["elapsed_time"])
    assert list(found["figures"]) == ["output", "total", "requests"]
    for figure in found["figures"].values():
        assert figure["of_ceiling"] == pytest.approx(figure["value"] / figure["limit"])
    for text in ("teachlm: 6 requests", "tokens in", "requests/s", "%"):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("latency --batch-size 0", "batch_size=0: must be at least 1"),
        ("latency --num-iters-warmup -1", "num_iters_warmup=-1: must be 0 or more"),
        ("latency --output-json /nowhere/x.json", "--output-json /nowhere/x.json: there is no folder /nowhere"),
        ("latency --block-size 0", "block_size=0: must be at least 1"),
        ("throughput --num-prompts 0", "num_prompts=0: must be at least 1"),
        ("throughput --random-range-ratio 1", "random_range_ratio=1.0: must be in [0, 1)"),
        ("throughput --num-warmups -1", "num_warmups=-1: must be 0 or more"),
    ],
)
def test_a_bad_number_is_one_line_before_anything_is_loaded(teachllm, monkeypatch, arguments: str, said: str) -> None:
    monkeypatch.setattr("teachllm_cli.engine.make_llm", lambda config: pytest.fail("a model was loaded"))
    result = teachllm("bench", *arguments.split())
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {said}\n"


@pytest.mark.parametrize("command", [("latency", *LATENCY), ("throughput", *THROUGHPUT)])
def test_requests_that_outgrow_the_context_are_one_line_with_the_numbers(teachllm, command) -> None:
    result = teachllm("bench", *command, *ENGINE, "--input-len", "300")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "tokens, more than max_model_len=256: shorten them, or raise max_model_len" in result.stderr


def test_both_commands_have_the_flags_of_vllm_and_every_knob_of_the_engine(teachllm, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    common = ("--input-len", "--output-len", "--output-json", "--model", "--dtype", "--load-format", "--enforce-eager")
    own = {
        "latency": ("--batch-size", "--num-iters-warmup", "--num-iters"),
        "throughput": ("--num-prompts", "--random-range-ratio", "--num-warmups"),
    }
    for command, flags in own.items():
        shown = teachllm("bench", command, "--help").stdout
        assert all(flag in shown for flag in (*common, *flags))
