"""`teachllm bench serve`: what it sends, shows, writes and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.bench.serve.fake_openai import MODEL, Answer, FakeServer, running
from tests.waiting import HANG_SECONDS

SMALL = (
    "--num-prompts",
    "6",
    "--random-input-len",
    "5",
    "--random-output-len",
    "4",
    "--request-timeout",
    str(HANG_SECONDS),
)


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("teachllm.bench.serve.load.gc.collect", lambda: 0)
    for name in ("OPENAI_API_KEY", "TEACHLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def served(teachllm):
    """Runs the command at a fake server; returns its result and the server."""

    def run(*arguments: str, server: FakeServer | None = None):
        server = server or FakeServer()
        with running(server) as url:
            return teachllm("bench", "serve", "--base-url", url, *arguments), server

    return run


def test_it_shows_and_writes_every_figure(served, tmp_path: Path) -> None:
    output = tmp_path / "serve.json"
    result, server = served(
        *SMALL, "--request-rate", "500", "--goodput", "ttft:10000", "tpot:10000", "--output-json", str(output)
    )
    assert result.exit_code == 0, result.stderr
    found = json.loads(output.read_text())
    assert (found["model_id"], found["num_prompts"], found["completed"], found["failed"]) == (MODEL, 6, 6, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 24)
    assert found["request_goodput"] == found["request_throughput"] == pytest.approx(6 / found["duration"])
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert found[f"p50_{metric}_ms"] <= found[f"p90_{metric}_ms"] <= found[f"p99_{metric}_ms"]
    assert found["options"]["random_input_len"] == 5 and found["request_rate"] == 500.0
    assert "ttfts" not in found
    shown = (
        MODEL,
        "6 requests, 0 failed",
        "30 in, 24 out",
        "goodput",
        "ttft",
        "tpot",
        "itl",
        "e2el",
        "p99",
        "This client",
    )
    for text in shown:
        assert text in result.stdout
    assert {len(body["prompt"].split()) for body in server.bodies} == {5}


def test_details_and_the_timeline_are_written_where_they_are_asked_for(served, tmp_path: Path) -> None:
    output, page = tmp_path / "serve.json", tmp_path / "serve.html"
    result, _ = served(*SMALL, "--output-json", str(output), "--save-detailed", "--plot-timeline", str(page))
    assert result.exit_code == 0, result.stderr
    found = json.loads(output.read_text())
    assert found["output_lens"] == [4] * 6 and [len(gaps) for gaps in found["itls"]] == [3] * 6
    assert found["request_rate"] == "inf"
    assert "<html>" in page.read_text(encoding="utf-8")[:200] and str(page) in result.stderr


def test_every_flag_of_a_request_reaches_the_server(served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEACHLLM_API_KEY", "secret")
    output = tmp_path / "serve.json"
    sampling = ("--ignore-eos", "--temperature", "0.7", "--top-k", "9", "--extra-body", '{"seed": 3, "top_k": null}')
    extra = ("--header", "X-Team=a=b", "--token-ids", "--vocab-size", "50", "--model", "mine")
    result, server = served(*SMALL, *sampling, *extra, "--output-json", str(output))
    assert result.exit_code == 0, result.stderr
    for body, headers in zip(server.bodies, server.headers, strict=True):
        assert len(body.pop("prompt")) == 5
        assert body == {
            **{"model": "mine", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}},
            **{"temperature": 0.7, "ignore_eos": True, "seed": 3},
        }
        assert (headers["authorization"], headers["x-team"]) == ("Bearer secret", "a=b")
    assert "secret" not in output.read_text() + result.stdout + result.stderr


def test_a_file_of_prompts_goes_to_the_chat(served, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hi", "output_tokens": 2}\n{"prompt": "What is a block?"}\n')
    custom = ("--dataset-name", "custom", "--dataset-path", str(path), "--custom-output-len", "5")
    result, server = served("--endpoint", "/v1/chat/completions", *custom)
    assert result.exit_code == 0, result.stderr
    asked = {body["messages"][0]["content"]: body["max_tokens"] for body in server.bodies}
    assert asked == {"Hi": 2, "What is a block?": 5}
    assert "2 requests, 0 failed" in result.stdout


def test_failures_are_shown_with_their_first_errors(served) -> None:
    def answer(body: dict) -> Answer:
        return Answer(status=500) if len(body["prompt"].split()) % 2 else Answer()

    result, server = served(*SMALL, "--random-range-ratio", "0.5", "--seed", "1", server=FakeServer(answer))
    num_odd = sum(len(body["prompt"].split()) % 2 for body in server.bodies)
    assert 0 < num_odd < 6
    assert result.exit_code == 0
    assert f"warning: {num_odd} of 6 requests failed: HTTP 500: refused with 500" in result.stderr
    assert f"{num_odd} failed" in result.stdout


def test_when_all_fail_that_is_the_error(served, tmp_path: Path) -> None:
    output = tmp_path / "serve.json"
    refusing = FakeServer(lambda body: Answer(status=401))
    result, _ = served(*SMALL, "--output-json", str(output), server=refusing)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: all 6 requests failed, the first with: HTTP 401: refused with 401\n"
    assert json.loads(output.read_text())["errors"] == {"HTTP 401: refused with 401": 6}


def test_answers_of_another_length_than_was_asked_for_are_told(served) -> None:
    result, _ = served(*SMALL, "--ignore-eos", server=FakeServer(lambda body: Answer(num_tokens=3)))
    assert "warning: 6 answers have another length than was asked for, despite --ignore-eos" in result.stderr


def test_nobody_there_is_one_line(teachllm) -> None:
    with running(FakeServer()) as url:
        pass
    result = teachllm("bench", "serve", "--base-url", url, *SMALL)
    assert (result.exit_code, result.stdout) == (1, "")
    said = f"no server answers at {url} (Connection refused): start a server there, or change --base-url"
    assert result.stderr == f"error: {said}\n"


def test_without_the_extra_the_error_names_it(teachllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    result = teachllm("bench", "serve", *SMALL)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "pip install 'teachllm[serve]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--base-url", "here:8000"], "base_url=here:8000: must begin with http:// or https://"),
        (["--dataset-name", "sharegpt"], "--dataset-name sharegpt: must be random or custom"),
        (["--dataset-name", "custom"], "--dataset-name custom reads a file: add --dataset-path FILE"),
        (
            ["--goodput", "ttft"],
            "--goodput ttft: must be METRIC:MILLISECONDS, each metric of ttft, tpot, e2el at most once",
        ),
        (["ttft:200"], "'ttft:200' belongs to no flag (--help lists them)"),
        (["--request-rate", "0"], "request_rate=0.0: must be more than 0"),
        (["--max-concurrency", "0"], "max_concurrency=0: must be at least 1"),
        (["--extra-body", "[]"], "--extra-body []: must be a JSON object, like '{\"top_k\": 20}'"),
        (["--header", "X-Team"], "--header: must be KEY=VALUE"),
        (["--save-detailed"], "--save-detailed has nowhere to write: add --output-json FILE"),
        (["--output-json", "/nowhere/x.json"], "--output-json /nowhere/x.json: there is no folder /nowhere"),
        (
            ["--token-ids", "--endpoint", "/v1/chat/completions"],
            "/v1/chat/completions takes text: send token ids to /v1/completions",
        ),
    ],
)
def test_what_cannot_be_run_is_one_line_before_anything_is_sent(teachllm, arguments: list[str], said: str) -> None:
    result = teachllm("bench", "serve", *SMALL, *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {said}\n"


def test_help_lists_the_flags_of_vllm(teachllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = teachllm("bench", "serve", "--help").stdout
    flags = "base-url host port endpoint model dataset-name dataset-path num-prompts random-input-len random-output-len"
    flags += " random-range-ratio random-prefix-len request-rate burstiness max-concurrency ignore-eos temperature seed"
    flags += " percentile-metrics metric-percentiles goodput num-warmups plot-timeline header extra-body save-detailed"
    for flag in flags.split():
        assert f"--{flag}" in shown
