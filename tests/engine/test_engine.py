"""Engine: ids and aborts, who goes first and who shares, and that no token depends on how it was scheduled."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from teachllm import RequestOutput, SamplingParams
from teachllm.core.request import FinishReason, RequestStatus
from teachllm.engine.llm_engine import Engine
from teachllm.trace.recorder import Recorder
from teachllm.worker.executor import Executor
from tests.checkpoints import VOCAB_SIZE
from tests.engine.reference import reference
from tests.engine.withheld import withheld
from tests.pairwise import pairwise
from tests.request_kinds import MIXTURES
from tests.thorough import THOROUGH, times
from tests.worker.engines import (
    DraftingExecutor,
    assert_clean,
    complete,
    drain,
    make_engine,
    random_ids,
    tokens,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12)


# -- ids, aborts and states --------------------------------------------------------------------------------


ABORTS = pairwise(num_steps=range(7) if THOROUGH else [0, 1, 2, 4], n=[1, 3], ahead=[False, True])


@pytest.mark.parametrize("case", ABORTS, ids=repr)
def test_an_abort_in_any_state_frees_everything_and_leaves_the_others_right(case: dict[str, Any]) -> None:
    """Waiting (0 steps), in the middle of a prompt of 40 tokens (1, 2), running, and with a plan in flight."""
    engine = make_engine(max_num_batched_tokens=24, async_scheduling=case["ahead"])
    other = engine.add_request("other", random_ids(9, seed=1), GREEDY)
    aborted = engine.add_request("a", random_ids(40), SamplingParams(n=case["n"], temperature=1.0, max_tokens=50))
    for _ in range(case["num_steps"]):
        engine.step()
    engine.abort_request("a")
    lengths = [len(ids) for ids in tokens(aborted)]
    assert aborted.finished and {c.finish_reason for c in aborted.outputs} == {"abort"}
    late = [output.request_id for _ in range(3) for output in engine.step()]
    assert "a" not in late and [len(ids) for ids in tokens(aborted)] == lengths
    engine.abort_request("a")
    engine.abort_request("never heard of")
    assert_clean(engine)
    reference("qwen3").judge_outputs([other])
    assert len(tokens(other)[0]) == 12


def test_a_preempted_request_can_be_aborted() -> None:
    engine, params = make_engine(num_gpu_blocks_override=6), replace(GREEDY, max_tokens=40)
    outputs = [engine.add_request(name, random_ids(30, seed=i), params) for i, name in enumerate("ab")]
    while engine.core.scheduler.num_preemptions == 0:
        engine.step()
    assert engine.core.scheduler.requests["b"].status is RequestStatus.PREEMPTED
    length = len(tokens(outputs[1])[0])
    engine.abort_request("b")
    assert_clean(engine)
    assert len(tokens(outputs[0])[0]) == 40 and len(tokens(outputs[1])[0]) == length > 0
    reference("qwen3").judge_outputs(outputs)


def test_an_abort_ends_only_those_completions_that_still_run() -> None:
    engine, params = make_engine(), SamplingParams(n=3, temperature=1.0, max_tokens=10, seed=4)
    stop = tokens(complete(engine, random_ids(8), params))[1][4]
    output = engine.add_request("a", random_ids(8), replace(params, stop_token_ids=[stop]))
    while not any(completion.finished for completion in output.outputs):
        engine.step()
    engine.abort_request("a")
    assert {completion.finish_reason for completion in output.outputs} == {"stop", "abort"}
    assert_clean(engine)


def test_an_id_in_use_is_refused_in_one_line_and_free_again_afterwards() -> None:
    engine = make_engine()
    first = engine.add_request("a", random_ids(9), GREEDY)
    engine.step()
    with pytest.raises(ValueError, match=r"^request id 'a' is already in use$"):
        engine.add_request("a", random_ids(5), GREEDY)
    drain(engine)
    again = complete_as(engine, "a", random_ids(5))
    assert first is not again and [len(tokens(output)[0]) for output in (first, again)] == [12, 12]
    reference("qwen3").judge_outputs([first, again])


def complete_as(engine: Engine, name: str, prompt: list[int]) -> RequestOutput:
    output = engine.add_request(name, prompt, GREEDY)
    drain(engine)
    return output


def test_an_id_can_be_used_again_while_its_last_plan_is_in_flight() -> None:
    engine = make_engine(async_scheduling=True)
    first = engine.add_request("a", random_ids(9), GREEDY)
    while not first.finished:
        engine.step()
    second = engine.add_request("a", random_ids(20, seed=1), GREEDY)
    engine.step()
    engine.abort_request("a")
    third = complete_as(engine, "a", random_ids(25, seed=2))
    assert second.outputs[0].finish_reason == "abort"
    reference("qwen3").judge_outputs([first, third])
    assert_clean(engine)


def test_ids_that_look_like_those_of_completions_do_not_mix_with_them() -> None:
    for child in ("a#0", "a#1"):
        engine = make_engine()
        single = engine.add_request(child, random_ids(9), GREEDY)
        with pytest.raises(ValueError, match=f"request id '{child}' is already in use"):
            engine.add_request("a", random_ids(9), SamplingParams(n=2))
        drain(engine)
        assert len(tokens(single)[0]) == 12
    engine = make_engine()
    both = engine.add_request("a", random_ids(9), replace(GREEDY, n=2))
    with pytest.raises(ValueError, match="request id 'a#1' is already in use"):
        engine.add_request("a#1", random_ids(9), GREEDY)
    drain(engine)
    assert [len(ids) for ids in tokens(both)] == [12, 12]
    assert_clean(engine)


def test_step_gives_back_the_object_that_add_request_gave() -> None:
    engine = make_engine()
    outputs = {name: engine.add_request(name, random_ids(9), GREEDY) for name in "ab"}
    while engine.has_unfinished_requests:
        assert all(output is outputs[output.request_id] for output in engine.step())
    assert engine.step() == []


# -- constraints -------------------------------------------------------------------------------------------


def test_only_allowed_ids_are_sampled() -> None:
    engine, allowed = make_engine(), [3, 77, 200, 511]
    for temperature in (0.0, 2.0):
        params = SamplingParams(temperature=temperature, allowed_token_ids=allowed, max_tokens=12, seed=1)
        [ids] = tokens(complete(engine, random_ids(9), params))
        assert len(ids) == 12 and set(ids) <= set(allowed) and len(set(ids)) > 1


def test_a_bias_forces_or_forbids_a_token() -> None:
    engine = make_engine()
    [plain] = tokens(complete(engine, random_ids(9), GREEDY))
    [forced] = tokens(complete(engine, random_ids(9), replace(GREEDY, logit_bias={7: 100.0})))
    assert forced == [7] * 12
    [without] = tokens(complete(engine, random_ids(9), replace(GREEDY, logit_bias={plain[0]: -100.0})))
    assert plain[0] not in without


# -- who goes first, and who shares ------------------------------------------------------------------------


def test_the_lower_priority_goes_first() -> None:
    engine = make_engine(scheduling_policy="priority", max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 1), ("c", 3), ("d", 1)):
        engine.add_request(name, random_ids(9), GREEDY, priority=priority)
    finished = []
    while engine.has_unfinished_requests:
        finished += [output.request_id for output in engine.step() if output.finished]
    assert finished == ["b", "d", "c", "a"]


def test_a_cache_salt_shares_only_with_itself() -> None:
    engine, prompt = make_engine(), random_ids(40)
    salts = [None, "x", "y", "x", "", None]
    params = replace(GREEDY, max_tokens=2)
    hits = [complete(engine, prompt, params, cache_salt=salt).num_cached_tokens for salt in salts]
    assert hits == [0, 0, 0, 32, 0, 32]


# -- nothing but the tokens' arrival depends on how they were scheduled ------------------------------------


def workload() -> list[tuple[list[int], SamplingParams]]:
    """Random sampling of every kind, each with its own seed."""
    rng, made = random.Random(3), []
    common = random_ids(30, seed=9)
    for i, kind in enumerate(MIXTURES * times(1, 2)):
        prompt = common[: rng.choice([0, 17, 30])] + random_ids(rng.randint(1, 25), seed=i)
        made.append((prompt, SamplingParams(**{"seed": i, "max_tokens": rng.randint(4, 26)} | kind)))
    return made


WORKLOAD = workload()


def run_workload(engine: Engine) -> list[list[list[int]]]:
    """All requests, arriving over the first steps."""
    outputs = []
    for i, (prompt, params) in enumerate(WORKLOAD):
        outputs.append(engine.add_request(str(i), prompt, params, priority=i % 3))
        if i % 3 == 2:
            engine.step()
    drain(engine)
    assert all(output.finished for output in outputs)
    assert_clean(engine)
    return [tokens(output) for output in outputs]


@pytest.fixture(scope="module")
def plain() -> list[list[list[int]]]:
    """The workload one request at a time."""
    engine = make_engine(max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=96)
    made = run_workload(engine)
    assert engine.core.scheduler.num_preemptions == 0
    assert len({str(ids) for ids in made}) == len(made)
    return made


@settings(max_examples=times(2, 60))
@given(
    configuration=st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([1, 5, 16, 96]),
            "max_num_batched_tokens": st.sampled_from([8, 30, 200]),
            "max_num_seqs": st.sampled_from([2, 8]),
            "async_scheduling": st.booleans(),
            "enable_prefix_caching": st.booleans(),
            "scheduling_policy": st.sampled_from(["fcfs", "priority", "static"]),
            "spare": st.sampled_from([0, 3, 400]),
        }
    ),
    depth=st.integers(1, 3),
    drafts_from=st.sampled_from([None, 0, 0, 1, 2]),
    seed=st.integers(0, 3),
)
def test_random_sampling_with_seeds_gives_the_same_tokens_however_it_is_scheduled(
    plain: list[list[list[int]]], configuration: dict[str, Any], depth: int, drafts_from: int | None, seed: int
) -> None:
    """Penalties, preemption, running ahead, one to three plans in flight, drafts right, wrong and out of place."""
    assume(not (configuration["block_size"] == 96 and configuration["enable_prefix_caching"]))
    rng = random.Random(seed)

    def guess(request_id: str, num_outputs: int) -> list[int]:
        if drafts_from is None:
            return []
        right = continuation(plain, request_id, num_outputs + drafts_from)[: rng.randint(0, 4)]
        return [token_id if rng.random() < 0.8 else rng.randrange(VOCAB_SIZE) for token_id in right]

    blocks = -(-96 // configuration["block_size"]) + configuration.pop("spare")
    engine = make_engine(make_executor=withheld(depth, guess), num_gpu_blocks_override=blocks, **configuration)
    assert run_workload(engine) == plain


def continuation(plain: list[list[list[int]]], request_id: str, num_outputs: int) -> list[int]:
    """What a request of the workload will sample after its first output tokens."""
    name, _, child = request_id.partition("#")
    return plain[int(name)][int(child or 0)][num_outputs:]


@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_are_accepted_if_they_are_what_would_be_sampled(plain: list[list[list[int]]], ahead: bool) -> None:
    """Running ahead, drafts with ids come too late for the plan that is under way, and are left out."""
    drafters: list[DraftingExecutor] = []

    def make(_: Any, inner: Executor) -> Executor:
        drafters.append(DraftingExecutor(inner, lambda name, count: continuation(plain, name, count)[:3]))
        return drafters[0]

    assert run_workload(make_engine(make_executor=make, async_scheduling=ahead)) == plain
    assert drafters[0].num_rejected == 0
    assert drafters[0].num_accepted == 0 if ahead else drafters[0].num_accepted > 30


# -- trace -------------------------------------------------------------------------------------------------


def traced(text: bool, **changes: Any) -> tuple[list[dict[str, Any]], list[list[list[int]]]]:
    lines: list[str] = []
    clock = itertools.count(1e12)
    spell = (lambda ids, request=None: ["x"] * len(ids)) if text else None
    recorder = Recorder(lines.append, lambda: next(clock), spell)
    engine = make_engine(recorder=recorder, num_gpu_blocks_override=14, max_num_batched_tokens=32, **changes)
    made = run_workload(engine)
    return [json.loads(line) for line in lines], made


@pytest.mark.parametrize("ahead", [True, False] if THOROUGH else [True])
def test_recording_changes_nothing_and_tells_all(plain: list[list[list[int]]], ahead: bool) -> None:
    events, made = traced(text=True, async_scheduling=ahead)
    assert made == plain
    header, *rest = events
    assert (header["event"], header["num_blocks"]) == ("header", 14)
    assert header["config"]["max_num_batched_tokens"] == 32 and header["model"]["architecture"] == "Qwen3ForCausalLM"
    assert Counter(event["event"] for event in rest)["arrival"] == sum(params.n for _, params in WORKLOAD)
    arrivals = {event["request_id"]: event for event in rest if event["event"] == "arrival"}
    assert arrivals["0"]["prompt_token_ids"] == WORKLOAD[0][0]

    sampled: dict[str, list[int]] = {name: [] for name in arrivals}
    used: Counter[int] = Counter()
    steps = [event for event in rest if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(len(steps)))
    for event in steps:
        for scheduled in event["scheduled"]:
            sampled[scheduled["request_id"]] += scheduled.get("token_ids", [])
        for kind, block_id, *_ in event["block_events"]:
            used[block_id] += {"allocate": 1, "hit": 1, "free": -1}.get(kind, 0)
        assert event["blocks"]["used"] == sum(count > 0 for count in used.values())
        assert sum(event["blocks"].values()) == 14
    assert any(event["preempted"] for event in steps)
    children = [ids for output in plain for ids in output]
    assert list(sampled.values()) == children


def test_all_times_of_a_trace_are_on_the_recorders_clock_and_without_text_it_has_no_ids() -> None:
    events, _ = traced(text=False)
    assert not any("prompt_token_ids" in event or "token_ids" in str(event.get("scheduled")) for event in events)
    times = [event["time"] for event in events]
    assert all(1e12 <= time < 1e12 + 1e6 for time in times)
    steps = [event["time"] for event in events if event["event"] == "step"]
    assert steps == sorted(steps)
    assert all(event[part] > 0 for event in events if event["event"] == "step" for part in ("schedule", "execute"))


def test_an_abort_is_recorded_once_for_each_completion_that_ran() -> None:
    lines: list[str] = []
    engine = make_engine(recorder=Recorder(lines.append, lambda: 0.0))
    engine.add_request("a", random_ids(5), SamplingParams(n=2))
    engine.step()
    for _ in range(2):
        engine.abort_request("a")
    engine.abort_request("b")
    assert not engine.core.finish("b", FinishReason.ABORT)
    aborted = [json.loads(line)["request_id"] for line in lines if '"abort"' in line]
    assert aborted == ["a#0", "a#1"]
