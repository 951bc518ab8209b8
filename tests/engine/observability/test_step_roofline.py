"""A traced engine says of each step what it costs at least, and what bound it, as far as the ceilings are known."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm import EngineConfig, SamplingParams
from teachllm.engine.llm_engine import Engine
from teachllm.engine.observability import ceilings as known
from teachllm.engine.observability.ceilings import device_name, known_ceilings, remember
from teachllm.engine.observability.step_roofline import StepRoofline
from teachllm.roofline import Ceilings, StepShape, Work, step_work
from teachllm.trace.recorder import Recorder
from tests.bench.h200_script import h200
from tests.worker.engines import drain, make_engine, random_ids

HERE = Ceilings(device_name("cpu"), "float32", 1e10, 5e9, 1e11, 1e11)
ROUND = Ceilings("card", "bfloat16", 100.0, 50.0, 10.0, 5.0)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TEACHLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ceilings.json"


@pytest.mark.parametrize(
    ("work", "seconds", "bound"),
    [
        (Work(100, 4, 2), 1.2, "bandwidth"),
        (Work(100, 4, 2), 1.99, "bandwidth"),
        (Work(100, 4, 2), 2.01, "overhead"),
        (Work(100, 8, 2), 1.2, "compute"),
        (Work(100, 0, 6), 1.2, "compute"),
        (Work(10, 8, 2), 100.0, "overhead"),
    ],
)
def test_a_step_is_bound_by_what_takes_longest_if_that_is_half_of_its_time(
    work: Work, seconds: float, bound: str
) -> None:
    assert work.bound(ROUND, seconds) == bound


def run(**changes: Any) -> tuple[Engine, list[dict[str, Any]]]:
    lines: list[str] = []
    engine = make_engine(recorder=Recorder(lines.append, time.perf_counter), **changes)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    for name, length in (("a", 40), ("b", 30)):
        engine.add_request(name, {"prompt_token_ids": random_ids(length, seed=length)}, params)
    drain(engine)
    return engine, [json.loads(line) for line in lines]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_step_of_a_trace_carries_its_work_and_its_bound(async_scheduling: bool) -> None:
    remember(HERE)
    engine, events = run(async_scheduling=async_scheduling)
    assert events[0]["machine"]["ceilings"]["read_bandwidth"] == 1e10
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) >= 4
    for step in steps:
        found, shares = step["roofline"], step["scheduled"]
        lens = [share["num_tokens"] for share in shares]
        ends = [share["start"] + share["num_tokens"] for share in shares]
        sampled = sum(end >= {"a": 40, "b": 30}[share["request_id"]] for end, share in zip(ends, shares, strict=True))
        work = step_work(engine.model_config, StepShape(lens, ends, sampled))
        assert (found["num_bytes"], found["num_flops"]) == (work.num_bytes, work.matrix_flops + work.attention_flops)
        assert found["floor"] == work.seconds(HERE) and "raised" not in found
        assert found["seconds"] == pytest.approx(step["execute"] + step["wait"])
        assert found["bound"] == work.bound(HERE, found["seconds"])


def test_a_ceiling_that_a_step_exceeds_rises_to_what_it_came_to_and_stays() -> None:
    roofline = StepRoofline(None, ROUND, num_devices=2)  # 200 bytes/s, 20 and 10 FLOP/s
    slow, fast = Work(400, 4, 2), Work(400, 40, 10)
    assert roofline.verdict(slow, 3.0) == {
        **{"num_bytes": 400, "num_flops": 6, "seconds": 3.0},
        **{"floor": 2.0, "bound": "bandwidth"},
    }
    found = roofline.verdict(slow, 0.5)  # four times as fast
    assert (found["floor"], found["seconds"], found["bound"]) == (0.5, 0.5, "bandwidth")
    assert found["raised"] == {"read_bandwidth": 800.0, "gemm_flops": 20.0}
    found = roofline.verdict(fast, 1.0)  # 2 + 1 seconds of products and attention
    assert found["floor"] == pytest.approx(1.0) and found["bound"] == "compute"
    assert found["raised"] == {"read_bandwidth": 800.0, "gemm_flops": pytest.approx(60.0)}
    assert roofline.verdict(slow, 0.0)["raised"] == found["raised"]
    assert roofline.verdict(slow, 3.0)["floor"] == 0.5
    assert StepRoofline(None, None).verdict(slow, 0.5).keys() == {"num_bytes", "num_flops", "seconds", "floor", "bound"}


def test_a_prefix_that_requests_share_is_counted_as_often_as_it_can_be_held() -> None:
    remember(HERE)
    engine, _ = run()
    lines: list[str] = []
    engine.core.recorder = Recorder(lines.append, time.perf_counter)
    prefix, params = random_ids(64, seed=5), SamplingParams(max_tokens=4, ignore_eos=True)
    for name, last in (("c", 1), ("d", 2), ("e", 3)):
        engine.add_request(name, {"prompt_token_ids": [*prefix, last]}, params)
    drain(engine)
    steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
    decode = next(step for step in steps if len(step["scheduled"]) == 3 and step["scheduled"][0]["phase"] == "decode")
    num_held = (4 + 3) * 16  # four shared blocks, and one of each
    ends = [share["start"] + 1 for share in decode["scheduled"]]
    assert sum(ends) - 3 > num_held
    work = step_work(engine.model_config, StepShape([1] * 3, ends, 3, num_held=num_held))
    assert decode["roofline"]["num_bytes"] == work.num_bytes


def test_where_the_ceilings_are_not_known_floor_and_bound_are_null() -> None:
    _, events = run()
    assert events[0]["machine"] == {"device": device_name("cpu"), "ceilings": None}
    found = next(event for event in events if event["event"] == "step")["roofline"]
    assert found["num_bytes"] > 0 and found["seconds"] > 0
    assert (found["floor"], found["bound"]) == (None, None)


def test_the_best_of_every_measurement_is_kept_and_of_a_known_card_what_it_has_done(cache: Path) -> None:
    card = known_ceilings("NVIDIA H200", "bfloat16")
    assert card is not None and 4e12 < card.read_bandwidth < 4.9e12
    remember(Ceilings("NVIDIA H200", "bfloat16", 4.9e12, 1.0, 5e14, 3.0))
    remember(Ceilings("NVIDIA H200", "bfloat16", 4.8e12, 2.0, 6e14, 1.0))
    remember(HERE)
    highest = known_ceilings("NVIDIA H200", "bfloat16")
    assert highest is not None
    assert (highest.read_bandwidth, highest.gemm_flops) == (4.9e12, card.gemm_flops)  # ours, and such cards'
    remember(Ceilings("mine", "bfloat16", 4.9e12, 1.0, 5e14, 3.0))
    remember(Ceilings("mine", "bfloat16", 4.8e12, 2.0, 6e14, 1.0))
    assert known_ceilings("mine", "bfloat16") == Ceilings("mine", "bfloat16", 4.9e12, 2.0, 6e14, 3.0)
    assert known_ceilings(HERE.device, "float32") == HERE
    assert known_ceilings(HERE.device, "bfloat16") is known_ceilings("other", "float32") is None
    assert len(json.loads(cache.read_text())) == 3


def test_a_cpu_is_called_by_its_model_so_that_none_is_judged_by_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(known, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    threads = f"{torch.get_num_threads()} threads"
    assert device_name("cpu") == f"riscv64, {threads}"
    monkeypatch.setattr(platform, "processor", lambda: "Processor of a Mac")
    assert device_name("cpu") == f"Processor of a Mac, {threads}"
    (tmp_path / "cpuinfo").write_text("model\t\t: 17\nmodel name\t: Some CPU @ 2: fast\n\nmodel name\t: other\n")
    assert device_name("cpu") == f"Some CPU @ 2: fast, {threads}"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert device_name("cpu") == f"riscv64, {threads}"


@pytest.mark.parametrize("text", ["", "[{", "[3]", '{"a": 1}', '[{"device": "NVIDIA H200"}]'])
def test_a_cache_that_cannot_be_read_holds_nothing_and_is_written_anew(cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    assert known_ceilings("NVIDIA H200", "bfloat16") == known._KNOWN[0]
    remember(HERE)
    assert known_ceilings(HERE.device, "float32") == HERE


def test_a_home_that_cannot_be_written_to_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHLLM_CACHE", "/proc/nowhere")
    remember(HERE)
    assert known_ceilings(HERE.device, "float32") is None


@pytest.mark.gpu
@pytest.mark.parametrize(("eager", "modes"), [(False, ["eager", "piecewise", "full"]), (True, ["eager"])])
def test_a_step_says_how_much_of_it_was_replayed_from_graphs(eager: bool, modes: list[str]) -> None:
    lines: list[str] = []
    engine = make_engine(
        device="cuda", enforce_eager=eager, async_scheduling=False, recorder=Recorder(lines.append, time.perf_counter)
    )
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for round_ in range(3):  # a size is recorded when it comes for the second time
        engine.add_request(f"{round_} a", random_ids(9, seed=round_), params)
        engine.step()
        engine.add_request(f"{round_} b", random_ids(30, seed=9 + round_), params)  # beside a decode: in pieces
        while engine.has_unfinished_requests:
            engine.step()
    found = [event["graph_mode"] for line in lines if (event := json.loads(line))["event"] == "step"]
    assert sorted(set(found)) == sorted(modes)
    if not eager:
        assert found[-1] == "full"


def gpu_steps(folder: Path, name: str, prompt_len: int, output_len: int, **settings: Any) -> list[dict[str, Any]]:
    """Rooflines of the steps of one request, the second time that one like it runs."""
    lines: list[str] = []
    if not (folder / name).exists():
        h200.write_shape(name, folder)
    config = EngineConfig(**h200.engine_settings(folder / name, "cuda") | {"num_gpu_blocks_override": 1300} | settings)
    engine = Engine(config, recorder=Recorder(lines.append, time.perf_counter))
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    for seed in range(2):
        lines.clear()
        engine.add_request(str(seed), {"prompt_token_ids": random_ids(prompt_len, seed)}, params)
        while engine.has_unfinished_requests:
            engine.step()
    engine.close()
    torch.cuda.empty_cache()
    events = [json.loads(line) for line in lines]
    return [event["roofline"] for event in events if event["event"] == "step"]


@pytest.mark.gpu
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_verdict_is_right_on_three_cases_and_no_floor_lies_above_its_time(
    tmp_path: Path, async_scheduling: bool
) -> None:
    settings: dict[str, Any] = {"async_scheduling": async_scheduling}
    decode = gpu_steps(tmp_path, "qwen3-8b", 128, 40, **settings)[4:-1]
    prefill = gpu_steps(tmp_path, "qwen3-8b", 16384, 1, **settings)
    eager = gpu_steps(tmp_path, "qwen3-0.6b", 128, 40, enforce_eager=True, **settings)[4:-1]
    for steps, bound in ((decode, "bandwidth"), (prefill, "compute"), (eager, "overhead")):
        assert [step["bound"] for step in steps] == [bound] * len(steps)
        assert all(0 < step["floor"] <= step["seconds"] and "raised" not in step for step in steps)
