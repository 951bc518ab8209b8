"""What a trace tells of ranks, which are threads here: the bytes that were predicted, at times that fit together."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from teachllm import SamplingParams
from teachllm.config import EngineConfig
from teachllm.core.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from teachllm.distributed.layout import Layout
from teachllm.distributed.step_bytes import step_bytes
from teachllm.engine.engine_core import _seconds_of
from teachllm.engine.fork import fork, fork_config
from teachllm.engine.llm_engine import Engine
from teachllm.models.model_config import load_model_config
from teachllm.models.own_model import model_of_rank
from teachllm.trace.ranks import rank_figures, spans_of
from teachllm.trace.reader import Trace, parse_trace
from teachllm.trace.recorder import Recorder, StepTimestamps
from teachllm.worker.executor import Executor
from tests.trace.traced import spell
from tests.worker.engines import drain, make_engine, random_ids, tiny
from tests.worker.processes.child_threads import patched, ranks_in_threads

LAYOUT = Layout(tensor=2, pipeline=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
FILTERED = SamplingParams(temperature=0.8, top_k=20, seed=1, max_tokens=9, ignore_eos=True)


num_in_flight: list[int] = []  # plans, whenever a result is asked for


class FailsOnce:
    """Spoils the plan of step 3."""

    def __init__(self, inner: Executor) -> None:
        self._inner, self._has_failed = inner, False
        self.num_blocks, self.max_in_flight, self.sentinel = inner.num_blocks, inner.max_in_flight, inner.sentinel
        self.sample, self.close = inner.sample, inner.close

    def execute(self, plan: SchedulerOutput) -> Any:
        if plan.step == 3 and not self._has_failed:
            self._has_failed = True
            plan = replace(plan, scheduled=[*plan.scheduled, ScheduledRequest("nobody", 0, 1, [], True, 0, [])])
        return self._inner.execute(plan)


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with patched(ranks_in_threads):
        yield


@pytest.fixture(scope="module")
def traces(threads: None) -> Iterator[tuple[Trace, Trace]]:
    """Of two stages of two ranks: a run without a fault, and one of which a step fails."""
    found = []
    lines: list[str] = []
    settings = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "max_num_batched_tokens": 32}
    recorder = Recorder(lines.append, time.perf_counter, spell)
    make = lambda config, inner: FailsOnce(inner)  # noqa: E731
    with closing(make_engine(make_executor=make, recorder=recorder, async_scheduling=False, **settings)) as engine:
        header, collect = len(lines), engine.core.collect

        def counted() -> Any:
            num_in_flight.append(engine.core.num_pending)
            return collect()

        engine.core.collect = counted  # type: ignore[method-assign]
        for params in (GREEDY, FILTERED):
            for i in range(6):
                engine.add_request(str(i), random_ids(5 + 7 * i, seed=i), params)
            finish(engine)
            found.append(lines[:])
            del lines[header:]
    failed, sound = found
    yield parse_trace(f"{line}\n" for line in failed), Trace(json.loads(sound[0]), [*map(json.loads, sound[1:])])


def finish(engine: Engine) -> None:
    """A step that fails is tried again."""
    try:
        drain(engine)
    except RuntimeError as error:
        assert "nobody" in str(error)
        drain(engine)


def filters(trace: Trace) -> tuple[int, int]:
    """How many candidates each sampled row has: all requests are alike."""
    params = next(line["params"] for line in trace.lines if line["event"] == "arrival")
    return (1, params["top_k"]) if "top_k" in params else (0, 0)


@pytest.mark.parametrize("which", [0, 1], ids=["greedy", "filtered"])
def test_every_rank_sends_the_bytes_that_were_predicted(traces: tuple[Trace, Trace], which: int) -> None:
    trace = traces[which]
    is_filtered, num_told = filters(trace)
    assert is_filtered == which
    model = load_model_config(EngineConfig(**tiny()))
    assert len(trace.steps) > 15
    for step in trace.steps:
        assert [told["stage"] for told in step["ranks"]] == [0, 0, 1, 1]
        num_tokens = sum(scheduled["num_tokens"] for scheduled in step["scheduled"])
        num_sampled = sum(scheduled.get("num_sampled", 0) for scheduled in step["scheduled"])
        for rank, told in enumerate(step["ranks"]):
            place = LAYOUT.coords(rank)
            sizes = (model_of_rank(model, place).num_layers, model.hidden_size, 4, num_tokens, num_sampled)
            counts = step_bytes(place, *sizes, num_sampled * is_filtered, num_told)
            assert told["sent"] == {operation: list(each) for operation, each in counts.items()}
            assert told["expected"] == told["sent"]


def test_exchanges_lie_inside_of_their_step_in_order_and_are_all_that_were_counted(
    traces: tuple[Trace, Trace],
) -> None:
    for step in traces[0].steps:
        for told in step["ranks"]:
            spans = list(spans_of(told))
            times = [told["begin"], *(time for _, *both in spans for time in both), told["end"]]
            assert all(earlier <= later + 1e-6 for earlier, later in pairwise(times))
            counted = {operation: calls for operation, (calls, _) in told["sent"].items()}
            assert {each: [name for name, *_ in spans].count(each) for each in counted} == counted
            assert step["time"] <= told["begin"] and told["end"] <= step["end"]  # on one clock


def test_a_step_takes_as_long_as_its_ranks_compute_and_not_as_long_as_it_is_handed_out(
    traces: tuple[Trace, Trace],
) -> None:
    for step in traces[0].steps:
        begins, ends = zip(*((told["begin"], told["end"]) for told in step["ranks"]), strict=True)
        assert step["roofline"]["seconds"] == pytest.approx(max(ends) - min(begins))


def test_two_plans_are_in_flight_and_each_rank_takes_one_after_the_other(traces: tuple[Trace, Trace]) -> None:
    assert max(num_in_flight) == 2
    for rank in range(4):
        told = [step["ranks"][rank] for step in traces[1].steps]
        assert all(one["end"] <= next_one["begin"] for one, next_one in pairwise(told))


@pytest.mark.parametrize(
    ("spans", "share_clock", "expected"),
    [
        ([(1.0, 2.0), (1.5, 4.0)], True, 3.0),  # from the first rank's begin to the last one's end
        ([(1.0, 2.0), (901.5, 904.0)], False, 2.5),  # the second machine has another clock
        ([(1.0, 2.0), (2.1, 2.1)], True, 0.5),  # a rank whose device told no time: until the calls returned
    ],
)
def test_ranks_are_timed_by_a_clock_that_they_share(
    spans: list[tuple[float, float]], share_clock: bool, expected: float
) -> None:
    result = ModelRunnerOutput([], ranks=[{"begin": begin, "end": end} for begin, end in spans])
    times = StepTimestamps(time=0.0, schedule=0.1, execute=0.2, wait=0.3, update=0.1, end=0.7)
    assert _seconds_of(result, times, share_clock) == expected


def test_after_a_step_that_failed_ranks_are_told_of_as_before(traces: tuple[Trace, Trace]) -> None:
    failed = next(i for i, line in enumerate(traces[0].lines) if line["event"] == "error")
    behind = [line for line in traces[0].lines[failed:] if line["event"] == "step"]
    assert len(behind) > 10 and all(len(line["ranks"]) == 4 for line in behind)


def test_shares_of_a_ranks_time_add_up(traces: tuple[Trace, Trace]) -> None:
    for each in rank_figures(traces[1].lines):
        assert each.computes + each.exchanges + each.bubble == pytest.approx(1)
        assert min(each.computes, each.exchanges, each.bubble) > 0
        assert set(each.operations) == set(each.sent)


def test_a_fork_which_goes_on_at_another_time_has_its_ranks_there_too(traces: tuple[Trace, Trace]) -> None:
    trace, at = traces[0], 1e6
    num_lines = trace.lines.index(trace.steps[12]) + 1
    lines: list[str] = []
    config = fork_config(trace.header, tensor_parallel_size=1)
    with closing(fork(trace.state_after(num_lines), config, lines.append, at)) as engine:
        drain(engine)
    steps = [line for line in map(json.loads, lines) if line["event"] == "step"]
    assert len(steps) > 5
    for step in steps:
        assert len(step["ranks"]) == 2
        assert all(at <= step["time"] <= told["begin"] + 1e-4 for told in step["ranks"])
        assert all(told["end"] <= step["end"] + 1e-4 for told in step["ranks"])


def test_one_rank_alone_tells_nothing() -> None:
    lines: list[str] = []
    recorder = Recorder(lines.append, time.perf_counter)
    with closing(make_engine(recorder=recorder, distributed_executor_backend="mp")) as engine:
        engine.add_request("a", random_ids(5), GREEDY)
        drain(engine)
    assert not any("ranks" in json.loads(line) for line in lines)
