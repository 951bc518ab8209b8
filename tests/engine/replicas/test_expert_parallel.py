"""Replicas that share a mixture's experts: the tokens of one process, whoever has work, and one end for all.

They and their ranks are threads here, and processes in one thorough test.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from teachllm import LLM, EngineConfig, SamplingParams
from teachllm.engine.async_llm import AsyncLLM
from teachllm.engine.fork import fork_config
from teachllm.engine.llm_engine import Engine
from teachllm.engine.processes.core_client import CoreClient
from teachllm.engine.processes.core_link import CoreLink
from teachllm.trace.reader import Trace, read_trace
from teachllm.worker.errors import EngineDeadError
from tests.engine.streams import all_hear_that
from tests.processes import descendants, is_gone, open_files
from tests.thorough import THOROUGH, only_thorough, times
from tests.waiting import wait_for
from tests.worker.engines import random_ids, tiny, tokens
from tests.worker.processes.child_threads import cores_in_threads, in_processes, patched
from tests.worker.processes.process_trees import needs_proc

NUM_TOKENS = times(8, 16)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
PROMPTS = [random_ids(length, seed=length) for length in (3, 40, 17, 1, 25, 60)]
SHARED: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
WAYS: dict[str, dict[str, Any]] = {
    "dp=2": {},
    "dp=2 x tp=2": {"tensor_parallel_size": 2},
    "dp=2 x pp=2": {"pipeline_parallel_size": 2},
    "dp=3, plans in flight": {"data_parallel_size": 3, "async_scheduling": True},
}
TOP_K, NUM_EXPERTS = {"qwen3_moe": 3, "mixtral": 2}, {"qwen3_moe": 8, "mixtral": 5}
USUAL = [("mixtral", "dp=2"), ("qwen3_moe", "dp=2 x tp=2"), ("qwen3_moe", "dp=3, plans in flight")]
CASES = [(name, way) for name in TOP_K for way in WAYS] if THOROUGH else USUAL


def links_of(engine: Engine) -> list[CoreLink]:
    """Return the lines to the replicas."""
    core = engine._core
    assert isinstance(core, CoreClient)
    return core._links


def loads(trace: Trace, top_k: int) -> list[list[int]]:
    """By layer that has experts and by expert: the tokens that it got in all steps, each of which has counted all."""
    found: list[list[list[int]]] = [step["expert_load"] for step in trace.steps]
    for step, layers in zip(trace.steps, found, strict=True):
        num_tokens = sum(share["num_tokens"] for share in step["scheduled"])
        assert {sum(layer) for layer in layers} == {num_tokens * top_k}
    return [[sum(counts) for counts in zip(*layer, strict=True)] for layer in zip(*found, strict=True)]


def loads_of_all(traces: list[Trace], top_k: int) -> list[list[int]]:
    """As `loads`, of all replicas."""
    each = [loads(trace, top_k) for trace in traces]
    return [[sum(counts) for counts in zip(*layer, strict=True)] for layer in zip(*each, strict=True)]


def finish(engine: Engine) -> None:
    while engine.has_unfinished_requests:
        engine.step()


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with patched(cores_in_threads):
        yield


Expected = tuple[str, list[list[list[int]]], list[list[int]]]


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """A mixture's name, and the tokens and the load of each expert in one process."""
    path = tmp_path_factory.mktemp("alone") / "run.jsonl"
    outputs = _alone(request.param, PROMPTS, trace_path=str(path))
    return request.param, [tokens(output) for output in outputs], loads(read_trace(path), TOP_K[request.param])


@pytest.mark.parametrize(("expected", "way"), CASES, indirect=["expected"])
def test_greedy_tokens_and_the_load_of_each_expert_are_those_of_one_process(
    expected: Expected, way: str, tmp_path: Path
) -> None:
    name, theirs, load = expected
    assert len({token for [ids] in theirs for token in ids}) >= 16
    assert [len(layer) for layer in load] == [NUM_EXPERTS[name]] * len(load)
    assert all(max(layer) > min(layer) for layer in load)
    outputs = _alone(name, PROMPTS, trace_path=str(tmp_path / "run.jsonl"), **(SHARED | WAYS[way]))
    assert [tokens(output) for output in outputs] == theirs
    traces = [read_trace(path) for path in sorted(tmp_path.iterdir())]
    assert loads_of_all(traces, TOP_K[name]) == load


@pytest.fixture
def traced(threads: None, tmp_path: Path) -> Iterator[tuple[Engine, Callable[[], list[Trace]]]]:
    config = EngineConfig(**tiny("qwen3_moe", **SHARED, trace_path=str(tmp_path / "run.jsonl")))
    paths = [tmp_path / f"run-{replica}.jsonl" for replica in range(2)]
    with closing(Engine(config)) as engine:
        wait_for(lambda: all("\n" in path.read_text() for path in paths))  # written by a thread
        yield engine, lambda: [read_trace(path) for path in paths]


def test_an_idle_replica_takes_empty_steps_and_then_all_rest(
    traced: tuple[Engine, Callable[[], list[Trace]]],
) -> None:
    engine, traces = traced
    [expected] = [tokens(each) for each in _alone("qwen3_moe", [PROMPTS[1]])]
    for _ in range(2):  # one request alone is always the first replica's
        output = engine.add_request("one", PROMPTS[1], GREEDY)
        finish(engine)
        assert tokens(output) == expected
    wait_for(lambda: len(traces()[0].steps) == 2 * NUM_TOKENS)
    assert not traces()[1].steps
    wait_for(lambda: [line["event"] for line in traces()[1].lines] == ["serve"] * (2 * NUM_TOKENS))
    for took, served in zip(traces()[0].steps, traces()[1].lines, strict=True):  # at the same time
        [mine], [its] = took["ranks"], served["ranks"]
        assert (mine["replica"], its["replica"]) == (0, 1)
        assert mine["begin"] < its["end"] and its["begin"] < mine["end"]
        assert mine["sent"]["all_to_all"][0] == its["sent"]["all_to_all"][0] == 4 * 2  # of two layers
    num_lines = [len(trace.lines) for trace in traces()]
    engine.stats()
    engine.reset_prefix_cache()  # both say how they stand
    wait_for(lambda: engine.step() == [] and engine.stats() is not None)
    assert [len(trace.lines) for trace in traces()] == num_lines


def _alone(name: str, prompts: list[list[int]], **changes: Any) -> list[Any]:
    with closing(LLM(**tiny(name, **changes))) as llm:
        return llm.generate(prompts, GREEDY, use_tqdm=False)


def test_one_whose_requests_ended_serves_those_that_came_later_elsewhere(
    traced: tuple[Engine, Callable[[], list[Trace]]],
) -> None:
    engine, _ = traced
    theirs = [tokens(each) for each in _alone("qwen3_moe", PROMPTS[:4])]
    first = [engine.add_request(str(i), PROMPTS[i], GREEDY) for i in range(2)]
    long = engine.add_request("long", PROMPTS[2], LONG)
    for _ in range(8):
        engine.step()
    later = [engine.add_request(str(i), PROMPTS[i], GREEDY) for i in (2, 3)]
    engine.abort_request("long")
    finish(engine)
    assert [tokens(each) for each in (*first, *later)] == theirs
    assert len(tokens(long)[0]) < 80


def test_a_trace_of_one_replica_is_forked_as_an_engine_with_all_experts(
    traced: tuple[Engine, Callable[[], list[Trace]]],
) -> None:
    config = fork_config(traced[1]()[0].header)
    assert config.data_parallel_size == 1 and not config.enable_expert_parallel


def test_closing_in_the_middle_of_a_step_ends_all_without_a_complaint(capfd: pytest.CaptureFixture[str]) -> None:
    engine = Engine(EngineConfig(**tiny("qwen3_moe", **SHARED)))
    for i in range(4):
        engine.add_request(str(i), random_ids(4, seed=i), LONG)
    for _ in range(6):
        engine.step()
    engine.close()
    assert [link.process.returncode for link in links_of(engine)] == [0, 0]
    assert "rror" not in capfd.readouterr().err


def test_one_that_is_told_to_end_serves_the_others_until_all_are() -> None:
    engine = Engine(EngineConfig(**tiny("qwen3_moe", **SHARED)))
    try:
        _, theirs = [engine.add_request(str(i), random_ids(4, seed=i), LONG) for i in range(2)]
        for _ in range(6):
            engine.step()
        first, *_ = links_of(engine)
        first.tell_to_end()
        first.tell_to_end()  # as `close` does once more: the others count it once
        while not theirs.finished:
            engine.step()
        assert len(tokens(theirs)[0]) == 80
        assert not first.is_dead
    finally:
        engine.close()


@needs_proc
@only_thorough
@pytest.mark.parametrize(
    ("victim", "num_requests"), [("its input", 1), ("core", 1), ("core", 6), ("rank", 1), ("rank", 6)]
)
def test_replicas_in_processes_give_the_tokens_of_one_and_when_one_ends_all_hear_of_it_and_end(
    victim: str, num_requests: int, tmp_path: Path
) -> None:
    """With one request the second replica has nothing to do but to serve; and it is the one that is killed, or ends
    by itself since its standard input has, as when this process is killed."""
    theirs = [tokens(each) for each in _alone("qwen3_moe", PROMPTS)]
    ended = list[Exception | None]()
    before = descendants(os.getpid())

    async def answer(llm: AsyncLLM, prompt: list[int]) -> list[list[int]]:
        *_, output = [output async for output in llm.generate(prompt, GREEDY)]
        return tokens(output)

    async def main(llm: AsyncLLM) -> None:
        assert await asyncio.gather(*(answer(llm, prompt) for prompt in PROMPTS)) == theirs
        streams = [await llm.submit(random_ids(4, seed=i), LONG) for i in range(num_requests)]
        for stream in streams:
            await anext(stream)
        core = links_of(llm._engine)[1].process
        assert core.stdin is not None
        if victim == "its input":
            core.stdin.close()
        else:
            os.kill(core.pid if victim == "core" else min(descendants(core.pid)), signal.SIGKILL)
        of_whom = "rank 0" if victim == "rank" else "replica 1"
        how = "exit code 1" if victim == "its input" else "SIGKILL"
        await all_hear_that(f"the process of {of_whom} has ended with {how}", streams)
        wait_for(lambda: bool(ended))

    config = EngineConfig(**tiny("qwen3_moe", **SHARED, trace_path=str(tmp_path / "run.jsonl")))
    with in_processes():
        llm = AsyncLLM.start(config, on_end=ended.append)
    with closing(llm):
        started = descendants(os.getpid()) - before
        assert len(started) == 4
        asyncio.run(main(llm))
        wait_for(lambda: all(map(is_gone, started)))
    assert isinstance(ended[0], EngineDeadError)
    for replica in range(2):
        for line in read_trace(tmp_path / f"run-{replica}.jsonl").lines:
            for told in line.get("ranks", ()):  # of two layers with experts, whoever has tokens
                assert told["sent"]["all_to_all"][0] == 4 * 2


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("qwen3", {}, "spreads experts over ranks, and Qwen3ForCausalLM has none: set it to False"),
        ("mixtral", {"data_parallel_size": 6}, "over 6 ranks, and the model has 5: lower data_parallel_size"),
        ("mixtral", {"data_parallel_size": 1}, "there is one rank: set it to False, or tensor_parallel_size=2, or"),
    ],
)
def test_what_cannot_be_spread_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    before = open_files()
    with pytest.raises(ValueError, match=message):
        LLM(**tiny(name, **(SHARED | settings)))
    assert not open_files() - before
