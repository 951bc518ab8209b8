"""A simulation schedules what the real engine schedules, and shows what a setting is good for."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from teachllm import EngineConfig, SamplingParams
from teachllm.core.policy import FirstComeFirstServed
from teachllm.core.request import Request
from teachllm.engine.llm_engine import Engine
from teachllm.engine.overrides import EngineOverrides
from teachllm.roofline import Ceilings
from teachllm.simulator.shapes import model_shape
from teachllm.simulator.simulate import simulate
from teachllm.simulator.workload import Arrival, Workload, arrivals_of
from teachllm.trace.perfetto import to_perfetto
from teachllm.trace.reader import parse_trace
from teachllm.trace.recorder import Recorder
from tests.simulator.engines import Constant, events, run, shape
from tests.thorough import THOROUGH

CPU = Ceilings("a CPU", "float32", 2e10, 1e10, 2e11, 2e11)
BURST = Workload(num_requests=40, prompt_len=(20, 200), output_len=(10, 80))


def test_replicas_are_refused_since_a_simulation_is_of_one() -> None:
    with pytest.raises(ValueError, match="data_parallel_size=2: a simulation is of one replica: set it to 1"):
        simulate(EngineConfig(data_parallel_size=2), BURST)


def test_the_same_seed_gives_the_same_lines() -> None:
    workload = Workload(num_requests=12, rate=200.0, prompt_len=(10, 100), shared_len=32, seed=3)
    first = run(workload, num_blocks=200).lines
    assert first == run(workload, num_blocks=200).lines
    assert first != run(Workload(num_requests=12, rate=200.0, prompt_len=(10, 100), shared_len=32, seed=4)).lines


@pytest.mark.parametrize(
    "changes",
    [{"async_scheduling": True}]
    + ([{"enable_chunked_prefill": False}, {}, {"scheduling_policy": "static"}] if THOROUGH else []),
)
def test_every_step_is_the_one_that_the_engine_makes_with_a_model(changes: dict[str, Any]) -> None:
    parts = [
        Workload(num_requests=7, prompt_len=(3, 50), output_len=(2, 16)),
        Workload(num_requests=2, shared_len=33, prompt_len=5, output_len=10, n=2),
    ]
    settings: dict[str, Any] = {
        **{"dtype": "float32", "device": "cpu", "max_model_len": 96, "max_num_batched_tokens": 96, "max_num_seqs": 8},
        **{"num_gpu_blocks_override": 14, "skip_tokenizer_init": True},
    }
    config = EngineConfig(**settings | changes)
    simulated = simulate(config, parts, model_shape("teachlm", "float32"), CPU)

    real: list[str] = []
    engine = Engine(config, recorder=Recorder(real.append, time.perf_counter))
    for index, arrival in enumerate(arrivals_of(parts, engine.model_config.vocab_size)):
        params = SamplingParams(n=arrival.n, temperature=1.0, max_tokens=arrival.max_tokens, ignore_eos=True)
        engine.add_request(str(index), {"prompt_token_ids": arrival.prompt_token_ids}, params)
    while engine.has_unfinished_requests:
        engine.step()
    assert steps_of(simulated.lines) == steps_of(real)
    if "scheduling_policy" not in changes:
        assert simulated.figures.num_preemptions > 0 and simulated.figures.prefix_hit_rate > 0


def steps_of(lines: list[str]) -> list[dict[str, Any]]:
    """All of each step that does not depend on time or on what was sampled."""
    steps = events(lines, "step")
    for step in steps:
        for name in ("time", "schedule", "execute", "wait", "update", "end"):
            del step[name]
        step["roofline"] = step["roofline"]["num_bytes"], step["roofline"]["num_flops"]
        step["block_events"] = [event[:3] for event in step["block_events"]]  # without hashes
    return steps


def test_the_trace_replays_and_exports() -> None:
    workload = Workload(num_requests=40, rate=500.0, prompt_len=(10, 100), output_len=(10, 60), shared_len=32, n=2)
    result = run(workload, num_blocks=60, check_invariants=True)
    assert result.figures.num_preemptions > 0
    trace = parse_trace([line + "\n" for line in result.lines])
    assert trace.problem is trace.note is None
    assert len(trace.steps) == result.figures.num_steps
    assert to_perfetto(trace)["traceEvents"]
    assert "token_ids" not in "".join(result.lines)


def test_outputs_are_as_long_as_the_workload_says() -> None:
    result = run(BURST)
    expected = sum(arrival.max_tokens for arrival in arrivals_of(BURST, shape().vocab_size))
    assert result.figures.num_output_tokens == expected
    assert {reason for step in events(result.lines, "step") for reason in step["finished"].values()} == {"length"}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_times_add_up(async_scheduling: bool) -> None:
    """Of each step the host schedules for 1 ms, launches for 1 and updates for 1; the device takes 10."""
    result = run([Arrival(2.0, [5] * 20, 50)], async_scheduling=async_scheduling, more={"cost": Constant()})
    found = result.figures
    assert found.num_steps == 50
    assert found.ttft.mean == pytest.approx(0.013)
    step = 0.010 if async_scheduling else 0.013
    assert found.itl.p50 == pytest.approx(step)
    assert found.duration == pytest.approx(50 * step + 0.003 * async_scheduling)
    assert found.device_busy == pytest.approx(0.010 / step, rel=0.01)
    times = events(result.lines, "step")[10]
    assert times["schedule"] == times["execute"] == times["update"] == pytest.approx(0.001)
    assert times["wait"] == pytest.approx(0.007 if async_scheduling else 0.010)


def test_asynchronous_scheduling_cannot_hide_more_than_the_device_takes() -> None:
    slow_host = Constant(device=0.002, host=0.009)
    result = run([Arrival(0.0, [5] * 20, 50)], async_scheduling=True, more={"cost": slow_host})
    assert result.figures.itl.p50 == pytest.approx(0.009)


def test_who_arrives_during_a_step_has_waited_since() -> None:
    result = run([Arrival(0.0, [1], 3), Arrival(0.001, [2], 1)], async_scheduling=False, more={"cost": Constant()})
    assert result.figures.ttft.mean == pytest.approx((0.013 + 0.025) / 2)
    assert [event["time"] for event in events(result.lines, "arrival")] == [0.0, 0.001]


def test_asynchronous_scheduling_is_faster() -> None:
    plain, ahead = (run(BURST, async_scheduling=value).figures for value in (False, True))
    assert ahead.duration < plain.duration
    assert ahead.device_busy and plain.device_busy and ahead.device_busy > plain.device_busy


def test_continuous_batching_beats_static_batching() -> None:
    model = shape("qwen3-8b")
    static, continuous = (
        run(BURST, model, scheduling_policy=policy, max_num_seqs=16).figures for policy in ("static", "fcfs")
    )
    assert continuous.duration < 0.8 * static.duration
    assert continuous.ttft.mean < 0.8 * static.ttft.mean


def test_chunked_prefill_lowers_the_worst_inter_token_latency() -> None:
    workload = [
        Workload(num_requests=16, prompt_len=32, output_len=200),
        Workload(num_requests=5, rate=10.0, prompt_len=3000, output_len=8),
    ]
    model = shape("qwen3-8b")
    whole = run(workload, model, enable_chunked_prefill=False, max_num_batched_tokens=40960)
    chunked = run(workload, model, max_num_batched_tokens=512)
    assert chunked.figures.itl.p99 < 0.5 * whole.figures.itl.p99


def test_a_larger_pool_has_no_more_preemptions_once_many_requests_fit() -> None:
    """In a very small one few run at once, and few can be preempted."""
    found = [run(BURST, num_blocks=num_blocks).figures for num_blocks in (80, 150, 250, 1000)]
    preemptions = [each.num_preemptions for each in found]
    assert preemptions == sorted(preemptions, reverse=True)
    assert preemptions[0] > 0 == preemptions[-1]
    assert found[-1].duration < found[0].duration


def test_a_shared_prefix_lowers_the_time_to_the_first_token() -> None:
    workload = Workload(num_requests=20, rate=30.0, shared_len=1024, prompt_len=64, output_len=16)
    model = shape("qwen3-8b")
    without, with_ = (run(workload, model, enable_prefix_caching=value).figures for value in (False, True))
    assert without.prefix_hit_rate == 0.0
    assert with_.prefix_hit_rate == pytest.approx(19 * 1024 / (20 * 1088))
    assert with_.ttft.mean < 0.8 * without.ttft.mean


def test_completions_of_one_prompt_share_its_full_blocks() -> None:
    result = run(Workload(num_requests=1, prompt_len=64, n=4))
    assert result.figures.num_requests == 4
    assert result.figures.prefix_hit_rate == 3 * 48 / (4 * 64)  # the last token is always computed


def test_a_lower_priority_number_gets_its_first_token_earlier() -> None:
    workload = Workload(num_requests=60, prompt_len=100, output_len=30, priorities=(0, 1))
    lines = run(workload, scheduling_policy="priority", max_num_seqs=8).lines
    priority = {event["request_id"]: event["priority"] for event in events(lines, "arrival")}
    first: dict[str, int] = {}
    for step in events(lines, "step"):
        for share in step["scheduled"]:
            first.setdefault(share["request_id"], step["step"])
    urgent, others = ([first[name] for name, value in priority.items() if value == level] for level in (0, 1))
    assert len(urgent) > 8 and len(others) > 8
    assert max(urgent) <= min(others)


class ShortestFirst(FirstComeFirstServed):
    """Whoever has the shortest prompt."""

    def key(self, request: Request) -> tuple[int, ...]:
        return request.num_prompt_tokens, request.arrival_index

    def opens_batch(self, num_running: int) -> bool:
        return True


class Closed(ShortestFirst):
    def opens_batch(self, num_running: int) -> bool:
        return False


def test_a_policy_of_ones_own_can_be_tried() -> None:
    workload = Workload(num_requests=25, prompt_len=(10, 2000), output_len=4)
    model = shape("qwen3-8b")
    usual = run(workload, model, max_num_seqs=4).figures
    shortest = run(workload, model, max_num_seqs=4, more={"overrides": EngineOverrides(policy=ShortestFirst())}).figures
    assert shortest.ttft.mean < 0.9 * usual.ttft.mean
    with pytest.raises(RuntimeError, match="the policy admits no request: see its opens_batch"):
        run(workload, more={"overrides": EngineOverrides(policy=Closed())})


def test_without_a_number_of_blocks_the_settings_decide_or_nobody_wants_for_one() -> None:
    assert header(run(BURST, num_gpu_blocks_override=77))["num_blocks"] == 77
    per_token = 2 * 6 * 4 * 64 * 2  # K and V, layers, KV heads, head size, bytes of bfloat16
    assert header(run(BURST, kv_cache_memory_bytes=100 * 16 * per_token))["num_blocks"] == 100
    enough = run(BURST)
    assert enough.figures.num_preemptions == 0
    reasons = {reason for step in events(enough.lines, "step") for reason, _ in step["waiting"].values()}
    assert "no_free_blocks" not in reasons


def test_the_header_says_that_it_is_simulated_and_how_it_was_set() -> None:
    found = header(run(BURST, shape("qwen3-8b"), max_num_seqs=7, trace_path="nowhere/written"))
    assert found["machine"]["device"] == "NVIDIA H200, simulated"
    assert found["model"] == {"path": "qwen3-8b", "architecture": "Qwen3ForCausalLM", "dtype": "bfloat16"}
    assert (found["config"]["max_num_seqs"], found["config"]["async_scheduling"]) == (7, True)


def header(result: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.lines[0])
    return found


@pytest.mark.parametrize(
    ("workload", "settings", "message"),
    [
        (Workload(prompt_len=5000), {}, "the prompt has 5000 tokens and max_model_len=4096 .* shorten it to 4095"),
        (Workload(prompt_len=600), {"num_blocks": 10}, "42 blocks of 16, and the KV cache has 10: lower max_tokens"),
        (Workload(), {"num_blocks": 0}, "num_blocks=0: must be at least 1, or None for as many as can be of use"),
        (Workload(), {"max_model_len": 9999}, "max_model_len=9999 is more than the model's context of 4096"),
        ([], {}, "the workload is empty"),
    ],
)
def test_bad_input_gets_one_line_that_says_what_to_change(
    workload: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        run(workload, **settings)
    assert "\n" not in str(error.value)
