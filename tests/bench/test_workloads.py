"""What each workload sends, what it makes of the time, and when a time does not count."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from teachllm import LLM
from teachllm.bench import cold, first_run, workloads
from teachllm.bench.batch import Batch, run_batch
from teachllm.bench.workloads import WORKLOADS, is_rate, measure, mixed_batch

VOCAB = 151_936
DUMMY = {"model": "teachlm", "load_format": "dummy", "device": "cpu", "skip_tokenizer_init": True}


@dataclass
class FakeClock:
    """Two seconds a batch and one for every token of its longest output."""

    batches: list[Batch] = field(default_factory=list)

    def __call__(self, batch: Batch) -> float:
        self.batches.append(batch)
        return 2.0 + max(batch.output_lens)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(**DUMMY, max_model_len=512, num_gpu_blocks_override=64)
    yield llm
    llm.close()


@cache
def run_of(name: str, seed: int = 0) -> tuple[list[Batch], dict[str, float]]:
    """Return the batches of a workload at its full size, and its figures."""
    clock = FakeClock()
    figures = WORKLOADS[name](clock, VOCAB, seed)
    return clock.batches, figures


def sent(name: str) -> tuple[list[tuple[int, int, int]], dict[str, float]]:
    """([(requests, prompt tokens, output tokens) of each batch], figures) of a workload at its full size."""
    batches, figures = run_of(name)
    return [(len(b.prompts), sum(b.prompt_lens), sum(b.output_lens)) for b in batches], figures


def test_mixed_with_seed_0_has_the_tokens_that_its_definition_names() -> None:
    batch = mixed_batch(0, VOCAB)
    assert len(batch.prompts) == 256
    assert sum(batch.prompt_lens) == 142_827
    assert sum(batch.output_lens) == 133_966
    assert batch.temperature == 0.6
    assert max(map(max, batch.prompts)) == 10_000
    assert max(map(max, mixed_batch(0, 4096).prompts)) == 4095


def test_each_workload_sends_what_its_definition_says() -> None:
    assert sent("mixed") == ([(256, 142_827, 133_966)], {"tok_s": 133_966 / 1026})
    assert sent("single") == ([(1, 128, 1), (1, 128, 257)], {"tpot_ms": 1000, "ttft_ms": 3000})
    batches, figures = sent("batch64")
    assert batches == [(64, 64 * 1024, 64), (64, 64 * 1024, 64 * 129)]
    assert figures == {"step_ms": 1000, "prefill_tok_s": 64 * 1024 / 3}
    assert sent("long") == ([(8, 8 * 16384, 8), (8, 8 * 16384, 8 * 129)], {"step_ms": 1000})
    assert sent("prefill16k") == ([(1, 16384, 1)], {"ttft_ms": 3000})
    assert sent("shared") == ([(1, 4097, 1), (64, 64 * (4096 + 128), 64 * 64)], {"s": 66})


def test_rates_are_told_from_times() -> None:
    assert is_rate("tok_s")
    assert is_rate("prefill_tok_s")
    assert not any(map(is_rate, ("s", "warm_s", "tpot_ms", "ttft_ms", "step_ms")))


def test_requests_of_shared_have_the_cached_part_in_common_and_nothing_after_it() -> None:
    (first, together), _ = run_of("shared")
    assert (first.num_shared, together.num_shared) == (0, 4096)
    assert {tuple(prompt[:4096]) for prompt in together.prompts} == {tuple(first.prompts[0][:4096])}
    assert len({tuple(prompt[4096:4112]) for prompt in together.prompts}) == 64


def test_no_prompt_is_sent_twice_in_any_run_of_any_workload_but_the_shared_part() -> None:
    batches = [batch for name in WORKLOADS for seed in range(2) for batch in run_of(name, seed)[0]]
    starts = [tuple(prompt[:16]) for batch in batches for prompt in batch.prompts if not batch.num_shared]
    assert len(set(starts)) == len(starts) > 600


def test_a_figure_is_the_median_of_its_runs_and_warm_ups_do_not_count() -> None:
    llm = SimpleNamespace(engine=SimpleNamespace(model_config=SimpleNamespace(vocab_size=8)))
    seeds = []

    def workload(clock, vocab_size, seed):
        seeds.append(seed)
        return {"s": float([3, 1, 2, 100, 200][seed])}

    assert measure(workload, llm, num_runs=3) == {"s": 2.0}
    assert seeds == [3, 4, 0, 1, 2]


def test_every_workload_runs_on_an_engine(llm) -> None:
    small = {
        "mixed": partial(workloads.mixed, num_requests=3, shortest=2, longest=6),
        "single": partial(workloads.single, prompt_len=8, output_len=3),
        "batch64": partial(workloads.batch64, num_requests=2, prompt_len=20, output_len=3),
        "long": partial(workloads.long, num_requests=2, prompt_len=40, output_len=3),
        "prefill16k": partial(workloads.prefill16k, prompt_len=100),
        "shared": partial(workloads.shared, num_requests=3, shared_len=40, own_len=20, output_len=3),
    }
    assert small.keys() == WORKLOADS.keys()
    for workload in small.values():
        figures = measure(workload, llm, num_runs=1, num_warmups=0)
        assert all(value > 0 for figure, value in figures.items() if figure not in ("step_ms", "tpot_ms"))


def test_first_tokens_come_before_the_last(llm) -> None:
    timing = run_batch(llm, Batch([[1, 2, 3], [4, 5]], [4, 30]))
    assert 0 < timing.first_s < timing.total_s


def test_a_prompt_found_in_the_prefix_cache_does_not_count(llm) -> None:
    batch = Batch([list(range(100, 150))], [2])
    run_batch(llm, batch)
    with pytest.raises(RuntimeError, match="48 prompt tokens came from the prefix cache instead of 0"):
        run_batch(llm, batch)


def test_a_request_that_would_be_cut_off_is_refused(llm) -> None:
    with pytest.raises(ValueError, match="make 513 tokens, more than max_model_len=512: shorten them"):
        run_batch(llm, Batch([[1] * 500], [13]))
    assert not llm.engine.has_unfinished_requests


def test_a_batch_that_fails_leaves_nothing_running(llm, monkeypatch) -> None:
    monkeypatch.setattr(llm.engine.core.executor, "execute", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_batch(llm, Batch([[1, 2], [3]], [2, 2]))
    monkeypatch.undo()
    assert not llm.engine.has_unfinished_requests
    run_batch(llm, Batch([[1, 2], [3]], [2, 2]))


def program(folder: Path, script: str) -> str:
    """Write what is started in place of Python; return its path."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_cold_start_finds_empty_caches_and_a_warm_one_what_the_cold_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    look = f'ls "$(dirname $TRITON_CACHE_DIR)" >> {seen}; echo end >> {seen}; mkdir $TRITON_CACHE_DIR; echo first token'
    monkeypatch.setattr(sys, "executable", program(tmp_path, look))
    figures = cold.cold(DUMMY, num_runs=2)
    assert figures.keys() == {"s", "warm_s"} and min(figures.values()) > 0
    assert seen.read_text().split() == ["stderr", "end", "stderr", "triton_cache_dir", "end"] * 2


def test_the_process_of_a_cold_start_prints_its_first_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = DUMMY | {"max_model_len": 64, "num_gpu_blocks_override": 8}
    monkeypatch.setattr(sys, "argv", ["cold", json.dumps(settings), "8"])
    cold.main()
    assert capsys.readouterr().out.startswith("first token [")


def test_a_cold_start_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path, "echo ValueError: block_size=0 >&2; exit 1"))
    with pytest.raises(RuntimeError, match=r"ended with 1: ValueError: block_size=0"):
        cold.cold(DUMMY, num_runs=1)


def test_a_first_run_is_told_apart_from_later_ones_with_and_without_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "said"
    script = f"""echo "$@" >> {said}
echo ready; echo noise
if [ -d $TRITON_CACHE_DIR ]; then first=9; else first=5; fi
echo "{{\\"first_tok_s\\": $first, \\"tok_s\\": 10}}"
mkdir -p $TRITON_CACHE_DIR"""
    monkeypatch.setattr(sys, "executable", program(tmp_path, script))
    figures = first_run.first_run(DUMMY, "mixed", 3, {"num_requests": 2})
    ready = [figures.pop(name) for name in ("ready_s", "cached_ready_s")]
    assert min(ready) > 0
    assert figures == {"first_tok_s": 5, "tok_s": 10, "cached_first_tok_s": 9, "cached_tok_s": 10}
    assert said.read_text().count('mixed {"num_requests": 2} 3') == 2
    with pytest.raises(ValueError, match="num_later=2: 2 runs warm up, so set it to 3 or more"):
        first_run.first_run(DUMMY, "mixed", 2)


def test_the_process_of_a_first_run_says_when_it_is_ready_and_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = DUMMY | {"max_model_len": 64, "num_gpu_blocks_override": 8}
    parameters = {"num_requests": 2, "shortest": 3, "longest": 6}
    monkeypatch.setattr(sys, "argv", ["first_run", json.dumps(settings), "mixed", json.dumps(parameters), "3"])
    first_run.main()
    ready, figures = capsys.readouterr().out.splitlines()
    found = json.loads(figures)
    assert ready == "ready" and found.keys() == {"first_tok_s", "tok_s"} and min(found.values()) > 0


def test_a_process_that_ends_before_it_has_said_all_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path, "echo ready; echo killed >&2"))
    with pytest.raises(RuntimeError, match=r"of teachllm\.bench\.first_run ended with 0: killed"):
        first_run.first_run(DUMMY, "mixed")
