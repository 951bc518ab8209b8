"""A fork goes on from any step with other settings, and says the same tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from teachllm import EngineConfig, SamplingParams
from teachllm.engine.fork import fork, fork_config
from teachllm.engine.llm_engine import Engine
from teachllm.trace.figures import figures
from teachllm.trace.reader import Trace, parse_trace
from teachllm.trace.recorder import Recorder
from teachllm.trace.replay import Replay
from tests.spec_decode.drafters import speculation
from tests.thorough import THOROUGH, times
from tests.trace.traced import live_state, spell, traced_engine
from tests.worker.engines import drain, random_ids

NUM_REQUESTS, STEP = times(10, 14), times(18, 50)
FEW = times(6, 14)  # requests where a step takes long
SMALL = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 32, "max_num_seqs": 6}


def add_requests(engine: Engine, num_requests: int = NUM_REQUESTS) -> None:
    """Some end before that step, some run then, in their prompts or behind them, some wait, two share a prompt."""
    prefix = random_ids(40, seed=99)
    for i in range(num_requests):
        prompt = prefix + random_ids(1 + i, seed=i) if i % 2 else random_ids(5 + 4 * i, seed=i)
        bias = {7: 3.0} if i == 6 else None
        params = SamplingParams(
            temperature=0.0,
            max_tokens=times(10, 20) + i,
            n=2 if i == 9 else 1,
            ignore_eos=True,
            logit_bias=bias,
            min_tokens=3,
        )
        engine.add_request(str(i), prompt, params)


def run(num_requests: int = NUM_REQUESTS, **changes: Any) -> tuple[Trace, dict[str, list[int]]]:
    """The whole trace, and the outputs of each completion."""
    engine, lines = traced_engine(**SMALL | changes)
    add_requests(engine, num_requests)
    drain(engine)
    trace = parse_trace(lines)
    assert trace.problem is None
    return trace, {name: request.output_ids for name, request in trace.replay.requests.items()}


@cache
def plainly() -> dict[str, list[int]]:
    """What is said without drafts."""
    return run(FEW, num_gpu_blocks_override=60)[1]


class Echo:
    """A drafter: whatever was said will be said again."""

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        return token_ids[-num_tokens:]


def drafted(trace: Trace) -> list[dict[str, Any]]:
    """Shares with drafts."""
    return [scheduled for line in trace.steps for scheduled in line["scheduled"] if "num_draft" in scheduled]


def state_after(trace: Trace, step: int) -> tuple[Replay, float]:
    index = next(i for i, line in enumerate(trace.lines) if line["event"] == "step" and line["step"] == step)
    return trace.state_after(index + 1), trace.lines[index]["end"]


def forked(trace: Trace, step: int, **changes: Any) -> tuple[Engine, list[str], Replay]:
    state, at = state_after(trace, step)
    lines: list[str] = []
    return fork(state, fork_config(trace.header, **changes), lines.append, at), lines, state


@cache
def whole(ahead: bool = False) -> tuple[Trace, dict[str, list[int]]]:
    return run(async_scheduling=ahead)


CHANGES: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 8},
    {"max_num_batched_tokens": 64, "max_num_seqs": 12, "num_gpu_blocks_override": 100},
    {"block_size": 48},
    {"num_gpu_blocks_override": 9},
    {"max_num_seqs": 2, "scheduling_policy": "static"},
    {"enable_prefix_caching": False},
    {"enable_kv_cache": False, "enable_prefix_caching": False, "max_num_batched_tokens": 96, "async_scheduling": False},
    {},
]


@pytest.mark.parametrize(
    ("changes", "ahead"),
    [(each, ahead) for each in CHANGES for ahead in (False, True)]
    if THOROUGH
    else [(CHANGES[0], True), (CHANGES[2], True), (CHANGES[6], False)],
    ids=str,
)
def test_a_fork_says_the_same_tokens_whatever_is_changed(changes: dict[str, Any], ahead: bool) -> None:
    trace, outputs = whole(ahead)
    engine, lines, state = forked(trace, STEP, **changes)
    made = drain(engine)
    live = [name for name, request in state.requests.items() if request.is_live]
    assert 4 < len(live) < len(outputs)
    assert {name: output.outputs[0].token_ids for name, output in made.items()} == {
        name: outputs[name] for name in live
    }
    assert engine.core.scheduler.kv.num_used_blocks == 0
    assert parse_trace(lines).problem is None


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{"max_num_batched_tokens": 8}, {"block_size": 32}, {"num_gpu_blocks_override": 9}])
def test_a_fork_on_a_gpu_says_the_same_tokens(changes: dict[str, Any]) -> None:
    trace, outputs = run(device="cuda", batch_invariant=True)
    engine, lines, state = forked(trace, STEP, **changes)
    made = drain(engine)
    assert len(made) == sum(request.is_live for request in state.requests.values()) > 4
    assert all(output.outputs[0].token_ids == outputs[name] for name, output in made.items())
    assert {step["graph_mode"] for step in parse_trace(lines).steps} <= {"eager", "piecewise", "full"}


def test_another_budget_gives_another_timeline() -> None:
    trace, _ = whole()
    step = 4  # most prompts are still to be computed
    engine, lines, _ = forked(trace, step, max_num_batched_tokens=8)
    drain(engine)
    steps = [[(s["request_id"], s["num_tokens"]) for s in line["scheduled"]] for line in parse_trace(lines).steps]
    before = [[(s["request_id"], s["num_tokens"]) for s in line["scheduled"]] for line in trace.steps[step + 1 :]]
    assert steps != before and len(steps) != len(before)


def test_a_forks_trace_goes_on_in_steps_and_time_and_replays_to_the_live_state() -> None:
    trace, _ = whole()
    engine, lines, state = forked(trace, STEP, block_size=32)
    at = state_after(trace, STEP)[1]
    replay = parse_trace(lines).replay
    assert replay.state_text() == live_state(engine.core.scheduler)
    assert replay.step == STEP
    for name, request in replay.requests.items():
        known = state.requests[name]
        assert (request.output_ids, request.token_times) == (known.output_ids, known.token_times)
        assert request.status == known.status and request.num_preemptions == known.num_preemptions
    while engine.has_unfinished_requests:
        engine.step()
        assert parse_trace(lines).replay.state_text() == live_state(engine.core.scheduler)
    steps = parse_trace(lines).steps
    assert [line["step"] for line in steps] == list(range(STEP + 1, STEP + 1 + len(steps)))
    assert all(at <= line["time"] for line in steps)


def test_what_no_longer_fits_begins_as_preempted() -> None:
    trace, _ = whole()
    for changes in ({"num_gpu_blocks_override": 8}, {"max_num_seqs": 2}):
        engine, lines, state = forked(trace, STEP, **changes)
        replay = parse_trace(lines).replay
        running = [name for name, request in state.requests.items() if request.status == "running"]
        kept = [name for name in running if replay.requests[name].status == "running"]
        assert 0 < len(kept) < len(running)
        lost = set(running) - set(kept)
        assert all(
            replay.requests[name].wait == ("preempted", "preempted: its blocks were taken back") for name in lost
        )
        drain(engine)


def test_a_fork_of_a_fork_goes_on_too() -> None:
    trace, outputs = whole()
    engine, lines, _ = forked(trace, 12, max_num_batched_tokens=16)
    for _ in range(10):
        engine.step()
    engine, _, state = forked(parse_trace(lines), 20, block_size=32)
    made = drain(engine)
    assert len(made) == sum(request.is_live for request in state.requests.values()) > 3
    assert all(output.outputs[0].token_ids == outputs[name] for name, output in made.items())


def test_noise_is_the_requests_own_in_a_fork_too() -> None:
    engine, lines = traced_engine()
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
    output = engine.add_request("a", random_ids(9), params)
    drain(engine)
    other, _, _ = forked(parse_trace(lines), 10, block_size=8)
    made = drain(other)
    assert made["a"].outputs[0].token_ids == output.outputs[0].token_ids


def test_a_pool_in_which_a_request_can_never_fit_is_refused_in_one_line() -> None:
    trace, _ = whole()
    with pytest.raises(ValueError, match="the KV cache has 2: lower max_tokens"):
        forked(trace, STEP, num_gpu_blocks_override=2)


def test_a_trace_without_ids_cannot_be_forked() -> None:
    engine, lines = traced_engine(text=None)
    engine.add_request("a", random_ids(5), SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    with pytest.raises(ValueError, match="no token ids"):
        forked(parse_trace(lines), 0)


@pytest.mark.parametrize(
    "async_scheduling", [False, True] if THOROUGH else [True], ids=lambda ahead: ["plain", "ahead"][ahead]
)
@pytest.mark.parametrize("method", ["eagle", *(["ngram", "draft_model", "medusa"] if THOROUGH else [])])
def test_a_fork_of_an_engine_that_speculates_does_so_too_and_says_the_same_tokens(
    method: str, async_scheduling: bool
) -> None:
    given = speculation(method, "qwen3", num_speculative_tokens=3, adaptive=False)
    trace, outputs = run(FEW, speculative_config=given, async_scheduling=async_scheduling, num_gpu_blocks_override=60)
    assert outputs == plainly()
    assert any(scheduled["num_draft"] > scheduled["num_accepted"] for scheduled in drafted(trace))
    ways = ({}, {"num_gpu_blocks_override": 30, "block_size": 32}, {"speculative_config": None})
    for changes in ways if THOROUGH else ways[1:]:
        engine, lines, state = forked(trace, 12, **changes)
        made = drain(engine)
        assert len(made) == sum(request.is_live for request in state.requests.values()) > 2
        assert {name: output.outputs[0].token_ids for name, output in made.items()} == {
            name: outputs[name] for name in made
        }
        continued = parse_trace(lines)
        assert continued.problem is None
        assert bool(drafted(continued)) == ("speculative_config" not in changes)


def test_a_fork_of_a_plain_trace_may_speculate() -> None:
    trace, outputs = whole()
    engine, lines, _ = forked(trace, STEP, speculative_config=speculation("draft_model", "qwen3", adaptive=False))
    made = drain(engine)
    assert all(output.outputs[0].token_ids == outputs[name] for name, output in made.items())
    assert drafted(parse_trace(lines))


def test_a_drafter_that_was_python_code_is_not_in_a_trace_and_the_fork_says_so_in_one_line() -> None:
    trace, outputs = run(FEW, speculative_config={"method": "custom"}, drafter=Echo())
    with pytest.raises(ValueError, match="which no trace holds: fork with speculative_config=None") as found:
        forked(trace, 10)
    assert "\n" not in str(found.value)
    engine, _, _ = forked(trace, 10, speculative_config=None)
    made = drain(engine)
    assert made and all(output.outputs[0].token_ids == outputs[name] for name, output in made.items())


def test_pickles_that_a_fork_does_not_allow_it_does_not_allow_the_drafter_either() -> None:
    given = {"method": "medusa", "model": "somebody/heads", "load_format": "pt"}
    header = {"config": {"block_size": 16, "speculative_config": given}, "num_blocks": 10}
    kept, changed = fork_config(header), fork_config(header, load_format="auto")
    assert kept.speculative_config is not None and kept.speculative_config.load_format == "pt"
    assert changed.speculative_config is not None and changed.speculative_config.load_format is None


def test_requests_with_other_salts_share_nothing_in_a_fork_either() -> None:
    lines: list[str] = []
    first, lines = traced_engine(text=spell)
    for i in range(3):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        first.add_request(str(i), random_ids(40), params, cache_salt="x" if i else None)
    for _ in range(4):
        first.step()
    engine, _, _ = forked(parse_trace(lines), 3)
    tables = [request.block_ids for request in engine.core.scheduler.running]
    assert tables[1][:2] == tables[2][:2] and not set(tables[0]) & set(tables[1])
    assert isinstance(first.core.recorder, Recorder) and isinstance(engine.config, EngineConfig)
    assert json.loads(lines[1])["request_id"] == "0"


@cache
def run_out_of(**settings: Any) -> Trace:
    """The trace of requests that wait: of blocks, of seats, or of tokens."""
    engine, lines = traced_engine(**{"num_gpu_blocks_override": 60, "enable_prefix_caching": False} | settings)
    for i in range(6):
        params = SamplingParams(temperature=0.0, max_tokens=times(14, 30), ignore_eos=True)
        engine.add_request(str(i), random_ids(12 + 9 * (i % 3), seed=i), params)
    drain(engine)
    return parse_trace(lines)


@pytest.mark.parametrize(
    ("reason", "settings", "relaxed"),
    [
        ("token_budget", {"max_num_batched_tokens": 8, "max_num_seqs": 8}, {"max_num_batched_tokens": 64}),
        ("sequence_limit", {"max_num_seqs": 2}, {"max_num_seqs": 8}),
        ("no_free_blocks", {"num_gpu_blocks_override": 6}, {"num_gpu_blocks_override": 60}),
        ("static_batch", {"scheduling_policy": "static", "max_num_seqs": 2}, {"scheduling_policy": "fcfs"}),
        ("behind_head", {"num_gpu_blocks_override": 6}, {"num_gpu_blocks_override": 60}),
        ("preempted", {"num_gpu_blocks_override": 6}, {"num_gpu_blocks_override": 60}),
    ],
)
def test_whoever_waits_is_admitted_once_the_limit_it_names_is_relaxed(
    reason: str, settings: dict[str, Any], relaxed: dict[str, Any]
) -> None:
    trace = run_out_of(**settings)
    step, name = next(
        (line["step"], name)
        for line, following in pairwise(trace.steps)
        for name, (why, _) in line["waiting"].items()
        if why == reason and name in following["waiting"]  # as it is, the next step does not admit it either
    )

    other, lines, _ = forked(trace, step, **{"max_num_batched_tokens": 64, "max_num_seqs": 8} | relaxed)
    other.step()
    first = parse_trace(lines).steps[0]
    assert name in {scheduled["request_id"] for scheduled in first["scheduled"]} and name not in first["waiting"]
    drain(other)
    assert other.core.scheduler.num_preemptions == 0


def test_a_fork_at_the_step_that_a_stop_string_ends_goes_on_with_the_others() -> None:
    lines: list[str] = []
    config = EngineConfig(model="teachlm", device="cpu", num_gpu_blocks_override=40, max_num_seqs=4)
    engine = Engine(config, recorder=Recorder(lines.append, lambda: 0.0, lambda *given: engine.trace_texts(*given)))
    assert engine.tokenizer is not None
    for name, stop in (("a", "key"), ("b", None)):
        prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": "What is a KV cache?"}])
        params = SamplingParams(temperature=0.0, max_tokens=20, stop=stop)
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    made = drain(engine)
    trace = parse_trace(lines)
    stopped = next(i for i, line in enumerate(trace.lines) if line["event"] == "stop")
    step = trace.lines[stopped - 1]["step"]
    other, lines, _ = forked(trace, step)
    others = drain(other)
    assert others["b"].outputs[0].text == made["b"].outputs[0].text and "a" not in others
    assert parse_trace(lines).problem is None


def test_a_fork_that_cannot_hold_what_there_is_says_so_in_one_line() -> None:
    trace, _ = whole()
    with pytest.raises(ValueError, match="raise max_model_len"):
        forked(trace, STEP, max_model_len=24)
    for changes in ({"block_size": 0}, {"no_such_setting": 1}):
        with pytest.raises(ValueError):
            forked(trace, STEP, **changes)


def test_figures_of_a_fork_count_from_its_beginning_and_know_what_was_before() -> None:
    trace, _ = whole()
    engine, lines, _ = forked(trace, STEP)
    drain(engine)
    found, before = figures(lines), figures([trace.header, *trace.lines])
    assert 0 <= found.prefix_hit_rate <= 1
    assert found.num_output_tokens < before.num_output_tokens
    assert found.duration == pytest.approx(parse_trace(lines).steps[-1]["end"] - state_after(trace, STEP)[1])
