"""Replicas of the engine: who gets a request, that they give what one gives, and that they end together.

They are threads here, with the code of both ends and the sockets between them; once they are processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm import LLM, EngineConfig, SamplingParams
from teachllm.engine.async_llm import AsyncLLM
from teachllm.engine.fork import fork_config
from teachllm.engine.info import describe_model
from teachllm.engine.llm_engine import Engine, EngineDeadError
from teachllm.engine.observability.stats import StepStats, together
from teachllm.engine.processes.core_client import CoreClient
from teachllm.engine.replicas import replica
from teachllm.engine.replicas.data_parallel import Balance, least_loaded
from teachllm.engine.replicas.replica import replica_config, replica_devices
from teachllm.trace.reader import read_trace
from teachllm_lessons.helpers.lesson_12 import CHOOSE_REPLICA
from tests.engine.processes.failing_traces import make_steps_fail
from tests.engine.reference import reference
from tests.processes import children, is_gone, open_files
from tests.thorough import THOROUGH
from tests.waiting import wait_for
from tests.worker.engines import random_ids, tiny, tokens
from tests.worker.processes.child_threads import cores_in_threads, in_processes, patched
from tests.worker.processes.process_trees import needs_proc

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 200,
    "check_invariants": True,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
PROMPTS = [f"{what} {thing}" for what in ("What is", "Tell me about", "Why is there") for thing in ["a", "KV", "cache"]]
PROMPTS += ["Once upon a time", "A block table", "The scheduler", "One token", "x " * 60]


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with patched(cores_in_threads):
        yield


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with closing(LLM(**SETTINGS)) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(threads: None) -> Iterator[LLM]:
    with closing(LLM(**SETTINGS, data_parallel_size=2)) as llm:
        yield llm


def core_of(llm: LLM) -> CoreClient:
    core = llm.engine._core
    assert isinstance(core, CoreClient)
    return core


def replicas_of(llm: LLM) -> list[int]:
    """Where the unfinished requests are, in the order they came."""
    return [replica for _, replica in core_of(llm)._requests.values()]


def drained(llm: LLM) -> list[StepStats]:
    """Steps until nothing is left; the figures after each step."""
    seen = []
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
        seen.append(llm.engine.stats())
    return [stats for stats in seen if stats is not None]


def rest(llm: LLM) -> None:
    """Return once both replicas hold nothing, and count from here on."""

    def is_empty() -> bool:
        llm.engine.interrupt()
        llm.engine.step()
        stats = llm.engine.stats()
        return stats is not None and stats.replicas == ((0, 0), (0, 0)) and stats.kv_cache_usage == 0

    llm.engine.count()
    llm.engine.reset_prefix_cache()  # both will say how they stand
    wait_for(is_empty)


def running() -> set[int]:
    """Return the processes that this one has started and that have not ended."""
    return {pid for pid in children(os.getpid()) if not is_gone(pid)}


def ended(llm: LLM | Engine) -> list[int | None]:
    """Return how each core has ended."""
    engine = llm.engine if isinstance(llm, LLM) else llm
    return [link.process.poll() for link in engine._core._links]  # type: ignore[attr-defined]


# -- the balance -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waiting", "running", "chosen"),
    [
        ([0, 0, 0], [0, 0, 0], 0),
        ([0, 0, 0], [3, 2, 2], 1),
        ([1, 0], [0, 3], 1),  # 4 and 3
        ([1, 0], [0, 5], 0),  # 4 and 5
        ([2, 1], [0, 4], 0),  # 8 and 8: the first
    ],
)
def test_the_least_loaded_has_the_smallest_4_waiting_plus_running(
    waiting: list[int], running: list[int], chosen: int
) -> None:
    assert least_loaded(waiting, running) == chosen


def test_the_least_loaded_keeps_the_lessons_contract() -> None:
    assert CHOOSE_REPLICA.contract(least_loaded) > 200


def test_a_burst_is_spread_before_any_replica_has_said_a_word() -> None:
    balance = Balance(3)
    assert [balance.choose(None) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_who_runs_counts_less_than_who_waits_and_who_has_ended_not_at_all() -> None:
    balance = Balance(2)
    assert [balance.choose(None) for _ in range(4)] == [0, 1, 0, 1]
    balance.stepped(1, num_running=2)  # 8 and 2
    assert [balance.choose(None) for _ in range(2)] == [1, 1]  # 8 and 6, 8 and 10
    assert balance.choose(None) == 0
    for _ in range(4):
        balance.ended(1)
    assert [balance.choose(None) for _ in range(3)] == [1, 1, 1]  # what ran there has ended, whatever it said last


def test_completions_of_one_request_stay_together() -> None:
    balance = Balance(2)
    assert [balance.choose("a") for _ in range(3)] == [0, 0, 0]
    assert [balance.choose("b") for _ in range(2)] == [1, 1]
    assert balance.choose(None) == 1  # 12 and 8
    assert balance.choose("c") == 0


def test_figures_of_replicas_add_up_and_usage_is_their_mean() -> None:
    first = StepStats(2, 1, 0.5, 10, 3, 1, 20, 4, 5, num_drafts=3, num_accepted_tokens_per_pos=(2, 1))
    second = StepStats(3, 0, 0.1, 5, 2, 0, 30, 6, 7, num_drafts=1, num_accepted_tokens_per_pos=(1,))
    both = together([first, second])
    assert (both.num_running, both.num_waiting, both.kv_cache_usage) == (5, 1, pytest.approx(0.3))
    assert (both.prefix_cache_queries, both.prefix_cache_hits, both.num_preemptions) == (15, 5, 1)
    assert (both.num_tokens, both.num_prompt_tokens, both.num_generation_tokens, both.num_drafts) == (50, 10, 12, 4)
    assert both.num_accepted_tokens_per_pos == (3, 1)
    assert both.replicas == ((2, 1), (3, 0))
    assert together([first]) == first
    standing = first.without_counts()
    assert (standing.num_running, standing.num_tokens, standing.num_accepted_tokens_per_pos) == (2, 0, ())


# -- two replicas ------------------------------------------------------------------------------------------


def test_two_replicas_give_the_greedy_tokens_of_one_and_share_the_work(one: LLM, two: LLM) -> None:
    expected = one.generate(PROMPTS, GREEDY, use_tqdm=False)
    rest(two)
    outputs = [two.engine.add_request(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    assert abs(replicas_of(two).count(0) - replicas_of(two).count(1)) <= 1
    seen = drained(two)
    assert [tokens(output) for output in outputs] == [tokens(output) for output in expected]
    assert [output.outputs[0].text for output in outputs] == [output.outputs[0].text for output in expected]
    assert len({tuple(tokens(output)[0]) for output in outputs}) > len(PROMPTS) // 2
    for index in range(2):
        assert max(stats.replicas[index][0] for stats in seen) > 1  # each had several at once
    assert sum(stats.num_generation_tokens for stats in seen) == 12 * len(PROMPTS)
    assert sum(stats.num_prompt_tokens for stats in seen) == sum(len(output.prompt_token_ids) for output in outputs)
    assert (seen[-1].num_running, seen[-1].num_waiting, seen[-1].kv_cache_usage) == (0, 0, 0.0)
    assert all(stats.num_running == sum(running for running, _ in stats.replicas) for stats in seen)


def test_completions_of_one_prompt_share_its_blocks_in_one_replica(one: LLM, two: LLM) -> None:
    params = SamplingParams(n=4, max_tokens=10, seed=3, temperature=1.0, ignore_eos=True)
    two.engine.add_request("other", "Tell me a story", LONG)
    output = two.engine.add_request("many", "long " * 40, params)
    held = replicas_of(two)
    assert len(held) == 5 and held[1:] == [1 - held[0]] * 4
    assert sorted(two.engine.unfinished_ids) == ["many#0", "many#1", "many#2", "many#3", "other"]
    while not output.finished:
        two.engine.step()
    two.engine.abort_request("other")
    [expected] = one.generate("long " * 40, params, use_tqdm=False)
    assert tokens(output) == tokens(expected) and len({tuple(each) for each in tokens(output)}) > 1


def test_an_abort_reaches_the_replica_that_has_the_request(two: LLM) -> None:
    for name in ("a", "b", "c"):
        two.engine.add_request(name, f"Request {name}", LONG)
    for _ in range(6):
        two.engine.step()
    two.engine.abort_request("b")
    assert sorted(two.engine.unfinished_ids) == ["a", "c"]
    two.engine.abort_request("a")
    two.engine.abort_request("c")
    [again] = two.generate("Request b", GREEDY, use_tqdm=False)
    assert again.finished and len(again.outputs[0].token_ids) == 12
    rest(two)


def test_what_is_refused_names_the_numbers_and_disturbs_nobody(two: LLM) -> None:
    with pytest.raises(ValueError, match="max_model_len=256"):
        two.generate([[5] * 256], GREEDY, use_tqdm=False)
    with pytest.raises(RuntimeError, match="set own_process=False and data_parallel_size=1"):
        _ = two.engine.core
    assert two.config.data_parallel_size == 2 and two.speculation() is None
    assert not two.engine.has_unfinished_requests


def test_each_replica_writes_a_trace_of_its_own_and_closing_ends_all(tmp_path: Path) -> None:
    lines, loaded = ([], []), list[tuple[str, int, int]]()
    config = EngineConfig(**tiny(data_parallel_size=2, trace_path=str(tmp_path / "run.jsonl")))
    sinks = [each.append for each in lines]
    engine = Engine(config, trace_sink=sinks, progress=lambda *counts: loaded.append(counts))
    with closing(engine):
        assert engine.config.trace_path == config.trace_path
        for name in "abcd":
            engine.add_request(name, random_ids(5), GREEDY)
        while engine.has_unfinished_requests:
            engine.step()
    assert ended(engine) == [0, 0]
    assert loaded[-1][0] == "weights" and loaded[-1][1] == loaded[-1][2] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-0.jsonl", "run-1.jsonl"]
    for index, names in enumerate(("ac", "bd")):
        path = tmp_path / f"run-{index}.jsonl"
        assert path.read_text().splitlines() == lines[index]
        trace = read_trace(path)
        assert [line["request_id"] for line in trace.lines if line["event"] == "arrival"] == list(names)
        assert fork_config(trace.header).data_parallel_size == 1


@needs_proc
@pytest.mark.skipif(not THOROUGH, reason="test_expert_parallel.py has replicas in processes")
@pytest.mark.parametrize(("victim", "is_killed"), [(1, False), (0, True), (1, True)])
def test_replicas_in_processes_give_the_tokens_of_one_and_when_one_ends_all_hear_of_it_and_end(
    victim: int, is_killed: bool
) -> None:
    """One is killed, or ends by itself since its standard input has, as when this process is killed."""
    prompts = [random_ids(4 + 5 * i, seed=i) for i in range(6)]
    with closing(LLM(**tiny())) as llm:
        expected = [tokens(output) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    before = running()
    with in_processes():
        llm = LLM(**tiny(data_parallel_size=2))
    with closing(llm):
        assert len(running() - before) == 2
        assert [tokens(output) for output in llm.generate(prompts, GREEDY, use_tqdm=False)] == expected
        process = core_of(llm)._links[victim].process
        assert process.stdin is not None
        process.kill() if is_killed else process.stdin.close()
        how = "SIGKILL" if is_killed else "exit code 1"
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=f"^the process of replica {victim} has ended with {how}$"):
                llm.generate(prompts, LONG, use_tqdm=False)
        wait_for(lambda: running() == before)  # the other one has been told, before anybody closes
    assert ended(llm)[victim] == (-signal.SIGKILL if is_killed else 1) and ended(llm)[1 - victim] == 0


def test_a_step_that_fails_at_one_replica_ends_its_own_requests_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_steps_fail(monkeypatch, "run-1.jsonl")

    async def answer(llm: AsyncLLM, seed: int) -> int:
        num_tokens = 0
        async for output in llm.generate(random_ids(4, seed=seed), LONG):
            num_tokens = len(output.outputs[0].token_ids)
        return num_tokens

    async def main(llm: AsyncLLM) -> list[int | BaseException]:
        return await asyncio.gather(*(answer(llm, seed) for seed in range(4)), return_exceptions=True)

    config = EngineConfig(**tiny(data_parallel_size=2, max_num_seqs=8, trace_path=str(tmp_path / "run.jsonl")))
    with closing(AsyncLLM.start(config)) as llm:
        answers = asyncio.run(main(llm))
    assert [answers[0], answers[2]] == [80, 80]
    assert all("No space left" in str(answers[index]) for index in (1, 3))


# -- refusals ----------------------------------------------------------------------------------------------


def test_a_refusal_by_one_replica_ends_all(tmp_path: Path) -> None:
    before = open_files()
    (tmp_path / "run-1.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"run-1\.jsonl' cannot be written"):
        LLM(**tiny(data_parallel_size=2, trace_path=str(tmp_path / "run.jsonl")))
    assert not open_files() - before


def test_what_replicas_cannot_have_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(**tiny(data_parallel_size=2))
    with pytest.raises(ValueError, match="give a list with one for each"):
        Engine(config, trace_sink=print)
    with pytest.raises(ValueError, match=r"objects of this process.*data_parallel_size=1"):
        Engine(config, make_executor=lambda config, executor: executor)
    monkeypatch.setitem(sys.modules, "teachllm.engine.processes.core_client", None)
    with pytest.raises(ImportError, match=r"pip install 'teachllm\[serve\]', or set .*data_parallel_size=1"):
        Engine(config)


def test_replicas_stand_on_neighbouring_gpus_and_more_than_there_are_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica, "select_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    config = EngineConfig(device="cuda", data_parallel_size=2, tensor_parallel_size=2, trace_path="to/run.jsonl")
    assert replica_devices(config) == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]
    assert [replica_config(config, i).device for i in range(2)] == ["cuda:0", "cuda:2"]
    assert [replica_config(config, i).trace_path for i in range(2)] == ["to/run-0.jsonl", "to/run-1.jsonl"]
    assert replica_devices(replace(config, device="cuda:1"))[1] == ["cuda:3", "cuda:4"]
    with pytest.raises(ValueError, match="needs 2 GPUs for each replica, and there are 5: set data_parallel_size=2"):
        replica_devices(replace(config, data_parallel_size=3))
    with pytest.raises(ValueError, match="there are 3 from cuda:2 on: set data_parallel_size=1"):
        replica_devices(replace(config, device="cuda:2"))
    alone = replace(config, data_parallel_size=1)
    assert replica_config(alone, 0) == alone


def test_info_says_what_each_replica_has(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model": reference("qwen3").path, "device": "cpu", "dtype": "float32"}
    assert describe_model(EngineConfig(**settings))[0][0] == "architecture"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    [row, *_] = describe_model(EngineConfig(**settings, data_parallel_size=3))
    assert row == ("replicas", "3", "each has all that follows, and 2 of the CPU's 8 threads")


def test_main_memory_is_divided_among_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teachllm.worker.memory_plan._free_ram", lambda: 40 << 20)
    rows = {}
    for count in (1, 2):
        found = describe_model(EngineConfig(model=reference("qwen3").path, device="cpu", data_parallel_size=count))
        rows[count] = dict((what, amount) for what, amount, _ in found)
    assert rows[1]["budget"] == "36.0 MiB" and rows[2]["budget"] == "18.0 MiB"
    assert json.dumps(rows[1]["weights"]) == json.dumps(rows[2]["weights"])
