"""Figures of a trace are what the scheduler's own books say, for simulated runs and real ones."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from teachllm import EngineConfig, SamplingParams
from teachllm.engine.llm_engine import Engine
from teachllm.simulator import simulate as simulation
from teachllm.simulator.workload import Arrival, Workload
from teachllm.trace.figures import Figures, Spread, figures
from teachllm.trace.recorder import Recorder
from tests.simulator.engines import Constant, run


def test_a_run_of_one_request_counted_by_hand() -> None:
    """20 tokens in two blocks of 16; a step computes 20, 21, 22, 23 and, as the request ends, frees the blocks."""
    found = run([Arrival(0.0, [7] * 20, 5)], num_blocks=10, async_scheduling=False, more={"cost": Constant()}).figures
    every = Spread(pytest.approx(0.013), pytest.approx(0.013), pytest.approx(0.013))
    assert found == Figures(
        duration=pytest.approx(5 * 0.013),
        num_steps=5,
        num_requests=1,
        num_finished=1,
        num_output_tokens=5,
        output_tokens_per_s=pytest.approx(1 / 0.013),
        ttft=every,
        itl=every,
        num_preemptions=0,
        prefix_hit_rate=0.0,
        waste=pytest.approx((12 + 11 + 10 + 9) / 32 / 4),
        wasted_slots=pytest.approx((12 + 11 + 10 + 9 + 0) / 5),
        budget_used=pytest.approx((20 + 4) / 5 / (16384 + 256)),
        blocks_used=pytest.approx((2 * 4 + 0) / 5 / 10),
        device_busy=pytest.approx(0.010 / 0.013),
        num_drafts=0,
        num_draft_tokens=0,
        num_accepted_tokens=0,
    )


def test_percentiles_are_linear_between_neighbours() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 4.0]) == Spread(2.5, 2.5, pytest.approx(3.97))
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)
    assert Spread.of([]) == Spread(0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("num_blocks", "settings"),
    [
        (30, {"async_scheduling": False}),
        (1000, {"async_scheduling": True}),
        (1000, {"async_scheduling": True, "max_num_batched_tokens": 64, "max_num_seqs": 64}),
        (100, {"async_scheduling": False, "block_size": 512, "max_model_len": 512}),
    ],
)
def test_waste_is_what_the_block_tables_do_not_fill(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, settings: dict[str, Any]
) -> None:
    empty: list[int] = []

    class Watcher(Recorder):
        def step(self, plan: Any, updates: Any, scheduler: Any, times: Any, **worker: Any) -> None:
            size = scheduler.kv.block_size
            empty.append(sum(len(r.block_ids) * size - r.num_computed_tokens for r in scheduler.running))
            super().step(plan, updates, scheduler, times, **worker)

    monkeypatch.setattr(simulation, "Recorder", Watcher)
    workload = Workload(num_requests=30, rate=300.0, prompt_len=(5, 120), output_len=(5, 60), shared_len=40, n=2)
    found = run(workload, num_blocks=num_blocks, **settings).figures
    assert found.wasted_slots == pytest.approx(sum(empty) / len(empty))
    assert (found.num_preemptions > 0) == (num_blocks == 30)


def test_contiguous_caches_waste_more_than_blocks() -> None:
    workload = Workload(num_requests=30, prompt_len=(5, 120), output_len=(5, 60))
    paged = run(workload, max_model_len=512).figures
    contiguous = run(workload, max_model_len=512, block_size=512).figures
    assert paged.waste is not None and contiguous.waste is not None
    assert paged.waste < 0.15 and contiguous.waste > 0.7


def test_without_a_cache_there_is_no_waste_to_speak_of() -> None:
    found = run(Workload(num_requests=5, output_len=5), enable_kv_cache=False).figures
    assert found.waste is found.wasted_slots is None
    assert found.num_output_tokens == 25


@pytest.mark.parametrize(("num_blocks", "async_scheduling"), [(7, False), (200, True)])
def test_a_real_engines_trace_gives_the_same_figures_as_its_outputs(num_blocks: int, async_scheduling: bool) -> None:
    lines: list[list[str]] = [[], []]
    config = EngineConfig(
        **{"device": "cpu", "dtype": "float32", "max_model_len": 96, "max_num_seqs": 8, "skip_tokenizer_init": True},
        num_gpu_blocks_override=num_blocks,
        async_scheduling=async_scheduling,
    )

    def sink(line: str) -> None:
        lines[0].append(line)
        event = json.loads(line)
        for share in event.get("scheduled", []):
            share.pop("token_ids", None), share.pop("text", None)
        lines[1].append(json.dumps(event))

    engine = Engine(config, recorder=Recorder(sink, time.perf_counter, lambda ids, request=None: [str(i) for i in ids]))
    outputs = []
    for index in range(8):
        prompt = [5] * 32 + [index] * (index + 1)
        params = SamplingParams(temperature=1.0, seed=index, max_tokens=6 + 2 * index, n=1 + index % 2, ignore_eos=True)
        outputs.append(engine.add_request(str(index), {"prompt_token_ids": prompt}, params))
    while engine.has_unfinished_requests:
        engine.step()
        if engine.core.scheduler.num_steps == 10:
            engine.abort_request("7")
    found = figures(lines[0])
    completions = [completion for output in outputs for completion in output.outputs]
    assert found.num_output_tokens == sum(len(completion.token_ids) for completion in completions)
    assert found.num_requests == len(completions)
    assert found.num_finished == len(completions) - len(outputs[7].outputs)
    assert found.num_preemptions == engine.core.scheduler.num_preemptions
    assert (found.num_preemptions > 0) == (num_blocks == 7)
    assert found.prefix_hit_rate > 0.5
    assert 0 < found.ttft.p50 <= found.ttft.p99 <= found.duration
    assert found == figures(lines[1]) == figures(map(json.loads, lines[0]))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "a trace begins with its header, and this one does not"),
        (['{"event": "step"}'], "a trace begins with its header, and this one does not"),
        (['{"event": "header"}', "{"], "line 2 of the trace is no JSON"),
        (["[]"], "line 1 of the trace is no event: it needs the field 'event'"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        figures(lines)
    assert "\n" not in str(error.value)


def test_a_trace_of_nothing_but_a_header_has_empty_figures() -> None:
    lines = run(Workload(num_requests=1)).lines[:1]
    found = figures(lines)
    assert (found.duration, found.num_steps, found.output_tokens_per_s, found.device_busy) == (0.0, 0, 0.0, None)
