"""`--trace FILE`, and `teachllm trace` on what it wrote."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from tests.trace import staged
from tests.trace.traced import busy, traced_engine
from tests.worker.engines import drain


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine, lines = traced_engine(num_gpu_blocks_override=18, max_num_batched_tokens=48)
    busy(engine, num_requests=12)
    drain(engine)
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("with_text", [True, False])
def test_a_command_that_runs_the_engine_writes_its_trace_for_its_owner_alone(
    teachllm, tmp_path: Path, with_text: bool
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("of another run")
    path.chmod(0o644)
    flags = ["--trace", str(path), *([] if with_text else ["--trace-no-text"])]
    result = teachllm("generate", "-p", "What is a block?", "--max-tokens", "5", "--device", "cpu", *flags)
    assert result.exit_code == 0, result.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["event"] for event in events[:2]] == ["header", "arrival"]
    assert ("block" in "".join(events[1].get("prompt_text", []))) == with_text
    assert ("prompt_token_ids" in events[1]) == with_text
    sampled = sum(share.get("num_sampled", 0) for event in events[2:] for share in event["scheduled"])
    assert 1 <= sampled <= 5


def test_a_trace_that_cannot_be_written_is_refused_in_one_line(teachllm) -> None:
    result = teachllm("generate", "-p", "x", "--device", "cpu", "--trace", "/no/such/folder/run.jsonl")
    assert result.exit_code == 1
    assert (
        result.stderr == "error: trace_path='/no/such/folder/run.jsonl' cannot be written: No such file or directory\n"
    )


def test_a_command_that_runs_nothing_has_no_such_flag(teachllm) -> None:
    assert "--trace" not in teachllm("info", "--help").stdout
    assert "--trace" in teachllm("chat", "--help").stdout


def test_show_sums_it_up_for_people(teachllm, trace: Path) -> None:
    shown = " ".join(teachllm("trace", "show", str(trace)).stdout.split())
    for part in ("18 blocks of 16 tokens", "13 length", "from the prefix cache", "TTFT", "preempted", "no free blocks"):
        assert part in shown, part


def test_show_prints_figures_for_programs(teachllm, trace: Path) -> None:
    found = json.loads(teachllm("trace", "show", str(trace), "--json").stdout)
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    shares = [share for line in lines for share in line.get("scheduled", [])]
    assert found["num_requests"] == found["num_finished"] == 13
    assert found["num_output_tokens"] == sum(share.get("num_sampled", 0) for share in shares)


def test_a_broken_trace_is_shown_as_far_as_it_goes_with_a_warning(teachllm, trace: Path, tmp_path: Path) -> None:
    lines = trace.read_text().splitlines()
    cut = tmp_path / "cut.jsonl"
    cut.write_text("\n".join([*lines[:25], lines[25][:30]]))
    result = teachllm("trace", "show", str(cut))
    assert result.exit_code == 0 and "line 26: cut off in the middle" in result.stderr
    assert "unfinished" in result.stdout


def test_what_is_no_trace_is_refused_in_one_line(teachllm, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    for command in (["show", str(path)], ["export", str(path), "--perfetto", str(tmp_path / "x.json")]):
        result = teachllm("trace", *command)
        assert result.exit_code == 1 and result.stderr.count("\n") == 1
        assert f"{path} is no trace: line 1" in result.stderr


def test_export_wants_to_know_what_to_write(teachllm, trace: Path) -> None:
    result = teachllm("trace", "export", str(trace))
    assert result.exit_code == 1 and "--perfetto FILE, --html FILE" in result.stderr


def test_export_writes_a_timeline(teachllm, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    result = teachllm("trace", "export", str(trace), "--perfetto", str(path))
    assert result.exit_code == 0 and str(path) in result.stderr
    assert json.loads(path.read_text())["traceEvents"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_export_does_not_write_over_the_trace(teachllm, trace: Path) -> None:
    before = trace.read_text()
    result = teachllm("trace", "export", str(trace), "--perfetto", str(trace))
    assert result.exit_code == 1 and "is the trace itself" in result.stderr and trace.read_text() == before


def test_export_writes_a_page(teachllm, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    result = teachllm("trace", "export", str(trace), "--html", str(path))
    assert result.exit_code == 0 and str(path) in result.stderr
    page = path.read_text(encoding="utf-8")
    assert "<title>run.jsonl</title>" in page and "Qwen3ForCausalLM" in page


def test_a_page_has_the_title_that_it_is_given(teachllm, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    assert teachllm("trace", "export", str(trace), "--html", str(path), "--title", "Two <runs>").exit_code == 0
    assert "<title>Two &lt;runs&gt;</title>" in path.read_text(encoding="utf-8")
    result = teachllm("trace", "export", str(trace), "--perfetto", str(tmp_path / "run.json"), "--title", "x")
    assert result.exit_code == 1 and "--title is the page's: give --html FILE" in result.stderr


def test_show_tells_of_ranks_if_there_are_several(teachllm, tmp_path: Path) -> None:
    path = tmp_path / "ranks.jsonl"
    path.write_text("".join(staged.lines()))
    found = json.loads(teachllm("trace", "show", str(path), "--json").stdout)
    assert [each["bubble"] for each in found["ranks"]] == [0.5, 0.45]
    assert "stage 1: computes 52%" in teachllm("trace", "show", str(path)).stdout
