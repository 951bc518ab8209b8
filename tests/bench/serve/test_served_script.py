"""benchmarks/served.py: the same three loads on a server with empty caches, and on one that finds the first one's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from teachllm.bench.serve.load import Load
from teachllm.bench.serve.record import Record
from tests.bench.h200_script import load_script
from tests.bench.serve.fake_openai import Answer, FakeServer, running
from tests.thorough import THOROUGH

serve, script = load_script("serve"), load_script("served")


@pytest.mark.skipif(not THOROUGH, reason="starts two servers: make test-thorough")
def test_a_tiny_run_starts_two_servers(tmp_path: Path) -> None:
    output = tmp_path / "served.json"
    assert script.main(["--tiny", "--commit", "abc", "--output", str(output)]) == 0
    starts = json.loads(output.read_text())["served"]["qwen3-0.6b"]
    assert [len(start["runs"]) for start in starts.values()] == [3, 3]


def test_requests_follow_the_seed() -> None:
    load = script.ServedLoad(num_requests=60, longest_prompt=200)
    prompts, arrivals_s = load.draw(0, 500)
    assert (prompts, arrivals_s) == load.draw(0, 500) and prompts != load.draw(1, 500)[0]
    assert arrivals_s != load.draw(1, 500)[1] and arrivals_s == sorted(arrivals_s)
    assert all(100 <= len(prompt.content) <= 200 and 50 <= prompt.output_len <= 250 for prompt in prompts)


def test_two_servers_get_the_same_loads_and_the_second_finds_the_caches_of_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers: list[FakeServer] = []
    caches: list[tuple[Path, bool]] = []

    @contextlib.contextmanager
    def server(settings: dict[str, Any], flags: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator:
        caches.append((folder := Path(environment["TRITON_CACHE_DIR"]), folder.exists()))
        folder.mkdir(parents=True, exist_ok=True)
        servers.append(FakeServer())
        with running(servers[-1]) as url:
            yield serve.RunningServer(url, 10.0 + len(servers))

    monkeypatch.setattr(script, "server", server)
    output = tmp_path / "served.json"
    given = ["--tiny", "--rate", "1000", "--commit", "abc", "--output", str(output)]
    assert script.main(given) == 0
    assert caches == [(caches[0][0], False), (caches[0][0], True)]
    first, second = ([body["prompt"] for body in each.bodies] for each in servers)
    assert len(first) == 3 * script.TINY.num_requests and sorted(first) == sorted(second)
    bodies = servers[0].bodies
    assert all((body["temperature"], body["ignore_eos"], body["stream"]) == (0.6, True, True) for body in bodies)
    result = json.loads(output.read_text())
    starts = result["served"]["qwen3-0.6b"]
    assert result["commit"] == "abc" and result["load"]["rate"] == 1000 and "aiohttp" in result["versions"]
    assert {name: start["ready_s"] for name, start in starts.items()} == {"empty caches": 11.0, "cached kernels": 12.0}
    printed = capsys.readouterr().out
    for start in ("empty caches, ready after 11.0 s, run 3: ", "cached kernels, ready after 12.0 s, run 1: "):
        assert start in printed


def test_a_run_in_which_a_request_ended_early_does_not_count() -> None:
    drawn = [script.TINY.draw(0, 500)]
    with (
        running(FakeServer(lambda body: Answer(num_tokens=2))) as url,
        pytest.raises(RuntimeError, match="ended after 2 of"),
    ):
        script.served_runs(url, drawn, 0.6)


def test_the_figures_of_a_run_are_its_rate_and_percentiles() -> None:
    chunks = [0.1, 0.2, 0.4, 2.0]
    record = Record(0.0, 4, chunk_s=chunks, end_s=2.0, num_prompt_tokens=5, num_output_tokens=4, has_usage=True)
    found = script.figures_of(Load("m", [record], 2.0, 0.5))
    assert found["tok_s"] == 2.0
    assert found["p50_ttft_ms"] == found["p99_ttft_ms"] == pytest.approx(100)
    assert (found["p50_itl_ms"], found["max_itl_ms"]) == (pytest.approx(200), pytest.approx(1600))
