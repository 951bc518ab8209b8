"""Engines under way, without a page: they can be watched, driven, forked, and they fail in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from teachllm.config import EngineConfig
from teachllm.sampling_params import SamplingParams
from teachllm.trace.reader import Trace, parse_trace
from teachllm_webui.compare import Tally
from teachllm_webui.forms import changes_of, request_of, what_if_of
from teachllm_webui.guard import Guard
from teachllm_webui.live import LiveRun
from teachllm_webui.page import server_functions
from teachllm_webui.plan import PlannedRequest, engine_plan, fork_plan
from teachllm_webui.presets import PRESETS, Preset, Variant, preset
from teachllm_webui.session import LiveSession
from teachllm_webui.timeline import Seen, Status, Timeline
from teachllm_webui.trace_log import TraceLog
from teachllm_webui.what_if import SHAPE_NAMES, WhatIf, run_what_if
from tests.programs import environment_with
from tests.waiting import wait_for

CONFIG = EngineConfig(device="cpu", num_gpu_blocks_override=32, max_num_seqs=4, max_model_len=256)
Make = Callable[..., LiveRun]


def ask(prompt: str = "What is a KV cache?", max_tokens: int = 30, **more: Any) -> PlannedRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return PlannedRequest(prompt=prompt, params=params, **more)


def trace_of(lines: list[str]) -> Trace:
    trace = parse_trace(line + "\n" for line in lines)
    assert trace.problem is None
    return trace


def num_steps(run: LiveRun) -> int:
    return len(trace_of(run.log.upto()).steps)


@pytest.fixture
def make() -> Iterator[Make]:
    runs = []

    def make_(*planned: PlannedRequest, config: EngineConfig = CONFIG) -> LiveRun:
        runs.append(LiveRun(engine_plan(config, planned)))
        return runs[-1]

    yield make_
    for run in runs:
        run.close()


@pytest.fixture
def session() -> Iterator[LiveSession]:
    found = LiveSession()
    yield found
    found.close()


def finish(run: LiveRun) -> list[str]:
    run.set_speed(None)
    run.play()
    wait_for(lambda: run.is_done)
    return run.log.upto()


# -- reading


def test_a_long_poll_returns_at_once_when_there_is_something_and_waits_when_there_is_not(session: LiveSession) -> None:
    log = TraceLog(["a"], session.changed)
    session._install(([Timeline("", log)], Status()))
    first = session.news(Seen(), 5.0)
    assert first["lines"] == [["a"]]
    seen = Seen(first["generation"], [1], first["status"])
    began = time.monotonic()
    assert session.news(seen, 0.05)["lines"] == [[]]
    assert time.monotonic() - began >= 0.05
    threading.Timer(0.05, log.append, ["b"]).start()
    began = time.monotonic()
    assert session.news(seen, 10.0)["lines"] == [["b"]]
    assert time.monotonic() - began < 5.0


def test_a_growing_file_is_followed_line_by_line(session: LiveSession, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"event":"header"}\n{"event":"arr')
    session.replay(path)
    assert session.news(Seen())["lines"] == [['{"event":"header"}']]
    with path.open("a") as file:
        file.write('ival"}\n')
    wait_for(lambda: len(session.sides[0].log) == 2)
    assert session.news(Seen(session.generation, [1]))["lines"] == [['{"event":"arrival"}']]


def test_another_trace_written_over_a_file_that_is_followed_begins_anew(session: LiveSession, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"event":"header","time":1}\n{"event":"arrival"}\n')
    session.replay(path)
    before, old = session.generation, session.sides[0]
    with path.open("r+") as file:  # as an engine does that is started with the same name
        file.truncate(0)
        file.write('{"event":"header","time":2}\n{"event":"arrival"}\n{"event":"arrival"}\n')
    wait_for(lambda: session.generation > before)
    assert session.sides[0] is not old and len(old.log) == 2
    wait_for(lambda: len(session.sides[0].log) == 3)
    path.unlink()
    wait_for(lambda: session.status.error)
    assert "No such file" in (session.status.error or "")


def test_a_pipe_is_no_trace(session: LiveSession, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        session.replay(tmp_path / "pipe")


def test_a_file_that_is_not_there_is_refused_in_words(session: LiveSession, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        session.replay(tmp_path / "none.jsonl")


# -- driving


def test_a_run_begins_paused_and_takes_exactly_the_steps_that_it_is_told_to(make: Make) -> None:
    run = make(ask())
    time.sleep(0.05)
    assert num_steps(run) == 0 and not run.is_playing
    for expected in (1, 2, 3):
        run.step()
        wait_for(lambda n=expected: num_steps(run) == n)
    for _ in range(4):  # faster than they can be taken
        run.step()
    wait_for(lambda: num_steps(run) == 7)
    time.sleep(0.05)
    assert num_steps(run) == 7


def test_it_plays_at_its_speed_and_pauses(make: Make) -> None:
    run = make(ask(max_tokens=60))
    run.step()
    wait_for(lambda: num_steps(run) == 1)
    run.set_speed(20)
    run.play()
    time.sleep(0.5)
    run.pause()
    steps = trace_of(run.log.upto()).steps
    gaps = [b["time"] - a["time"] for a, b in pairwise(steps)]
    assert len(gaps) >= 2 and min(gaps) > 0.045
    time.sleep(0.1)
    assert num_steps(run) <= len(steps) + 1


def test_a_prompt_submitted_while_it_runs_is_answered_and_one_that_is_aborted_is_not(make: Make) -> None:
    run = make(ask(max_tokens=200))
    run.set_speed(50)
    run.play()
    run.submit(ask("What is a GPU?", max_tokens=5, name="mine"))
    run.abort("0")
    wait_for(lambda: run.is_done)
    requests = trace_of(run.log.upto()).replay.requests
    assert requests["0"].finish_reason == "abort"
    assert requests["mine"].finish_reason == "length" and requests["mine"].num_output_tokens == 5


def test_planned_requests_come_before_their_step_every_time(make: Make) -> None:
    def arrivals() -> list[tuple[str, int]]:
        trace = trace_of(finish(make(ask(), ask(at_step=7), ask(at_step=500))))
        found, step = [], 0
        for line in trace.lines:
            step += line["event"] == "step"
            if line["event"] == "arrival":
                found.append((line["request_id"], step))
        return found

    first = arrivals()
    assert first[:2] == [("0", 0), ("1", 7)]
    assert first[2][1] < 500, "with nothing left to do nobody waits for a step that never comes"
    assert arrivals() == first


def test_who_is_still_to_come_comes_when_the_last_one_under_way_is_aborted(make: Make) -> None:
    run = make(ask(max_tokens=100), ask("What is a GPU?", 5, at_step=50))
    run.step()
    wait_for(lambda: num_steps(run) == 1)
    run.abort("0")
    assert trace_of(finish(run)).replay.requests["1"].finish_reason == "length"


def test_one_completion_can_be_aborted_alone_in_a_run_and_in_its_fork(make: Make) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=30, ignore_eos=True)
    run = make(PlannedRequest(prompt="What is a GPU?", params=params))
    run.step()
    wait_for(lambda: num_steps(run) == 1)
    fork = LiveRun(fork_plan(run.log.upto(), 0, {}))
    for each in (run, fork):
        each.abort("0#1")
        ends = {n: r.finish_reason for n, r in trace_of(finish(each)).replay.requests.items()}
        assert ends == {"0#0": "length", "0#1": "abort", "0#2": "length"}
    fork.close()


def test_a_chat_message_goes_through_the_template_and_is_answered(make: Make) -> None:
    lines = finish(make(PlannedRequest(prompt="What is a GPU?", params=SamplingParams(temperature=0.0), is_chat=True)))
    (request,) = trace_of(lines).replay.requests.values()
    assert "<|im_start|>" in request.arrival["prompt_text"]
    assert "".join(request.output_text).startswith("A GPU is a processor")


# -- failing


def test_a_step_that_fails_is_kept_in_words_and_the_engine_goes_on(make: Make) -> None:
    run = make(ask(), ask())
    executor = run.inspect(lambda engine: engine.core.executor)
    execute = executor.execute

    def fail(plan: Any) -> Any:
        raise RuntimeError("the device is on fire")

    executor.execute = fail
    run.step()
    wait_for(lambda: run.error)
    assert "the device is on fire" in (run.error or "")
    wait_for(lambda: run.is_done)
    assert not run.is_playing
    executor.execute = execute
    run.submit(ask(max_tokens=3, name="after"))
    assert trace_of(finish(run)).replay.requests["after"].num_output_tokens == 3


def test_an_engine_whose_thread_has_ended_is_an_error_and_not_a_silence(session: LiveSession) -> None:
    session.start(CONFIG, [ask(), ask()], play=False)
    wait_for(lambda: session.sides)
    (run,) = session.runs

    def full(line: str) -> None:
        raise OSError("no space left")

    run._write = full  # type: ignore[method-assign]
    run.inspect(lambda engine: setattr(engine.core.recorder, "_sink", full))
    run.play()
    wait_for(lambda: "no space left" in (session.news(Seen())["now"]["error"] or ""))
    wait_for(lambda: not run.is_playing and run.is_done)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        session.submit(ask())
    session.start_preset(PRESETS[3])
    wait_for(lambda: session.status.preset == PRESETS[3].name)


def test_the_newest_error_is_shown_and_a_prompt_that_is_taken_clears_it(session: LiveSession) -> None:
    session.start(CONFIG, [ask()], play=False)
    wait_for(lambda: session.sides)
    session.runs[0].error = "a step failed"
    assert session.news(Seen())["now"]["error"] == "a step failed"
    session.fork(77, {})
    wait_for(lambda: "no step 77" in (session.news(Seen())["now"]["error"] or ""))
    session.submit(ask())
    assert session.news(Seen())["now"]["error"] is None


def test_what_the_engine_refuses_is_said_and_nothing_else_is_disturbed(make: Make) -> None:
    run = make(ask(max_tokens=5))
    with pytest.raises(ValueError, match="max_model_len"):
        run.submit(ask("What is a token? " * 200))
    assert trace_of(finish(run)).replay.requests["0"].num_output_tokens == 5


def test_settings_that_cannot_be_loaded_are_an_error_on_the_page(session: LiveSession) -> None:
    session.start(EngineConfig(model="/no/such/model", device="cpu"))
    wait_for(lambda: session.status.error)
    assert session.status.loading is None and "/no/such/model" in (session.status.error or "")


# -- forking


@pytest.mark.parametrize("changes", [{"max_num_batched_tokens": 16}, {"block_size": 4}, {"num_gpu_blocks_override": 9}])
def test_a_fork_gives_the_same_greedy_tokens_on_another_timeline(make: Make, changes: dict[str, Any]) -> None:
    run = make(ask(max_tokens=40), ask("What is a GPU?", 50), ask("What is a token? " * 6, 20, at_step=14))
    for step in range(10):
        run.step()
        wait_for(lambda n=step: num_steps(run) == n + 1)
    lines, coming = run.so_far()
    fork = LiveRun(fork_plan(lines, 8, changes, coming))
    try:
        assert num_steps(fork) == 0
        forked = trace_of(finish(fork))
    finally:
        fork.close()
    original = trace_of(finish(run))
    assert forked.steps[0]["step"] == 9
    tokens = {name: request.output_ids for name, request in original.replay.requests.items()}
    assert {name: request.output_ids for name, request in forked.replay.requests.items()} == tokens
    timelines = [[(s["scheduled"], s["block_events"]) for s in steps] for steps in (forked.steps, original.steps[9:])]
    assert timelines[0] != timelines[1]


def test_requests_that_came_after_the_step_come_to_the_fork_too(make: Make) -> None:
    run = make(ask(max_tokens=20), ask("What is a GPU?", 10, at_step=6))
    lines = finish(run)
    plan = fork_plan(lines, 3, {})
    fork = LiveRun(plan)
    forked = trace_of(finish(fork))
    fork.close()
    assert [request.at_step for request in plan.requests] == [6]
    original = trace_of(lines)
    assert [s["scheduled"] for s in forked.steps] == [s["scheduled"] for s in original.steps[4:]]


def test_the_session_shows_a_fork_beside_its_original_and_tells_every_tab(session: LiveSession) -> None:
    session.start(CONFIG, [ask(max_tokens=25), ask("What is a GPU?", 25)], play=False)
    wait_for(lambda: session.sides)
    before = session.generation
    for step in range(5):
        session.step()
        wait_for(lambda n=step: num_steps(session.runs[0]) == n + 1)
    session.fork(2, {"block_size": 8})
    wait_for(lambda: len(session.sides) == 2)
    assert session.generation == before + 1
    session.set_speed(None)
    session.play()
    wait_for(lambda: all(run.is_done for run in session.runs))
    tabs = [session.news(Seen()) for _ in range(2)]
    assert tabs[0] == tabs[1] and len(tabs[0]["lines"]) == 2
    headers = [json.loads(lines[0]) for lines in tabs[0]["lines"]]
    assert [header["config"]["block_size"] for header in headers] == [16, 8]
    left, right = session.compare()
    assert left and right and left.steps == right.steps and left.finished == right.finished == 2
    assert left.waste and right.waste and right.waste < left.waste
    session.drop_fork()
    assert len(session.sides) == 1 and session.generation == before + 2


def test_a_prompt_goes_to_both_sides_or_to_none(session: LiveSession) -> None:
    session.start(CONFIG, [ask(max_tokens=60)], play=False)
    wait_for(lambda: session.sides)
    session.step()
    wait_for(lambda: num_steps(session.runs[0]) == 1)
    session.fork(0, {"num_gpu_blocks_override": 6})
    wait_for(lambda: len(session.sides) == 2)
    with pytest.raises(ValueError, match=r"fork at step 0.*blocks"):
        session.submit(ask("What is a token? " * 8, 100))
    session.submit(ask("What is a GPU?", 5))
    left, right = (trace_of(finish(run)).replay.requests for run in session.runs)
    assert {name: request.finish_reason for name, request in left.items()} == {
        **{"0": "length", "mine-1": "abort", "mine-2": "length"}
    }
    assert list(right) == ["0", "mine-2"] and right["mine-2"].output_ids == left["mine-2"].output_ids


def test_the_fork_of_a_file_loads_no_code_that_the_file_names(tmp_path: Path, session: LiveSession, make: Make) -> None:
    lines = finish(make(ask(max_tokens=5)))
    header = json.loads(lines[0])
    header["config"] |= {"trust_remote_code": True, "load_format": "pt"}
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    session.replay(path)
    session.fork(2, {})
    wait_for(lambda: len(session.sides) == 2)
    config = json.loads(session.sides[1].log.upto()[0])["config"]
    assert config["trust_remote_code"] is False and config["load_format"] == "auto"


def test_a_later_requests_salt_and_name_stay_its_own_in_a_fork(make: Make) -> None:
    prompt = "What is a KV cache, and what is it good for? Say it in short sentences."
    salted = [ask(prompt, 5, at_step=i * 8, cache_salt=salt, name=f"mine-{i}") for i, salt in enumerate("aba")]
    run = make(*salted)
    lines = finish(run)
    fork = LiveRun(fork_plan(lines, 2, {}))
    assert fork.knows("mine-2")
    found = [trace_of(each).replay.requests for each in (lines, finish(fork))]
    fork.close()
    cached = [{name: request.num_cached_tokens for name, request in requests.items()} for requests in found]
    assert cached[0]["mine-1"] == 0 and (cached[0]["mine-2"] or 0) > 0
    assert cached[1]["mine-1"] == 0


# -- replacing


def test_of_many_quick_orders_the_newest_is_shown_and_the_others_leave_nothing_behind(session: LiveSession) -> None:
    threads = threading.active_count()
    for chosen in (*PRESETS, *PRESETS[::-1], preset("prefix")):
        session.start_preset(chosen, play=False)
    wait_for(lambda: session.status.preset == "prefix" and not session.status.loading)
    wait_for(lambda: threading.active_count() <= threads + 1)


def test_a_preset_of_which_one_side_cannot_be_loaded_closes_the_other(session: LiveSession) -> None:
    threads = threading.active_count()
    variants = (Variant("good"), Variant("bad", {"model": "/no/such/model"}))
    session.start_preset(Preset(name="x", title="x", look_at="x", requests=(), variants=variants))
    wait_for(lambda: session.status.error)
    assert "/no/such/model" in (session.status.error or "") and not session.sides
    assert threading.active_count() <= threads


def test_pause_and_speed_count_for_what_is_being_loaded(session: LiveSession) -> None:
    session.start_preset(preset("prefix"))
    session.pause()
    session.set_speed(3)
    wait_for(lambda: session.sides)
    assert not session.runs[0].is_playing and session.news(Seen())["now"]["speed"] == 3
    with pytest.raises(ValueError, match=r"choose 0\.1 to 1000"):
        session.set_speed(1e-11)


def test_a_tab_of_another_generation_orders_nothing_about_what_it_does_not_see(session: LiveSession) -> None:
    drive = server_functions(session)[-1]
    session.start(CONFIG, [ask()], play=False)
    wait_for(lambda: session.sides)
    for order in ({"action": "abort", "side": 0, "value": "0"}, {"action": "fork", "step": 0}, {"action": "drop"}):
        assert "moved on" in drive(order | {"generation": session.generation - 1})["error"]
    assert session.runs[0].inspect(lambda engine: engine.unfinished_ids) == ["0"]
    assert drive({"action": "abort", "side": 0, "value": "0", "generation": session.generation}) == {}
    assert session.runs[0].inspect(lambda engine: engine.unfinished_ids) == []


# -- forms


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"action": "submit", "form": {"prompt": " "}}, "the prompt is empty"),
        ({"action": "submit", "form": {"prompt": "\ud800"}}, "half a character"),
        ({"action": "submit", "form": {"prompt": "a", "n": 20_000}}, "n: choose a whole number from 1 to 8"),
        ({"action": "submit", "form": {"prompt": "a", "max_tokens": 0}}, "max tokens: choose a whole number from 1"),
        ({"action": "submit", "form": {"prompt": "a", "max_tokens": 2.9}}, "max tokens: choose a whole number"),
        ({"action": "submit", "form": {"prompt": "a", "temperature": float("inf")}}, "temperature: choose a number"),
        ({"action": "submit", "form": {"prompt": "a", "top_p": 0}}, "top_p"),
        ({"action": "submit", "form": {"prompt": "a", "priority": [1]}}, "priority: choose a whole number"),
        ({"action": "fork", "step": None, "form": {}}, "no step to fork at"),
        ({"action": "fork", "step": 0, "form": {"model": "x"}}, "a fork cannot change model"),
        ({"action": "fork", "step": 0, "form": {"scheduling_policy": "x"}}, "choose one of fcfs, priority, static"),
        ({"action": "fork", "step": 0, "form": {"enable_chunked_prefill": "on"}}, "on or off"),
        ({"action": "drop"}, "no fork to close"),
        ({"action": "speed", "value": "fast"}, "fast"),
        ({"action": "speed", "value": -1}, "choose 0.1 to 1000"),
        ({"action": "what_if", "form": {"requests": None, "blocks": 10**9}}, "blocks: choose a whole number"),
        ({"action": "what_if", "form": {"rate": 1e-308}}, "rate: choose a number from 0.001"),
        ({"action": "dance"}, "no order 'dance'"),
        ({}, "no order None"),
    ],
    ids=str,
)
def test_whatever_a_form_holds_the_answer_is_one_line(session: LiveSession, order: Any, words: str) -> None:
    drive = server_functions(session)[-1]
    answer = drive({"generation": session.generation} | order)
    assert words in answer["error"] and "\n" not in answer["error"]


def test_fields_that_are_left_empty_have_their_defaults() -> None:
    request = request_of({"prompt": "a", "max_tokens": None, "temperature": "", "chat": True})
    assert request.is_chat and request.params == SamplingParams(max_tokens=64, temperature=0.0)
    assert changes_of({"block_size": None, "max_num_seqs": 3, "scheduling_policy": ""}) == {"max_num_seqs": 3}
    assert what_if_of({"requests": "", "rate": None, "block_size": 8}) == WhatIf(rate=None, block_size=8)


@pytest.mark.parametrize(
    ("host", "headers", "may"),
    [
        ("127.0.0.1", {"host": "127.0.0.1:7860"}, True),
        ("127.0.0.1", {"host": "localhost:7860", "origin": "http://localhost:7860"}, True),
        ("127.0.0.1", {"host": "127.0.0.1:7860", "origin": "https://evil.example"}, False),
        ("127.0.0.1", {"host": "127.0.0.1:7860", "origin": "null"}, False),
        ("127.0.0.1", {"host": "evil.example:7860"}, False),
        ("127.0.0.1", {"host": "evil.example:7860", "origin": "http://evil.example:7860"}, False),
        ("127.0.0.1", {}, False),
        ("0.0.0.0", {"host": "my-machine:7860", "origin": "http://my-machine:7860"}, True),
        ("0.0.0.0", {"host": "my-machine:7860", "origin": "http://evil.example"}, False),
    ],
)
def test_nobody_but_the_page_itself_talks_to_the_server(host: str, headers: dict[str, str], may: bool) -> None:
    entered, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        entered.append(scope)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    coroutine = Guard(app, host)(scope, None, send)
    with pytest.raises(StopIteration):
        coroutine.send(None)  # it waits for nothing
    assert bool(entered) is may and [m.get("status") for m in sent] == ([] if may else [403, None])


def test_replicas_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="data_parallel_size=2: the page steps one engine: set it to 1"):
        engine_plan(EngineConfig(data_parallel_size=2)).make_engine(print)


def test_a_fork_that_is_refused_says_so_and_leaves_the_original(session: LiveSession) -> None:
    session.start(CONFIG, [ask()], play=False)
    wait_for(lambda: session.sides)
    session.step()
    wait_for(lambda: num_steps(session.runs[0]) == 1)
    session.fork(0, {"max_num_batched_tokens": 1, "max_num_seqs": 8})
    wait_for(lambda: session.status.error)
    assert "max_num_seqs" in (session.status.error or "") and len(session.sides) == 1
    session.step()
    wait_for(lambda: num_steps(session.runs[0]) == 2)


# -- presets


@pytest.fixture(scope="module")
def traces() -> dict[str, list[Trace]]:
    """Of every preset to its end, a trace for each variant."""

    def run(chosen: Preset, variant: Variant) -> Trace:
        live = LiveRun(engine_plan(chosen.config(variant), chosen.requests))
        lines = finish(live)
        live.close()
        assert live.error is None
        return trace_of(lines)

    return {chosen.name: [run(chosen, variant) for variant in chosen.variants] for chosen in PRESETS}


def reasons(trace: Trace) -> set[str]:
    return {reason for step in trace.steps for reason, _ in step["waiting"].values()}


def test_every_preset_runs_to_its_end_and_is_small(traces: dict[str, list[Trace]]) -> None:
    for chosen in PRESETS:
        assert preset(chosen.name) is chosen and len(chosen.look_at) < 260
        for trace in traces[chosen.name]:
            requests = trace.replay.requests.values()
            assert 5 <= len(requests) <= 12 and all(r.finish_reason in ("stop", "length") for r in requests)
            assert 40 <= len(trace.steps) <= 150


def test_every_preset_is_explained_and_pictured_in_light_and_dark() -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "visualizer.md").read_text()
    for name, words in [("fork", "")] + [(p.name, f"### {p.title}\n\n{p.look_at}\n") for p in PRESETS]:
        assert words in text
        for picture in (f"viz/{name}-light.png", f"viz/{name}-dark.png"):
            assert picture in text and (docs / picture).stat().st_size > 20_000


def test_two_variants_of_a_preset_give_the_same_answers(traces: dict[str, list[Trace]]) -> None:
    for both in traces.values():
        answers = [{n: r.output_ids for n, r in trace.replay.requests.items()} for trace in both]
        assert all(each == answers[0] for each in answers)


def test_contiguous_waits_for_blocks_where_paged_runs_all_at_once(traces: dict[str, list[Trace]]) -> None:
    contiguous, paged = traces["paged"]
    assert "no_free_blocks" in reasons(contiguous) and not reasons(paged)
    slots = [trace.header["num_blocks"] * trace.header["config"]["block_size"] for trace in (contiguous, paged)]
    assert slots[0] == slots[1]
    assert len(paged.steps) < len(contiguous.steps) / 2


def test_a_static_batch_keeps_others_waiting_and_takes_longer(traces: dict[str, list[Trace]]) -> None:
    static, continuous = traces["batching"]
    assert "static_batch" in reasons(static) and "static_batch" not in reasons(continuous)
    assert len(continuous.steps) < len(static.steps)


def test_chunks_let_the_others_go_on_beside_a_long_prompt(traces: dict[str, list[Trace]]) -> None:
    whole, chunked = (max(s["num_tokens"] for step in t.steps for s in step["scheduled"]) for t in traces["chunked"])
    assert whole > 300 and chunked <= 64
    mixed = [step for step in traces["chunked"][1].steps if {"prefill", "decode"} <= phases(step)]
    assert len(mixed) >= 5


def phases(step: dict[str, Any]) -> set[str]:
    return {share["phase"] for share in step["scheduled"]}


def test_a_shared_system_prompt_is_computed_once(traces: dict[str, list[Trace]]) -> None:
    requests = list(traces["prefix"][0].replay.requests.values())
    assert requests[0].num_cached_tokens == 0
    assert all((request.num_cached_tokens or 0) >= 48 for request in requests[1:])


def test_a_pool_that_is_too_small_preempts(traces: dict[str, list[Trace]]) -> None:
    assert sum(len(step["preempted"]) for step in traces["preemption"][0].steps) >= 2
    assert {"preempted", "no_free_blocks"} & reasons(traces["preemption"][0])


def test_those_of_high_priority_go_before_all_who_came_earlier_and_wait(traces: dict[str, list[Trace]]) -> None:
    requests = traces["priorities"][0].replay.requests
    urgent = [r.token_times[0] for r in requests.values() if r.arrival["priority"] == 0]
    first_tokens = sorted(r.token_times[0] for r in requests.values() if r.arrival["priority"] == 5)
    assert max(urgent) < first_tokens[-1]


def test_completions_of_one_prompt_share_its_blocks_and_differ(traces: dict[str, list[Trace]]) -> None:
    trace = traces["parallel"][0]
    children = [r for r in trace.replay.requests.values() if r.arrival.get("group") == "0"]
    assert len(children) == 4 and len({tuple(child.output_ids) for child in children}) > 1
    shared = max(max(len(block.users) for block in trace.state_after(n).blocks) for n in range(5, 12))
    assert shared == 4


def test_stages_wait_for_each_other_until_there_are_requests_for_both(traces: dict[str, list[Trace]]) -> None:
    (trace,) = traces["pipeline"]
    pairs = list(pairwise(trace.steps))
    overlap = [one["ranks"][1]["end"] > next_one["ranks"][0]["begin"] for one, next_one in pairs]
    assert not any(overlap[:11])
    assert sum(overlap[12:40]) > 14


# -- what if, and figures


def test_what_if_simulates_what_the_form_says_and_refuses_what_would_take_too_long() -> None:
    result = run_what_if(WhatIf(requests=20, shared=64, blocks=64))
    trace = trace_of(result.lines)
    assert len(trace.replay.requests) == 20 and trace.header["num_blocks"] == 64
    assert result.figures.prefix_hit_rate > 0
    with pytest.raises(ValueError, match="fewer requests, or shorter"):
        run_what_if(WhatIf(requests=500, output_max=5000))


def test_the_dearest_what_if_that_is_allowed_is_over_soon() -> None:
    began = time.monotonic()
    run_what_if(WhatIf(requests=250, output_max=120, prompt_max=2000, seqs=256, blocks=30_000, rate=None))
    assert time.monotonic() - began < 12  # three seconds on a quiet machine


def test_a_fork_is_compared_from_where_it_begins() -> None:
    lines = run_what_if(WhatIf(requests=10, rate=None, seqs=4)).lines
    whole, late = Tally(TraceLog(lines)).side(), Tally(TraceLog(lines), since=30).side()
    assert whole and late and whole.steps == late.steps and late.most_tokens < whole.most_tokens
    assert whole.ttft_steps and whole.ttft_steps >= 1
    assert Tally(TraceLog(lines[:1])).side() is None


def test_the_form_offers_the_shapes_that_the_simulator_knows() -> None:
    from teachllm.simulator.shapes import SHAPES

    assert set(SHAPE_NAMES) == {"teachlm", *SHAPES}


def test_a_recorded_trace_can_be_forked_and_goes_on(session: LiveSession, make: Make, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(line + "\n" for line in finish(make(ask(), ask("What is a GPU?")))))
    session.replay(path)
    session.fork(4, {"max_num_seqs": 1})
    wait_for(lambda: len(session.sides) == 2)
    session.set_speed(None)
    session.play()
    wait_for(lambda: session.runs[0].is_done)
    left, right = session.compare()
    assert left and right and left.finished == right.finished == 2 and right.steps > left.steps


def test_without_gradio_one_line_says_what_installs_it(session: LiveSession, monkeypatch: pytest.MonkeyPatch) -> None:
    from teachllm_webui.page import build

    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ImportError, match=r"pip install 'teachllm\[ui\]'"):
        build(session)


def test_loading_the_page_leaves_torch_to_the_thread_that_loads_the_engine() -> None:
    code = "import sys, teachllm_webui.page, teachllm_webui.session; print('torch' in sys.modules)"
    env = environment_with()
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "False", result.stderr
