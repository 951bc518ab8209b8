"""An engine under way, without a page: it can be driven and forked, and it fails in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from teachllm.engine.async_llm import AsyncLLM
from teachllm.engine.engine_core import EngineCore
from teachllm.sampling_params import SamplingParams
from teachllm_webui.live import LiveRun
from teachllm_webui.plan import PlannedRequest, fork_plan
from tests.thorough import THOROUGH
from tests.waiting import wait_for
from tests.webui.runs import ask, finish, num_steps, step, trace_of

Make = Callable[..., LiveRun]

# -- driving


def test_a_run_begins_paused_and_takes_exactly_the_steps_that_it_is_told_to(make: Make) -> None:
    run = make(ask())
    assert settled(run) == 0 and not run.is_playing
    step(run, 3)
    for _ in range(4):  # faster than they can be taken
        run.step()
    wait_for(lambda: num_steps(run) == 7)
    assert settled(run) == 7


def test_a_step_at_the_end_changes_nothing_and_a_later_prompt_begins_at_once(make: Make) -> None:
    run = make(ask(max_tokens=3))
    finish(run)
    before = num_steps(run)
    run.step()
    assert run.is_playing and settled(run) == before
    run.submit(ask("What is a GPU?", max_tokens=3, name="later"))
    wait_for(lambda: num_steps(run) > before and run.is_done)


def test_an_engine_alone_waits_for_no_step_before_the_next_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline's plans would never overlap."""
    waits: list[int] = []
    monkeypatch.setattr(EngineCore, "wait_for_pending", lambda self: waits.append(1))
    run = make(ask(max_tokens=40))
    finish(run)
    assert num_steps(run) >= 40 and len(waits) < 10


def settled(run: LiveRun) -> int:
    """Return the number of steps after the engine's thread has twice found nothing else to do."""
    for _ in range(2):
        run.inspect(lambda engine: None)
    return num_steps(run)


def test_it_plays_until_it_is_paused_at_the_pace_of_its_speed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    paces: list[float] = []
    set_pace = AsyncLLM.set_pace
    monkeypatch.setattr(AsyncLLM, "set_pace", lambda self, pace: (paces.append(pace), set_pace(self, pace)))
    run = make(ask(max_tokens=200))
    run.set_speed(20)
    run.play()
    wait_for(lambda: num_steps(run) >= 2)
    run.pause()
    assert not run.is_playing
    assert settled(run) == settled(run)
    run.set_speed(None)
    assert paces == [0.05, 0.0]


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
        trace = trace_of(finish(make(ask(max_tokens=12), ask(max_tokens=4, at_step=7), ask(max_tokens=2, at_step=500))))
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
    step(run)
    run.abort("0")
    assert trace_of(finish(run)).replay.requests["1"].finish_reason == "length"


def test_one_completion_can_be_aborted_alone_in_a_run_and_in_its_fork(make: Make) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True)
    run = make(PlannedRequest(prompt="What is a GPU?", params=params))
    step(run)
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


def test_what_the_engine_refuses_is_said_and_nothing_else_is_disturbed(make: Make) -> None:
    run = make(ask(max_tokens=5))
    with pytest.raises(ValueError, match="max_model_len"):
        run.submit(ask("What is a token? " * 200))
    assert trace_of(finish(run)).replay.requests["0"].num_output_tokens == 5


# -- forking


FORKS = [{"max_num_batched_tokens": 16, "num_gpu_blocks_override": 9}]
FORKS += [{"max_num_batched_tokens": 16}, {"block_size": 4}, {"num_gpu_blocks_override": 7}] if THOROUGH else []


@pytest.mark.parametrize("changes", FORKS)
def test_a_fork_gives_the_same_greedy_tokens_on_another_timeline(make: Make, changes: dict[str, Any]) -> None:
    run = make(ask(max_tokens=24), ask("What is a GPU?", 30), ask("What is a token? " * 6, 10, at_step=14))
    step(run, 10)
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
