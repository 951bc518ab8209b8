"""`--speculative-config JSON`, and what commands say of speculation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from teachllm.engine.observability.speculation_stats import Speculation
from teachllm.engine.observability.stats import StepStats
from teachllm.spec_decode.draft_length import StepCost
from teachllm_cli.app import app
from teachllm_cli.speculation_line import speculation_line
from tests.cli.conftest import built

EAGLE = '{"method": "eagle", "model": "teachlm-eagle", "num_speculative_tokens": 3}'
ON_CPU = ("--device", "cpu", "--max-model-len", "256")


def speculation(num_drafts: int = 10, cost: StepCost | None = None) -> Speculation:
    """43 tokens in 15 steps, of which 10 verified 4 drafts each; 28 held."""
    counts = {"num_generation_tokens": 43, "num_samplings": 15, "num_drafts": num_drafts}
    counts |= {"num_draft_tokens": 4 * num_drafts, "num_accepted_tokens": 28 if num_drafts else 0}
    return Speculation(StepStats(0, 0, 0.0, 0, 0, 0, 0, 0, **counts), cost)


@pytest.mark.parametrize("command", ["chat", "generate", "serve", "run-batch", "viz", "info", "bench latency"])
def test_every_command_that_makes_an_engine_has_the_flag(command: str) -> None:
    found: Any = built(app)
    for name in command.split():
        found = found.commands[name]
    [flag] = [each for each in found.params if "--speculative-config" in each.opts]
    assert flag.metavar == "JSON"


def test_the_flag_reaches_the_configuration(teachllm, llm) -> None:
    assert teachllm("generate", "-p", "one", "--speculative-config", EAGLE).exit_code == 0
    found = llm.config.speculative_config
    assert (found.method, found.model, found.num_speculative_tokens) == ("eagle", "teachlm-eagle", 3)
    teachllm("generate", "-p", "one")
    assert llm.config.speculative_config is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{method: ngram}", "--speculative-config '{method: ngram}' is not JSON (Expecting property name"),
        ("ngram", "--speculative-config 'ngram' is not JSON"),
        ('["ngram"]', 'is JSON, but no object: write it like --speculative-config \'{"method": "ngram"}\''),
        ("[" * 100_000, "is not JSON"),
        ('{"method": "n-gram"}', "choose one of ngram, draft_model, eagle, medusa, custom"),
        ('{"method": "ngram", "num_tokens": 3}', "speculative_config has no 'num_tokens', only method,"),
        ('{"method": "ngram", "num_speculative_tokens": "3"}', "must be of type int"),
        ('{"num_speculative_tokens": 3}', "speculative_config lacks a method"),
    ],
)
def test_what_is_wrong_in_it_is_said_in_one_line(teachllm, llm, given: str, said: str) -> None:
    result = teachllm("generate", "-p", "one", "--speculative-config", given)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert said in result.stderr
    if "not JSON" in said:
        assert 'write it like --speculative-config \'{"method": "ngram"}\', in single quotes' in result.stderr


@pytest.mark.parametrize(
    ("method", "drafter"),
    [
        *(("medusa", "teachlm-medusa"), ("eagle", "teachlm-eagle"), ("eagle3", "teachlm-eagle")),
        *(("draft_model", "teachlm-draft"), ("ngram", None)),
    ],
)
def test_the_embedded_model_has_a_drafter_of_each_kind(teachllm, llm, method: str, drafter: str | None) -> None:
    given = ("generate", "-p", "one", "--speculative-config", json.dumps({"method": method}))
    assert teachllm(*given).exit_code == 0
    assert llm.config.speculative_config.model == drafter
    if drafter is not None:
        assert 'needs a model: add "model": "..."' in teachllm(*given, "--model", "some/model").stderr


def test_the_line_says_what_held_what_that_saved_and_what_was_measured() -> None:
    held = "speculation: 28 of 40 drafted tokens accepted (70%), mean length 3.80; "
    held += "2.87 tokens per step instead of 1: 2.9 x fewer steps; "
    assert speculation_line(speculation()) == f"{held}what that does to the time was not measured"
    # 5 plain steps and 10 as long as 1.3: 18 in place of 43
    timed = "once under way a step with drafts takes 1.30 plain ones (7 timed against 1): about 2.4 x as fast"
    assert speculation_line(speculation(cost=StepCost(1.3, num_plain=1, num_drafting=7))) == held + timed
    assert speculation_line(speculation(num_drafts=0)) == "speculation: nothing was drafted"


@pytest.mark.parametrize("num_drafts", [0, 10])
def test_the_line_says_when_drafts_were_accepted_at_random(num_drafts: int) -> None:
    line = speculation_line(replace(speculation(num_drafts), is_synthetic=True))
    assert line == f"synthetic {speculation_line(speculation(num_drafts))}".replace(":", " (output means nothing):", 1)


def test_a_warning_comes_before_a_text_that_means_nothing(teachllm) -> None:
    synthetic = '{"method": "ngram", "rejection_sample_method": "synthetic", "adaptive": false}'
    result = teachllm("chat", *ON_CPU, "--stats", "--speculative-config", synthetic, stdin="What is a KV cache?")
    assert result.exit_code == 0, result.stderr
    lines = result.stderr.splitlines()
    said = "output means nothing: drafts are accepted at random, rejection_sample_method=synthetic"
    assert lines[0] == f"warning: {said}"
    assert lines[-1].startswith("synthetic speculation (output means nothing): ")


def test_chat_shows_the_line_under_its_figures_and_only_of_its_own_answer(teachllm, llm) -> None:
    llm.speculated = [speculation(num_drafts=0), speculation()]  # from before, and of the answer
    result = teachllm("chat", "--stats", stdin="one two")
    figures, line = result.stderr.splitlines()
    assert figures.startswith("2 prompt tokens") and line == speculation_line(speculation())
    assert "speculation" not in teachllm("chat", "--stats", stdin="one two").stderr
    llm.speculated = [None, speculation()]
    assert "speculation" not in teachllm("chat", stdin="one two").stderr


def test_generate_shows_the_line_behind_the_texts_but_not_in_json(teachllm, llm) -> None:
    llm.speculated = [speculation()]
    assert teachllm("generate", "-p", "one").stdout.endswith(f"[{speculation_line(speculation())}]\n")
    llm.speculated = [speculation()]
    assert "speculation" not in teachllm("generate", "-p", "one", "--json").stdout


def test_the_text_is_the_same_with_it(teachllm) -> None:
    question = "What is a KV cache?"
    few = ("--max-tokens", "16")
    plain = teachllm("chat", *ON_CPU, *few, stdin=question)
    result = teachllm("chat", *ON_CPU, *few, "--stats", "--speculative-config", EAGLE, stdin=question)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == plain.stdout != ""
    assert "drafted tokens accepted" in result.stderr and "x fewer steps" in result.stderr


def test_bench_writes_and_shows_it(teachllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from teachllm.bench import ceilings

    tiny = ceilings.Sizes(num_bytes=1 << 20, gemm_size=64, attention_len=64, num_heads=2, head_size=16, repeats=3)
    monkeypatch.setattr(ceilings, "_ON_CPU", tiny)
    monkeypatch.setattr("teachllm.bench.batch._settle", lambda llm: None)
    output = tmp_path / "found.json"
    always = EAGLE.replace("}", ', "adaptive": false}')
    sizes = ("--input-len", "5", "--output-len", "6", "--num-prompts", "1", "--num-warmups", "1")
    flags = (*ON_CPU, "--speculative-config", always, "--output-json", str(output))
    result = teachllm("bench", "throughput", *sizes, *flags)
    assert result.exit_code == 0, result.stderr
    found = json.loads(output.read_text())["speculation"]
    assert found["num_draft_tokens"] >= found["num_drafts"] > 0 and found["speed_up"] is None
    assert found["is_synthetic"] is False
    assert found["acceptance"] == found["num_accepted_tokens"] / found["num_draft_tokens"]
    shown = " ".join(result.stdout.split())
    assert "With warm-up, speculation:" in shown and "plain decoding, a token per step" in shown
