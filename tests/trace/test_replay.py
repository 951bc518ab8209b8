"""What a trace says of the pool is what the pool was, after every step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from teachllm import SamplingParams
from teachllm.core.request import RequestStatus
from teachllm.engine.llm_engine import Engine
from teachllm.trace.reader import parse_trace
from teachllm.trace.replay import Replay
from tests.thorough import THOROUGH, times
from tests.trace.traced import busy, live_state, traced_engine
from tests.worker.engines import FaultyExecutor, drain, random_ids

SMALL = {"num_gpu_blocks_override": 18, "max_num_batched_tokens": 48, "max_num_seqs": 8}


@pytest.mark.parametrize("ahead", [False, True])
def test_the_replayed_pool_is_the_live_one_after_every_step_with_preemptions_and_prefix_hits(ahead: bool) -> None:
    states: list[str] = []

    def note(engine: Engine, line: str) -> None:
        if '"event":"arrival"' not in line:
            states.append(live_state(engine.core.scheduler))

    engine, lines = traced_engine(note, async_scheduling=ahead, **SMALL | {"num_gpu_blocks_override": times(11, 18)})
    busy(engine, num_requests=times(14, 32), output_lens=(25, 46) if THOROUGH else (10, 20))
    while engine.has_unfinished_requests:
        engine.step()
        if engine.core.scheduler.num_steps == 15:
            for name in ("11", "12"):
                engine.abort_request(name)
    trace = parse_trace(lines)
    assert trace.problem is None and trace.note is None
    assert len(trace.steps) >= times(30, 200) and engine.core.scheduler.num_preemptions > times(1, 5)
    assert any(event[0] == "hit" for line in trace.steps for event in line["block_events"])
    assert any(event[0] == "evict" for line in trace.steps for event in line["block_events"])

    replay = Replay(trace.header)
    replayed = []
    for line in trace.lines:
        replay.apply(line)
        if line["event"] != "arrival":
            replayed.append(replay.state_text())
    assert len(replayed) == len(states)
    for index, (found, state) in enumerate(zip(replayed, states, strict=True)):
        assert found == state, f"line {index} after the arrivals"


@pytest.mark.parametrize("ahead", [False, True])
def test_requests_are_replayed_with_their_tokens_their_state_and_why_they_wait(ahead: bool) -> None:
    replays: list[Replay] = []
    num_compared = 0

    def compare(engine: Engine, line: str) -> None:
        nonlocal num_compared
        event = json.loads(line)
        replays[0].apply(event)
        if event["event"] != "step":
            return
        scheduler = engine.core.scheduler
        for name, request in scheduler.requests.items():
            state = replays[0].requests[name]
            assert state.status == request.status.value
            assert state.output_ids == request.output_token_ids == [int(t[1:-1]) for t in state.output_text]
            assert len(state.token_times) == state.num_output_tokens == request.num_output_tokens
            if request.status is RequestStatus.RUNNING:
                assert state.wait is None
                assert ahead or state.num_computed_tokens == request.num_computed_tokens
            else:
                assert request.wait is not None
                assert state.wait == (request.wait.reason.name.lower(), str(request.wait))
            if request.num_cached_tokens is not None and state.num_cached_tokens is not None:
                assert state.num_cached_tokens == request.num_cached_tokens
            num_compared += 1

    engine, lines = traced_engine(compare, async_scheduling=ahead, **SMALL)
    replays.append(Replay(json.loads(lines[0])))
    busy(engine, num_requests=times(12, 24))
    outputs = drain(engine)
    assert num_compared > times(150, 500)
    ended = replays[0].requests
    assert {name.split("#")[0] for name in ended} == set(outputs)
    assert all(not state.is_live and state.status == "finished" and state.end_time for state in ended.values())
    assert sum(state.num_preemptions for state in ended.values()) == engine.core.scheduler.num_preemptions


def test_a_step_that_failed_is_in_the_trace_and_what_it_took_back_too() -> None:
    faults: list[Exception] = []
    engine, lines = traced_engine(**SMALL)
    engine.core.executor = FaultyExecutor(
        engine.core.executor, lambda point: faults.pop() if faults and point == "result" else None
    )
    busy(engine, num_requests=6)
    for _ in range(4):
        engine.step()
    faults.append(RuntimeError("no more of this"))
    with pytest.raises(RuntimeError):
        engine.step()
    trace = parse_trace(lines)
    assert trace.problem is None
    assert trace.lines[-1]["event"] == "error" and "no more of this" in trace.lines[-1]["message"]
    assert trace.replay.state_text() == live_state(engine.core.scheduler)
    statuses = {name: request.status.value for name, request in engine.core.scheduler.requests.items()}
    assert {name: trace.replay.requests[name].status for name in statuses} == statuses
    assert "preempted" in statuses.values()
    drain(engine)
    assert parse_trace(lines).replay.state_text() == live_state(engine.core.scheduler)


def test_an_id_may_be_used_again_when_its_request_has_ended() -> None:
    engine, lines = traced_engine()
    for _ in range(2):
        engine.add_request("a", random_ids(5), SamplingParams(max_tokens=3, ignore_eos=True))
        drain(engine)
    replay = parse_trace(lines).replay
    assert list(replay.requests) == ["a"] and replay.requests["a"].num_output_tokens == 3


@pytest.mark.parametrize("ends", ["abort", "stop token"])
def test_an_id_may_be_used_again_while_a_plan_in_flight_pins_its_old_blocks(ends: str) -> None:
    states: list[str] = []

    def note(engine: Engine, line: str) -> None:
        if '"event":"arrival"' not in line:
            states.append(live_state(engine.core.scheduler))

    engine, lines = traced_engine(note, async_scheduling=True)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.add_request("a", random_ids(40), params)
    for _ in range(3):
        engine.step()
    if ends == "abort":
        engine.abort_request("a")
    else:
        while not engine.core.scheduler.requests["a"].num_output_tokens >= 7:
            engine.step()
        engine.step()
    engine.add_request("a", random_ids(20, seed=5), params)
    drain(engine)
    trace = parse_trace(lines)
    assert trace.problem is None and trace.replay.requests["a"].num_output_tokens == 8
    replay, replayed = Replay(trace.header), []
    for line in trace.lines:
        replay.apply(line)
        if line["event"] != "arrival":
            replayed.append(replay.state_text())
    assert replayed == states


def test_the_state_after_any_line_can_be_asked_for() -> None:
    engine, lines = traced_engine(**SMALL)
    busy(engine, num_requests=8)
    drain(engine)
    trace = parse_trace(lines)
    assert trace.state_after(len(trace.lines)).state_text() == trace.replay.state_text()
    assert trace.state_after(0).step == -1
    arrived: dict[str, Any] = trace.state_after(8).requests
    assert all(state.status == "waiting" and state.wait is None for state in arrived.values())
