"""The ladder: every rung gives the same tokens, and what changes one is found out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from teachllm.bench.ladder import RUNGS, Result, Run, Size, as_json, climb, compare, gain
from teachllm.bench.lossless import Judge
from teachllm.config import EngineConfig
from teachllm.roofline import Ceilings
from tests.checkpoints import make_checkpoint

TINY = Size(6, (3, 9), (20, 30), (4, 12), 18, 64, 2 * 64, 4, 16)
CEILINGS = Ceilings("a CPU", "float32", 1e10, 1e10, 1e10, 1e10)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llama2", tmp_path_factory.mktemp("ladder"))


@pytest.fixture(scope="module")
def results(model: str) -> list[Result]:
    engine = EngineConfig(model=model, device="cpu", dtype="float32", skip_tokenizer_init=True, check_invariants=True)
    return list(climb(engine, TINY, CEILINGS, 0, num_passes=1))


def run_of(results: list[Result], name: str) -> Run:
    [run] = [each.run for each in results if each.rung.name == name]
    assert run is not None
    return run


def test_a_cpu_climbs_what_it_can_and_no_token_changes(results: list[Result]) -> None:
    assert [each.rung for each in results] == list(RUNGS)
    lacking = {each.rung.name for each in results if each.why_not}
    assert lacking == {"graphs, running ahead", "8-bit weights", "two GPUs"}
    tokens = run_of(results, "recompute").tokens
    assert len({token for each in tokens for token in each}) > 16  # or nobody could tell them apart
    verdicts = compare(EngineConfig(device="cpu"), results)
    assert [v.text for v in verdicts if v.text] == ["every token is the first rung's"] * 7
    assert all(verdict.is_good for verdict in verdicts)


def test_each_rung_changes_what_it_is_named_for(results: list[Result]) -> None:
    figures = {each.rung.name: each.run.figures for each in results if each.run is not None}
    assert figures["recompute"].waste is None
    assert figures["KV cache"].num_steps == figures["recompute"].num_steps > figures["static batching"].num_steps
    assert figures["static batching"].num_steps > figures["continuous batching"].num_steps
    paged, contiguous = (figures[name].waste for name in ("paged blocks", "continuous batching"))
    assert paged is not None and contiguous is not None and 0 < paged < contiguous / 2
    assert figures["paged blocks"].num_steps < figures["continuous batching"].num_steps  # more at once
    assert figures["chunked prefill"].num_steps > figures["paged blocks"].num_steps
    assert figures["prefix caching"].prefix_hit_rate > 0.3 > figures["chunked prefill"].prefix_hit_rate == 0
    assert all(each.num_finished == TINY.num_requests for each in figures.values())


def test_a_token_that_changes_is_named(results: list[Result]) -> None:
    paged = run_of(results, "paged blocks")
    other = [list(each) for each in paged.tokens]
    other[2][3] += 1
    tampered = [replace(each, run=replace(paged, tokens=other)) if each.run is paged else each for each in results]
    bad = [verdict for verdict in compare(EngineConfig(device="cpu"), tampered) if not verdict.is_good]
    assert [verdict.text for verdict in bad] == ["request 2 has another token 3"]


def test_in_bfloat16_a_token_may_be_another_only_within_rounding(results: list[Result], model: str) -> None:
    run = run_of(results, "paged blocks")
    judge = Judge(model, "bfloat16", "cpu")
    assert judge.differences(run.prompts, run.tokens) == []  # in float32 each is the best
    other = [list(each) for each in run.tokens]
    other[1][2] = (other[1][2] + 1) % 512
    [found] = judge.differences(run.prompts, other)
    assert (found.request, found.position, found.is_rounding) == (1, 2, False) and found.gap > 0 < found.rounding
    narrow = replace(run, tokens=other, dtype="bfloat16")
    verdict = compare(EngineConfig(device="cpu"), [Result(RUNGS[0], run), Result(RUNGS[1], narrow)])[1]
    assert not verdict.is_good and verdict.text.startswith("request 1: token 2 is ")


def test_figures_and_the_ratio_are_written(results: list[Result]) -> None:
    found = as_json(TINY, CEILINGS, results, compare(EngineConfig(device="cpu"), results))
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(found, allow_nan=False))
    rates = [each["figures"]["output_tokens_per_s"] for each in found["rungs"] if each["figures"]]
    assert found["ratio"] == gain(results) == max(rates) / rates[0]
    assert all(each["figures"]["of_ceiling"] > 0 for each in found["rungs"] if each["figures"])
