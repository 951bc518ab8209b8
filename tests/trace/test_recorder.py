"""A trace is lines of JSON with the fields that the visualizer reads, and without text when none is wanted."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest

from teachllm.core.block_pool import BlockEvent
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.request import FinishReason
from teachllm.core.scheduler import Scheduler
from teachllm.core.scheduler_output import ModelRunnerOutput
from teachllm.engine.fork import arrived_params
from teachllm.sampling_params import DEFAULTS, SamplingParams
from teachllm.trace.recorder import Recorder, StepTimestamps, block_event
from tests.core.helpers import EOS, add, make_request, make_scheduler, schedule
from tests.request_kinds import KINDS

TIMES = StepTimestamps(time=2.0, schedule=0.1, execute=0.2, wait=0.1, update=0.3, end=2.7)


def make_recorder(text: bool = True) -> tuple[Recorder, list[str]]:
    lines: list[str] = []
    spell = (lambda ids, request=None: [str(token_id) for token_id in ids]) if text else None
    return Recorder(lines.append, lambda: 1.5, spell), lines


def parse(lines: list[str]) -> list[dict[str, Any]]:
    assert all("\n" not in line for line in lines)
    return [json.loads(line) for line in lines]


def run(scheduler: Scheduler, recorder: Recorder, **sampled: list[int]) -> list[RequestUpdate]:
    plan = schedule(scheduler)
    tokens = [sampled.get(share.request_id, [7] if share.samples else []) for share in plan.scheduled]
    updates = scheduler.update(plan, ModelRunnerOutput(tokens))
    recorder.step(plan, updates, scheduler, TIMES, graph_mode="eager", num_bytes=10, num_flops=20, ceiling="bytes")
    return updates


def test_the_header_says_what_is_traced() -> None:
    recorder, lines = make_recorder()
    recorder.header({"block_size": 4}, {"name": "teachlm"}, num_blocks=8)
    assert parse(lines) == [
        {
            "event": "header",
            "version": 1,
            "time": 1.5,
            "config": {"block_size": 4},
            "model": {"name": "teachlm"},
            "num_blocks": 8,
        }
    ]


@pytest.mark.parametrize("asked", KINDS.values(), ids=KINDS)
def test_an_arrival_holds_every_parameter_that_is_not_its_default(asked: dict[str, Any]) -> None:
    recorder, lines = make_recorder()
    recorder.arrival(make_request("a", 2, params=SamplingParams(**asked)))
    (arrival,) = parse(lines)
    assert set(arrival["params"]) == {name for name, value in asked.items() if value != DEFAULTS[name]}
    assert arrived_params(arrival) == SamplingParams(**asked)


def test_an_arrival_holds_what_a_replay_needs() -> None:
    recorder, lines = make_recorder()
    params = SamplingParams(temperature=0.0, max_tokens=3, stop="end", logit_bias={4: 1.0})
    request = make_request("a", 2, params=params, arrival_time=1.25, priority=2, seed=9)
    scheduler = make_scheduler()
    scheduler.add(request)
    recorder.arrival(request)
    recorder.end("a", FinishReason.ABORT, scheduler)
    recorder.end("b", FinishReason.STOP, scheduler)
    arrival, abort, stop = parse(lines)
    assert abort == {"event": "abort", "time": 1.5, "request_id": "a", "block_events": []}
    assert stop == {"event": "stop", "time": 1.5, "request_id": "b", "block_events": []}
    sent = arrival.pop("params")
    assert (sent["temperature"], sent["max_tokens"], sent["stop"], sent["logit_bias"]) == (0.0, 3, "end", {"4": 1.0})
    assert "top_p" not in sent  # a default
    assert arrival == {
        "event": "arrival",
        "time": 1.25,
        "request_id": "a",
        "num_prompt_tokens": 2,
        "prompt_token_ids": [100, 101],
        "prompt_text": ["100", "101"],
        "child_index": 0,
        "seed": 9,
        "priority": 2,
        "max_len": 5,
    }


def test_a_step_holds_what_happened_in_it() -> None:
    recorder, lines = make_recorder()
    scheduler = make_scheduler(num_blocks=5, max_num_seqs=2)
    scheduler.kv.record_events()
    a = add(scheduler, "a", 5)
    add(scheduler, "b", 4, max_tokens=1)
    add(scheduler, "c", 4)
    run(scheduler, recorder)
    a.draft_token_ids = [7, 8]
    run(scheduler, recorder, a=[7, 9])
    first, second = parse(lines)
    assert {key: first[key] for key in ("event", "step", "time", "schedule", "execute", "wait", "update", "end")} == {
        "event": "step",
        "step": 0,
        "time": 2.0,
        "schedule": 0.1,
        "execute": 0.2,
        "wait": 0.1,
        "update": 0.3,
        "end": 2.7,
    }
    assert first["scheduled"][0] == {
        "request_id": "a",
        "start": 0,
        "num_tokens": 5,
        "num_sampled": 1,
        "phase": "prefill",
        "token_ids": [7],
        "text": ["7"],
    }
    assert first["finished"] == {"b": "length"}
    assert first["waiting"] == {"c": ["sequence_limit", "2 of 2 requests run already"]}
    assert first["preempted"] == []
    assert first["blocks"] == {"used": 2, "cached": 1, "free": 2}
    assert [event[:3] for event in first["block_events"]] == [
        ["allocate", 0, "a"],
        ["allocate", 1, "a"],
        ["allocate", 2, "b"],
        ["commit", 0, "a"],
        ["commit", 2, "b"],
        ["free", 2, "b"],
    ]
    assert [len(bytes.fromhex(event[3])) for event in first["block_events"] if event[0] == "commit"] == [32, 32]
    assert (first["graph_mode"], first["num_bytes"], first["num_flops"], first["ceiling"]) == ("eager", 10, 20, "bytes")
    decode = second["scheduled"][0]
    assert (decode["phase"], decode["num_tokens"], decode["num_draft"], decode["num_accepted"]) == ("decode", 3, 2, 1)
    assert (decode["token_ids"], decode["text"]) == ([7, 9], ["7", "9"])


def test_without_text_nothing_that_a_user_wrote_is_in_the_trace() -> None:
    recorder, lines = make_recorder(text=False)
    scheduler = make_scheduler()
    params = SamplingParams(
        max_tokens=5,
        stop="secret",
        bad_words=["secret"],
        stop_token_ids=[424242],
        allowed_token_ids=[424242],
        logit_bias={424242: 1.0},
    )
    request = add(scheduler, "a", 2, first=424242, params=params)
    recorder.arrival(request)
    run(scheduler, recorder, a=[424242])
    assert "secret" not in "".join(lines) and "4242" not in "".join(lines)
    arrival, step = parse(lines)
    assert arrival["params"] == {"max_tokens": 5}
    assert "token_ids" not in step["scheduled"][0] and "text" not in step["scheduled"][0]


def test_without_text_hashes_tell_nothing_and_still_tell_blocks_apart() -> None:
    def hashes(text: bool) -> list[list[str]]:
        recorder, lines = make_recorder(text)
        scheduler = make_scheduler()
        scheduler.kv.record_events()
        for name in ("a", "b"):
            add(scheduler, name, 9)
        add(scheduler, "c", 9, first=7)
        run(scheduler, recorder)
        return [event[3:] for event in parse(lines)[0]["block_events"] if event[0] == "commit"]

    told, hidden, again = (list(chain.from_iterable(hashes(text))) for text in (True, False, False))
    assert not set(told) & set(hidden) and not set(hidden) & set(again)
    assert [told.index(value) for value in told] == [hidden.index(value) for value in hidden]


def test_parameters_of_any_kind_of_sequence_can_be_told() -> None:
    recorder, lines = make_recorder()
    params = SamplingParams(max_tokens=3, allowed_token_ids=range(4), stop_token_ids=(1, 2))
    recorder.arrival(make_request("a", 2, params=params))
    assert parse(lines)[0]["params"]["allowed_token_ids"] == [0, 1, 2, 3]


def test_late_tokens_are_not_in_the_trace() -> None:
    recorder, lines = make_recorder()
    scheduler = make_scheduler(async_scheduling=True)
    add(scheduler, "a", 4)
    first, second = schedule(scheduler), schedule(scheduler)
    recorder.step(first, scheduler.update(first, ModelRunnerOutput([[EOS]])), scheduler, TIMES)
    recorder.step(second, scheduler.update(second, ModelRunnerOutput([[9]])), scheduler, TIMES)
    steps = parse(lines)
    assert steps[0]["finished"] == {"a": "stop"}
    assert "token_ids" not in steps[1]["scheduled"][0]
    assert steps[1]["finished"] == {}


def test_events_are_short_lists_with_hashes_in_hexadecimal() -> None:
    assert block_event(BlockEvent("evict", 3)) == ["evict", 3]
    assert block_event(BlockEvent("hit", 3, "a")) == ["hit", 3, "a"]
    assert block_event(BlockEvent("commit", 3, "a", b"\x01", b"\xff")) == ["commit", 3, "a", "01", "ff"]
