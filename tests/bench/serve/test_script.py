"""benchmarks/serve.py: the server beside the engine without it, and the tokenizer that makes its text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from teachllm.bench.serve.load import Load
from teachllm.bench.serve.record import Record
from teachllm.engine.text.tokenizer import Tokenizer
from tests.bench.h200_script import load_script
from tests.bench.serve.fake_openai import Answer, FakeServer, running
from tests.thorough import THOROUGH

script = load_script("serve")
write_tokenizer = load_script("serve_parts/synthetic_tokenizer").write_tokenizer


@pytest.mark.skipif(not THOROUGH, reason="starts three processes: make test-thorough")
def test_a_tiny_run_writes_both_rates_with_where_they_come_from(tmp_path: Path, capsys) -> None:
    output = tmp_path / "serve.json"
    assert script.main(["--tiny", "--commit", "abc", "--output", str(output)]) == 0
    found, shown = json.loads(output.read_text()), capsys.readouterr().out
    assert list(found) == ["device", "commit", "versions", "command", "variant", "workloads"]
    assert found["commit"] == "abc" and {"torch", "aiohttp", "uvicorn"} <= set(found["versions"])
    cell = found["workloads"]["qwen3-0.6b"]["mixed"]
    assert len(cell["offline"]["runs"]) == len(cell["served"]["runs"]) == 3
    assert cell["ratio"] == cell["served"]["tok_s"] / cell["offline"]["tok_s"]
    for text in ("mixed, offline:", "mixed, served:", "ratio:", "ttft ms: p50", "itl ms: p50", "tpot ms: p50"):
        assert text in shown


def test_the_engine_alone_runs_the_same_requests(tmp_path: Path) -> None:
    settings = script.write_model(tmp_path, is_tiny=True)
    found = script.offline(settings, script._TINY_BATCH)
    assert len(found["runs"]) == 3 and found["tok_s"] == sorted(found["runs"])[1]
    assert found["device"]


def test_every_run_sends_the_requests_of_mixed_as_ids_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "_NUM_WARMUPS", 1)
    monkeypatch.setattr(script, "_SEEDS", (2, 0, 1))
    server = FakeServer()
    with running(server) as url:
        loads = script.served(url, script._TINY_BATCH)
    assert len(loads) == 2 and len(server.bodies) == 3 * 8
    for seed, load in enumerate(loads):
        batch = script.mixed_batch(seed, **script._TINY_BATCH)
        asked = [body["prompt"] for body in server.bodies[(1 + seed) * 8 : (2 + seed) * 8]]
        assert sorted(asked) == sorted(list(prompt) for prompt in batch.prompts)
        assert [record.num_output_tokens for record in load.records] == list(batch.output_lens)
        assert {record.due_s for record in load.records} == {0.0}
    assert all((body["temperature"], body["ignore_eos"], body["stream"]) == (0.6, True, True) for body in server.bodies)


@pytest.mark.parametrize(
    ("answer", "said"), [(Answer(status=429), "8 requests failed"), (Answer(num_tokens=2), "ended after 2 of")]
)
def test_a_run_that_was_cut_short_does_not_count(monkeypatch: pytest.MonkeyPatch, answer: Answer, said: str) -> None:
    monkeypatch.setattr(script, "_SEEDS", (0,))
    with running(FakeServer(lambda body: answer)) as url, pytest.raises(RuntimeError, match=said):
        script.served(url, script._TINY_BATCH)


def test_rates_are_of_each_run_and_times_of_all() -> None:
    def load(duration_s: float, ttft_s: float) -> Load:
        record = Record(0.0, 10, chunk_s=[ttft_s, duration_s], end_s=duration_s, num_output_tokens=10, has_usage=True)
        return Load("m", [record], duration_s, 0.5)

    found = script.summary([load(1.0, 0.1), load(2.0, 0.2), load(4.0, 0.3)])
    assert found["runs"] == [10.0, 5.0, 2.5] and found["tok_s"] == 5.0
    assert found["p50_ttft_ms"] == pytest.approx(200)
    assert (found["num_chunks"], found["num_output_tokens"]) == (6, 30)


def test_a_server_that_does_not_start_is_told_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"model": str(tmp_path / "nothing"), "device": "cpu"}
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "no model: $*" >&2; exit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with (
        pytest.raises(RuntimeError, match=r"the server ended with 1: .*nothing"),
        script.server(settings, [], tmp_path / "log"),
    ):
        pytest.fail("it started")


def test_an_offline_run_that_fails_is_told_with_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the offline run ended with 1: no word"):
        script.offline_process({"model": str(tmp_path)}, True)


def test_the_tokenizer_has_the_size_of_the_model_and_text_survives_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 20_000)
    tokenizer = Tokenizer.load(str(tmp_path))
    text = "Some words, naïve 中文, tent\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (20_000, 19_999)
    assert tokenizer.decode(ids, True) == text and len(ids) < len(text.encode())
    texts = [tokenizer.decode([token_id], True) for token_id in range(20_000)]
    assert len(set(texts)) > 19_000
    assert 0 < sum("\ufffd" in text for text in texts) < 2_000  # some end in the middle of a character
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert "user" in tokenizer.decode(prompt, False)


def test_the_tokenizer_is_the_same_every_time(tmp_path: Path) -> None:
    written = []
    for name in "ab":
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name, 1000)
        written.append((tmp_path / name / "tokenizer.json").read_text())
    assert written[0] == written[1]
    with pytest.raises(ValueError, match="vocab_size=258: must be at least 259"):
        write_tokenizer(tmp_path, 258)
