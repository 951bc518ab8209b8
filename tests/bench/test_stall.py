"""Stalls: when requests arrive, what a step may take, and what explains one that takes longer."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from teachllm.bench import stall as stall_module
from teachllm.bench.engine_events import EngineEvent, describe, graph_name, observing
from teachllm.bench.stall import (
    StallLoad,
    StepRecorder,
    TimedRequest,
    TimedStep,
    draw_requests,
    run_requests,
    stall,
    summarize,
    with_events,
)
from teachllm.config import EngineConfig
from teachllm.engine.llm_engine import Engine
from teachllm.sampling_params import SamplingParams
from teachllm.worker.gpu.cuda_graphs import FullKey, Graphs
from teachllm_kernels import first_launch
from tests.bench.h200_script import load_script

script = load_script("stall")
DUMMY = {"model": "teachlm", "load_format": "dummy", "device": "cpu", "skip_tokenizer_init": True}
SMALL = {"max_model_len": 64, "num_gpu_blocks_override": 8, "async_scheduling": False}
COLLECT = gc.collect  # which the fixture of this folder replaces
STEP = TimedStep(begin=5.0, end=5.1, num_prompt_tokens=12_345, num_decodes=40)


@dataclass
class FakeClock:
    """A clock that goes on by 2 ms whenever it is read."""

    now: float = 100.0

    def __call__(self) -> float:
        self.now += 0.002
        return self.now


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Triton's knobs, without Triton."""
    fake = SimpleNamespace(compilation=SimpleNamespace(listener=None))
    monkeypatch.setattr(first_launch, "knobs", fake)
    return fake


@pytest.fixture
def no_automatic_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


# -- the load ------------------------------------------------------------------------------------------------


def test_requests_follow_the_seed_and_arrive_as_long_as_the_load_lasts() -> None:
    load = StallLoad(rate=30.0, longest_prompt=1000, longest_output=30)
    requests = draw_requests(load, 100)
    assert requests == draw_requests(load, 100)
    assert requests[1:5] != draw_requests(replace(load, seed=1), 100)[1:5]
    due = [request.due_s for request in requests]
    assert due[0] == 0.0 and due == sorted(due) and 59.0 < due[-1] < 60.0
    assert 1650 < len(requests) < 1950  # 3.5 standard deviations around 1,800
    assert all(10 <= request.output_len <= 30 for request in requests)


def test_lengths_of_prompts_are_uniform_on_a_logarithmic_scale() -> None:
    requests = draw_requests(StallLoad(rate=30.0, longest_prompt=1000), 100)
    lengths = [len(request.prompt) for request in requests]
    assert min(lengths) >= 10 and max(lengths) <= 1000
    assert 0.45 < sum(length < 100 for length in lengths) / len(lengths) < 0.55
    assert {token for request in requests for token in request.prompt} == set(range(100))


@dataclass
class FakeEngine:
    """An engine whose step takes a second, and finishes every request with the tokens that it asked for."""

    clock: SimpleNamespace
    num_missing: int = 0
    log: list[tuple[str, float]] = field(default_factory=list)
    queue: dict[str, int] = field(default_factory=dict)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.queue)

    def add_request(self, name: str, prompt: dict[str, list[int]], params: SamplingParams) -> None:
        assert params.ignore_eos and params.max_tokens is not None
        self.log.append((name, self.clock.now))
        self.queue[name] = params.max_tokens

    def step(self) -> list[Any]:
        self.log.append(("step", self.clock.now))
        self.clock.now += 1.0
        done, self.queue = self.queue, {}
        tokens = {name: [SimpleNamespace(token_ids=[0] * (n - self.num_missing))] for name, n in done.items()}
        return [SimpleNamespace(request_id=name, finished=True, outputs=outputs) for name, outputs in tokens.items()]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that only steps and sleep advance."""
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(stall_module, "time", SimpleNamespace(sleep=sleep))
    return clock


def test_requests_that_arrive_during_a_step_are_added_at_its_end(clock: SimpleNamespace) -> None:
    engine = FakeEngine(clock)
    requests = [TimedRequest(due_s, [1, 2], 3) for due_s in (0.0, 0.25, 0.5, 4.0)]
    run_requests(engine, requests, lambda: clock.now)  # type: ignore[arg-type]
    first, second, third = ("stall 0", 0.0), ("stall 1", 1.0), ("stall 2", 1.0)
    assert engine.log == [first, ("step", 0.0), second, third, ("step", 1.0), ("stall 3", 4.0), ("step", 4.0)]


def test_a_request_that_ends_early_is_an_error(clock: SimpleNamespace) -> None:
    engine = FakeEngine(clock, num_missing=1)
    with pytest.raises(RuntimeError, match="stall 0 ended after 2 tokens"):
        run_requests(engine, [TimedRequest(0.0, [1], 3)], lambda: clock.now)  # type: ignore[arg-type]


# -- bound and cause -----------------------------------------------------------------------------------------


def test_a_step_may_take_two_and_a_half_times_its_roofline_and_20_ms() -> None:
    step = replace(STEP, floor=0.02)
    assert step.bound == pytest.approx(0.07) and step.is_over and step.excess == pytest.approx(0.03)
    assert not replace(step, end=5.06).is_over


def test_a_step_without_a_roofline_has_no_bound() -> None:
    assert STEP.bound is None and not STEP.is_over and STEP.excess == pytest.approx(0.1)


def test_a_step_is_explained_by_what_happened_in_it_or_else_by_its_size() -> None:
    assert STEP.cause == "12,345 prompt tokens and 40 decodes"
    assert replace(STEP, num_prompt_tokens=1, num_decodes=1).cause == "1 prompt token and 1 decode"
    events = (EngineEvent(5.05, "compiled", "_gemv"), EngineEvent(5.06, "collected", seconds=0.012))
    step = replace(STEP, events=events, num_preempted=2)
    assert step.cause == step.other_work == "compiled _gemv, garbage collection 12 ms, preempted 2 requests"


def test_events_belong_to_the_step_in_which_they_were_over() -> None:
    steps = [replace(STEP, begin=begin, end=begin + 1) for begin in (1.0, 2.0, 5.0)]
    events = [EngineEvent(time, "loaded", str(time)) for time in (0.5, 1.5, 2.0, 2.5, 4.0, 6.0, 7.0)]
    found = [[event.time for event in step.events] for step in with_events(steps, events)]
    assert found == [[1.5, 2.0], [2.5], [6.0]]


def test_many_kernels_are_counted_and_short_collections_left_out() -> None:
    compiled = [EngineEvent(0.0, "compiled", name) for name in "abcdea"]
    assert describe(compiled) == "compiled a, b, c and 2 more"
    again = [EngineEvent(0.0, "loaded", "a"), EngineEvent(0.0, "loaded", "z")]
    assert describe([*compiled[:2], *again]) == "compiled a and b, loaded z"
    assert describe([EngineEvent(0.0, "collected", seconds=0.0004)]) == ""


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (FullKey(64, 64, 1, (True, False), None), "decodes of 64"),
        (FullKey(9, 24, 3, (True, False), 2), "decodes of 8 with 2 drafts"),
        (FullKey(8, 128, 0, None, None), "prompts of 128 tokens"),
        (("mixed", 256), "mixed steps of 256 tokens"),
        ("other", "other"),
    ],
)
def test_a_graph_is_named_by_the_steps_that_it_holds(key: Any, name: str) -> None:
    assert graph_name(key) == name


@pytest.mark.usefixtures("no_automatic_collection")
def test_each_step_of_an_engine_is_explained(monkeypatch: pytest.MonkeyPatch, knobs: SimpleNamespace) -> None:
    for name in ("capture", "capture_pieces"):
        monkeypatch.setattr(Graphs, name, lambda graphs, key, run: True)
    graphs: Any = object()

    def launch(name: str, cache_hit: bool) -> None:
        knobs.compilation.listener(src=SimpleNamespace(name=name), cache_hit=cache_hit)

    happenings: dict[int, Callable[[], object]] = {
        1: lambda: launch("_paged_decode", False),
        2: lambda: launch("_gemv", True),
        3: lambda: Graphs.capture(graphs, FullKey(64, 64, 1, (True, False), None), lambda: None),
        4: lambda: Graphs.capture_pieces(graphs, ("mixed", 128), lambda outside: None),  # type: ignore[arg-type]
        5: COLLECT,
    }
    clock = FakeClock()
    recorder, before = StepRecorder(clock), (Graphs.capture, Graphs.capture_pieces, list(gc.callbacks))
    engine = Engine(EngineConfig(**DUMMY, **SMALL), recorder=recorder)
    with observing(clock) as events:
        engine.add_request("a", {"prompt_token_ids": [1, 2, 3, 4]}, SamplingParams(max_tokens=7, ignore_eos=True))
        for index in range(7):
            happenings.get(index, lambda: None)()
            engine.step()
    engine.close()
    assert [step.cause for step in with_events(recorder.steps, events)] == [
        "4 prompt tokens and 0 decodes",
        "compiled _paged_decode",
        "loaded _gemv",
        "recorded decodes of 64",
        "recorded mixed steps of 128 tokens",
        "garbage collection 2 ms",
        "0 prompt tokens and 1 decode",
    ]
    ends = [step.end for step in recorder.steps]
    assert [step.begin for step in recorder.steps[1:]] == ends[:-1]  # nothing that a request waits for is left out
    assert (Graphs.capture, Graphs.capture_pieces, list(gc.callbacks)) == before
    assert knobs.compilation.listener is None


def test_time_in_which_the_engine_was_idle_belongs_to_no_step() -> None:
    clock = FakeClock()
    recorder = StepRecorder(clock)
    engine = Engine(EngineConfig(**DUMMY, **SMALL), recorder=recorder)
    for name in "ab":
        engine.add_request(name, {"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=2, ignore_eos=True))
        while engine.has_unfinished_requests:
            engine.step()
            clock.now += 1.0
    engine.close()
    gaps = [after.begin - before.end for before, after in pairwise(recorder.steps)]
    assert gaps[0] == gaps[2] == 0.0 and gaps[1] > 1.0


# -- the result ----------------------------------------------------------------------------------------------


def test_a_summary_has_the_longest_steps_by_the_time_beyond_their_bound() -> None:
    def step(seconds: float, floor: float | None) -> TimedStep:
        return replace(STEP, end=STEP.begin + seconds, floor=floor)

    found = summarize([step(0.5, 0.2), step(0.1, 0.01), *[step(0.001, 0.0)] * 12, step(0.2, 0.01)])
    assert (found["num_steps"], found["num_bounded"], found["num_over"]) == (15, 15, 2)
    assert [each["step"] for each in found["longest"][:2]] == [14, 1] and len(found["longest"]) == 10
    assert {len(column) for column in found["steps"].values()} == {15}
    without = summarize([step(0.1, None), step(0.3, None)])
    assert (without["num_bounded"], without["num_over"]) == (0, 0)
    assert [each["step"] for each in without["longest"]] == [1, 0]


def test_the_new_process_says_when_it_is_ready_and_what_its_steps_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = StallLoad(200.0, duration_s=0.02, longest_prompt=20, shortest_output=2, longest_output=4)
    monkeypatch.setattr(sys, "argv", ["stall", json.dumps(DUMMY | SMALL), json.dumps(asdict(load))])
    stall_module.main()
    ready, result = capsys.readouterr().out.splitlines()
    found, requests = json.loads(result), draw_requests(load, 4096)
    assert ready == "ready" and found["num_requests"] == len(requests)
    assert sum(found["steps"]["num_prompt_tokens"]) == sum(len(request.prompt) for request in requests)
    assert sum(found["steps"]["num_decodes"]) == sum(request.output_len - 1 for request in requests)


def test_the_time_until_it_is_ready_is_without_the_drawing_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho ready\necho "{\\"drawing_s\\": 1000000, \\"num_over\\": 0}"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    found = stall(DUMMY, StallLoad(1.0))
    assert found.pop("ready_s") < 0 and found == {"num_over": 0}


@pytest.mark.parametrize("num_over", [0, 3])
def test_the_script_prints_the_longest_steps_and_fails_where_one_is_over_its_bound(
    num_over: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[tuple[str, float, int]] = []

    def fake_stall(settings: dict[str, Any], load: StallLoad) -> dict[str, Any]:
        asked.append((Path(settings["model"]).name, load.rate, load.longest_output))
        longest = [{"step": 7, "seconds": 1.5, "bound_s": 0.05, "cause": "compiled _gemv"}]
        counts = {"num_requests": 1800, "num_steps": 6000, "num_bounded": 6000, "num_over": num_over}
        return {"ready_s": 12.0, **counts, "longest": longest, "steps": {}}

    monkeypatch.setattr(script, "stall", fake_stall)
    output = tmp_path / "stall.json"
    given = ["--longest-output", "50", "--commit", "abc", "--output", str(output)]
    assert script.main(given) == (1 if num_over else 0)
    assert asked == [("qwen3-0.6b", 30.0, 50), ("qwen3-8b", 8.0, 50)]
    result = json.loads(output.read_text())
    assert result["commit"] == "abc" and result["stall"]["qwen3-8b"]["load"]["longest_output"] == 50
    printed = capsys.readouterr().out
    assert "qwen3-8b: ready after 12.0 s; 1,800 requests, 6,000 steps" in printed
    assert "1,500.0 ms (bound 50.0)" in printed and "compiled _gemv" in printed


def test_the_script_says_where_no_step_has_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    longest = [{"step": 7, "seconds": 1.5, "bound_s": None, "cause": "3 prompt tokens and 0 decodes"}]
    counts = {"num_requests": 2, "num_steps": 9, "num_bounded": 0, "num_over": 0}
    script.print_result("teachlm", {"ready_s": 1.0, **counts, "longest": longest})
    printed = capsys.readouterr().out
    assert "9 steps, without a bound" in printed and "(bound" not in printed
