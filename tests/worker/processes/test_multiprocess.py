"""Ranks in processes of their own: the same tokens, failed steps, refusals, and every way to end."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm import LLM, EngineConfig, SamplingParams
from teachllm.core.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from teachllm.distributed.group import CollectiveError
from teachllm.distributed.lockstep import Lockstep, close_ends, lockstep_ends
from teachllm.distributed.plan_codec import encode_output
from teachllm.distributed.rendezvous import Rendezvous
from teachllm.engine.async_llm import AsyncLLM
from teachllm.engine.llm_engine import Engine
from teachllm.models.model_config import load_model_config
from teachllm.spec_decode.step_times import Prior
from teachllm.worker.errors import EngineDeadError
from teachllm.worker.executor import Executor
from teachllm.worker.processes import multiprocess, worker_process
from teachllm.worker.processes.answers import Kind
from teachllm.worker.processes.child import start_child
from teachllm.worker.processes.multiprocess import MultiprocessExecutor, Peers, RemoteStep
from teachllm.worker.processes.rank_lines import Frame, RankWork
from teachllm.worker.processes.rank_processes import RankProcesses, devices_of
from teachllm.worker.processes.worker_process import prior_of, table_of
from tests.processes import children, is_gone, num_descriptors, num_rings
from tests.waiting import wait_for
from tests.worker.doors import drain, make_engine, random_ids, tiny, tokens
from tests.worker.processes.kill import kill_a_rank, program
from tests.worker.processes.process_trees import needs_proc

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
MP = {"distributed_executor_backend": "mp"}
TWO = {"tensor_parallel_size": 2}


def executor_of(engine: Engine) -> MultiprocessExecutor:
    executor = engine.core.executor
    assert isinstance(executor, MultiprocessExecutor)
    return executor


def pids_of(executor: MultiprocessExecutor) -> list[int]:
    return [process.pid for process in executor._ranks.processes]


def are_collected(pids: Sequence[int]) -> bool:
    """They have ended, and this process has asked how."""
    return set(pids).isdisjoint(children(os.getpid()))


def bad_plan(plan: SchedulerOutput) -> SchedulerOutput:
    """One that fails after the rows of those who are new were opened."""
    return replace(plan, scheduled=[*plan.scheduled, ScheduledRequest("nobody", 0, 1, [], True, 0, [])])


class Spoiler:
    """Passes everything on to an executor, but spoils the plans whose steps it is told."""

    def __init__(self, inner: Executor, steps: set[int]) -> None:
        self._inner, self._steps = inner, steps
        self.num_blocks, self.max_in_flight, self.sentinel = inner.num_blocks, inner.max_in_flight, inner.sentinel
        self.sample, self.close = inner.sample, inner.close

    def execute(self, plan: SchedulerOutput) -> Any:
        if plan.step in self._steps:
            self._steps.discard(plan.step)
            plan = bad_plan(plan)
        return self._inner.execute(plan)


class Scripted:
    """`RankLines` to two ranks that exist in a test alone.

    Attributes:
        script: what is to be received, in turn: a frame, or an error that is raised instead.
    """

    sentinel = -1

    def __init__(self, config: EngineConfig) -> None:
        self.frames, self.script = deque[Frame](), deque[Frame | BaseException]()
        self.death: str | None = None

    def start(self, work: RankWork) -> None:
        self.frames.extend((rank, Kind.READY, 0, b"120") for rank in range(work.config.num_ranks))

    def write(self, message: bytes) -> None:
        assert self.death is None

    def receive(self, seconds: float | None = None) -> None:
        if self.death is not None:
            raise EngineDeadError(self.death)
        said = self.script.popleft()
        if isinstance(said, BaseException):
            raise said
        self.frames.append(said)

    def end(self, why: str) -> None:
        self.death = self.death or why

    def kill(self) -> None:
        """There is nobody."""

    close = kill


def scripted(monkeypatch: pytest.MonkeyPatch, peers: Peers | None = None) -> tuple[MultiprocessExecutor, Scripted]:
    monkeypatch.setattr(multiprocess, "lines_to_ranks", Scripted)
    executor = MultiprocessExecutor(EngineConfig(**tiny(**TWO)), peers=peers)
    ranks = executor._ranks
    assert isinstance(ranks, Scripted)
    return executor, ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Engine]:
    with closing(make_engine(**TWO, async_scheduling=True)) as engine:
        yield engine


def run(engine: Engine, params: list[SamplingParams]) -> list[Any]:
    outputs = [engine.add_request(str(i), random_ids(9 + 8 * i, seed=i), each) for i, each in enumerate(params)]
    drain(engine)
    return outputs


def test_ranks_give_what_one_process_gives_with_plans_in_flight(two: Engine) -> None:
    params = [
        GREEDY,
        SamplingParams(n=3, seed=2**70 + 3, max_tokens=9, logprobs=2, prompt_logprobs=1),
        SamplingParams(seed=-5, max_tokens=9, logit_bias={3: 2.5}, min_tokens=4, allowed_token_ids=range(40)),
        SamplingParams(max_tokens=9, temperature=0.7, top_k=20, repetition_penalty=1.2, stop_token_ids=[7]),
    ]
    for here, there in zip(run(make_engine(), params), run(two, params), strict=True):
        assert tokens(here) == tokens(there)
        assert [list(each or ()) for each in here.prompt_logprobs or ()] == [
            list(each or ()) for each in there.prompt_logprobs or ()
        ]
        for mine, its in zip(here.outputs, there.outputs, strict=True):
            assert [list(each) for each in mine.logprobs or ()] == [list(each) for each in its.logprobs or ()]


def test_a_signal_that_is_sent_to_all_processes_ends_no_rank(two: Engine) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        for process in executor_of(two)._ranks.processes:
            process.send_signal(number)
        run(two, [GREEDY])


def test_an_engine_that_waits_awake_gives_the_same(two: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = executor_of(two)._ranks
    assert isinstance(ranks, RankProcesses) and ranks._spin_seconds == 0
    monkeypatch.setattr(ranks, "_spin_seconds", 0.002)  # some steps take longer
    for here, there in zip(run(make_engine(), [GREEDY] * 3), run(two, [GREEDY] * 3), strict=True):
        assert tokens(here) == tokens(there)


def test_a_step_that_fails_is_told_with_its_rank_and_the_ranks_go_on(two: Engine) -> None:
    executor = executor_of(two)
    row = next(iter(_first_plan().scheduled))
    good, bad = SchedulerOutput(0, [row]), SchedulerOutput(1, [replace(row, request_id="x", new_row=None)])
    after = SchedulerOutput(2, [replace(row, request_id="y")], dropped=["a"])
    pending = [executor.sample(executor.execute(plan)) for plan in (good, bad, after)]  # three in flight
    first = pending[0].result()
    for _ in range(2):  # it may be asked for again
        with pytest.raises(RuntimeError, match=r"^rank \d: KeyError: 'x'$"):
            pending[1].result()
    with pytest.raises(RuntimeError, match=r"^rank \d: RuntimeError: not computed, since a step before it failed$"):
        pending[2].result()
    again = replace(after, step=3)
    assert executor.sample(executor.execute(again)).result() == first
    executor.execute(SchedulerOutput(4, [replace(row, request_id="z")], dropped=["y"]))  # nobody asks for this one
    last = executor.execute(SchedulerOutput(5, [replace(row, request_id="w")], dropped=["z"]))
    assert executor.sample(last).result() == first
    assert executor._call("meet") == {0: {}, 1: {}}
    two.core.scheduler._dropped.append("w")


def _first_plan() -> SchedulerOutput:
    """What an engine plans first."""
    engine = make_engine()
    engine.add_request("a", random_ids(9), GREEDY)
    return engine.core.scheduler.schedule()


@pytest.mark.parametrize("ahead", [False, True])
def test_the_engine_takes_a_failed_step_back_and_gives_the_same_tokens(ahead: bool) -> None:
    expected = [tokens(output) for output in run(make_engine(), [GREEDY, GREEDY])]
    engine = make_engine(make_executor=lambda config, inner: Spoiler(inner, {0, 5}), async_scheduling=ahead, **TWO)
    with closing(engine):
        outputs = [engine.add_request(str(i), random_ids(9 + 8 * i, seed=i), GREEDY) for i in range(2)]
        failures = 0
        while engine.has_unfinished_requests:
            try:
                engine.step()
            except EngineDeadError:
                raise
            except RuntimeError as error:
                assert "KeyError: 'nobody'" in str(error)
                failures += 1
        assert failures == 2 and [tokens(output) for output in outputs] == expected


def test_a_rank_that_does_not_come_out_of_a_failed_step_is_named_and_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teachllm.worker.processes.multiprocess._SECONDS_TO_COME_OUT", 1.0)
    with closing(make_engine(**TWO)) as engine:
        executor = executor_of(engine)
        stopped = executor._ranks.processes[1]
        stopped.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="KeyError: 'nobody'; and rank 1 did not come out of that step"):
            executor.execute(bad_plan(_first_plan())).result()
        wait_for(lambda: stopped.poll() is not None, 5)


def test_a_rank_that_fails_in_a_step_that_another_completed_is_named_and_all_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, ranks = scripted(monkeypatch)
    output = ModelRunnerOutput([[5]])
    ranks.script.append((0, Kind.OUTPUT, 1, encode_output(output)))
    assert executor.execute(_first_plan()).result() == output
    ranks.script += [(1, Kind.FAILED, 1, b'"KeyError: 7"'), (0, Kind.OUTPUT, 2, encode_output(output))]
    later = executor.execute(_first_plan())
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"^rank 1 failed in a step that the others completed: KeyError: 7$"):
            later.result()


def test_an_answer_to_a_call_that_ctrl_c_ended_is_not_taken_for_one_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, ranks = scripted(monkeypatch)
    step = executor.execute(_first_plan())
    ranks.script += [(0, Kind.FAILED, 1, b'"KeyError: 7"'), KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        step.result()  # in the middle of call 2, by which the ranks meet
    ranks.script += [(rank, Kind.RESULT, number, b"{}") for number in (2, 3) for rank in (0, 1)]
    with pytest.raises(RuntimeError, match=r"^rank 0: KeyError: 7$"):
        step.result()
    assert not ranks.script  # it has waited for the answers to call 3


def test_a_plan_that_cannot_be_told_is_no_step_that_other_replicas_wait_in(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = lockstep_ends(2)
    try:
        mine, other = map(Lockstep, ends)
        executor, _ = scripted(monkeypatch, Peers(0, Rendezvous("127.0.0.1", 1, None), mine))
        row = replace(_first_plan().scheduled[0], start=2**63)
        with pytest.raises(OverflowError):
            executor.execute(SchedulerOutput(0, [row]))
        assert other.hear() and not other.is_behind
        executor.execute(_first_plan())
        assert other.hear() and other.is_behind
    finally:
        close_ends(ends)


def test_what_was_sampled_elsewhere_must_be_learned() -> None:
    with closing(make_engine(pipeline_parallel_size=2)) as engine:
        executor = executor_of(engine)
        executor._sampled_tokens.append((99, [[1]]))  # of a step that nobody took
        with pytest.raises(EngineDeadError, match="the process of rank 0 has ended with exit code 1"):
            executor.execute(_first_plan()).result()


def test_ctrl_c_while_a_step_is_waited_for_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [tokens(output) for output in run(make_engine(), [GREEDY, GREEDY])]
    with closing(make_engine(**TWO)) as engine:
        ranks = executor_of(engine)._ranks
        receive, num_calls = ranks.receive, 0

        def interrupted(seconds: float | None = None) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls % 5 == 2:
                raise KeyboardInterrupt
            receive(seconds)
            if num_calls % 5 == 4:
                raise KeyboardInterrupt

        monkeypatch.setattr(ranks, "receive", interrupted)
        outputs = [engine.add_request(str(i), random_ids(9 + 8 * i, seed=i), GREEDY) for i in range(2)]
        num_interrupts = 0
        while engine.has_unfinished_requests:
            try:
                engine.step()
            except KeyboardInterrupt:
                num_interrupts += 1
        assert num_interrupts > 5 and [tokens(output) for output in outputs] == expected


@pytest.mark.parametrize("where", ["os.read", "os.write"])
def test_ctrl_c_in_the_middle_of_a_message_is_the_end(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(make_engine(**TWO)) as engine:
        run(engine, [GREEDY])
        engine.add_request("x", random_ids(5), GREEDY)

        def interrupted(*_: Any) -> Any:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        with pytest.raises(EngineDeadError, match=r"^interrupted in the middle of a message$"):
            engine.step()


def test_an_engine_that_nobody_closes_leaves_no_process() -> None:
    gc.collect()
    before = num_descriptors()
    engine = make_engine(**TWO)
    run(engine, [GREEDY])
    pids = pids_of(executor_of(engine))
    del engine
    gc.collect()
    assert are_collected(pids) and num_descriptors() == before


@pytest.mark.parametrize("ranks", [MP, {"pipeline_parallel_size": 2}], ids=["one rank", "two stages"])
def test_drafts_found_on_the_host_are_verified_elsewhere(ranks: dict[str, Any]) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    prompt = random_ids(6) * 5
    found = []
    for settings in ({}, ranks | {"speculative_config": speculation}):
        with closing(make_engine(**settings)) as engine:
            engine.count()
            output = engine.add_request("a", prompt, LONG)
            drain(engine)
            found.append(tokens(output))
            stats = engine.stats()
    assert found[0] == found[1]
    assert stats is not None and stats.num_draft_tokens > 0


def test_progress_is_told_and_closing_leaves_nothing_behind() -> None:
    before, seen = num_descriptors(), list[tuple[int, int]]()
    engine = Engine(EngineConfig(**tiny(**TWO)), progress=lambda *numbers: seen.append(numbers))
    executor = executor_of(engine)
    assert seen[-1][0] == seen[-1][1] > 0 and executor.num_blocks == 120
    processes = executor._ranks.processes
    run(engine, [GREEDY])
    engine.close()
    engine.close()
    assert [process.returncode for process in processes] == [0, 0]
    assert num_descriptors() == before
    with pytest.raises(RuntimeError, match=r"^the engine is closed$"):
        engine.add_request("a", random_ids(4), GREEDY)
        engine.step()


def resolved(**changes: Any) -> EngineConfig:
    config = EngineConfig(**tiny(**changes))
    return config.resolve(load_model_config(config).max_model_len)


def test_what_a_rank_refuses_is_refused_in_the_words_of_one_process() -> None:
    before, changes = num_descriptors(), {"num_gpu_blocks_override": 10**9}
    with pytest.raises(ValueError) as here:
        make_engine(**changes)
    with pytest.raises(type(here.value)) as there:
        make_engine(**changes, **TWO)
    assert str(there.value).split(" does not fit")[0] == str(here.value).split(" does not fit")[0]
    assert num_descriptors() == before


class _Disagreeing(RankProcesses):
    """Rank 1 is started with other settings."""

    def _config_of(self, rank: int, work: RankWork, device: str) -> EngineConfig:
        return replace(super()._config_of(rank, work, device), block_size=16 * (1 + rank))


class _Older(MultiprocessExecutor):
    """Rank 1 says that it has another PyTorch."""

    def _take(self, rank: int, kind: Kind, number: int, content: bytes) -> None:
        if kind is Kind.FACTS and rank == 1:
            content = json.dumps(json.loads(content) | {"torch": "1.0"}).encode()
        super()._take(rank, kind, number, content)


class _Watched(MultiprocessExecutor):
    """Does something as soon as all processes are started."""

    then: Callable[[Sequence[subprocess.Popen[bytes]]], None]

    def _start(self, times_steps: bool) -> None:
        super()._start(times_steps)
        type(self).then(self._ranks.processes)


def test_what_was_started_is_ended_if_another_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    before, started = num_descriptors(), list[subprocess.Popen[bytes]]()

    def start(*arguments: Any, **more: Any) -> subprocess.Popen[bytes]:
        if started:
            raise OSError("no more processes")
        started.append(start_child(*arguments, **more))
        return started[0]

    monkeypatch.setattr("teachllm.worker.processes.rank_processes.start_child", start)
    with pytest.raises(OSError, match=r"^no more processes$"):
        MultiprocessExecutor(resolved(**TWO))
    assert started[0].returncode == -signal.SIGKILL and num_descriptors() == before


def test_ctrl_c_while_a_process_is_started_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before, started = num_descriptors(), list[subprocess.Popen[bytes]]()

    def start(*arguments: Any, **more: Any) -> subprocess.Popen[bytes]:
        started.append(start_child(*arguments, **more))
        signal.raise_signal(signal.SIGINT)  # it runs, and nobody has been told of it yet
        return started[-1]

    monkeypatch.setattr("teachllm.worker.processes.rank_processes.start_child", start)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in background, it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            MultiprocessExecutor(resolved(**TWO))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [process.returncode for process in started] == [-signal.SIGKILL] and num_descriptors() == before


def test_ranks_are_ended_if_the_core_around_them_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_descriptors()
    monkeypatch.setattr("teachllm.engine.make_core.hash_root", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_engine(**MP)
    assert num_descriptors() == before


def test_settings_may_be_paths() -> None:
    settings = tiny(**MP)
    with closing(Engine(EngineConfig(**settings | {"model": Path(settings["model"])}))) as engine:
        assert engine.config.model == settings["model"]


@pytest.mark.parametrize(
    ("name", "stand_in", "says"),
    [
        (
            "RankProcesses",
            _Disagreeing,
            "block_size: 16 at rank 0; 32 at rank 1: start all ranks with the same settings",
        ),
        (
            "MultiprocessExecutor",
            _Older,
            f"torch: '{torch.__version__}' at rank 0; '1.0' at rank 1: install the same everywhere",
        ),
    ],
    ids=["settings", "versions"],
)
def test_ranks_that_disagree_are_ended_and_what_differs_is_named(
    name: str, stand_in: type, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocess, name, stand_in)
    before = num_descriptors(), children(os.getpid())
    with pytest.raises(ValueError, match=f"^the ranks disagree about {re.escape(says)}$"):
        multiprocess.MultiprocessExecutor(resolved(**TWO))
    assert (num_descriptors(), children(os.getpid())) == before


@pytest.mark.parametrize("seconds", [0.0, 0.7])
def test_a_rank_that_is_killed_while_it_loads_is_named(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    before, pids = num_descriptors(), list[int]()

    def kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
        pids.extend(process.pid for process in processes)
        time.sleep(seconds)
        processes[1].kill()

    _Watched.then = staticmethod(kill)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1 has ended with SIGKILL"):
        _Watched(resolved(**TWO))
    assert time.monotonic() - began < 5 + seconds
    assert are_collected(pids) and num_descriptors() == before


def test_a_rank_that_is_killed_while_idle_ends_the_others_and_every_later_request() -> None:
    with closing(make_engine(**TWO)) as engine:
        run(engine, [GREEDY])
        executor = executor_of(engine)
        executor._ranks.processes[0].kill()
        wait_for(lambda: are_collected(pids_of(executor)), 5)
        engine.add_request("b", random_ids(5), GREEDY)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="rank 0 has ended with SIGKILL"):
                engine.step()


def test_a_rank_shows_where_it_failed_but_not_where_it_waited_for_one_that_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        worker_process._log("a step failed", CollectiveError("rank 0: all_reduce failed: closed by peer"))
        assert caplog.text == ""
        try:
            raise KeyError("nobody")
        except KeyError as error:
            worker_process._log("a step failed", error)
    assert "a step failed" in caplog.text and "Traceback" in caplog.text and "KeyError: 'nobody'" in caplog.text


def kill_in_a_batch(rank: int, num_steps: int, **settings: Any) -> None:
    before, rings = num_descriptors(), num_rings(os.getpid())
    llm = LLM(**tiny(**settings))
    assert num_rings(os.getpid()) == rings + 1
    executor = executor_of(llm.engine)
    pids, inner, executed = pids_of(executor), executor.execute, 0
    killed: list[float] = []

    def execute(plan: SchedulerOutput) -> RemoteStep:
        nonlocal executed
        executed += 1
        step = inner(plan)
        if executed == num_steps:
            killed.append(time.monotonic())
            os.kill(pids[rank], signal.SIGKILL)
        return step

    executor.execute = execute  # type: ignore[method-assign]
    prompts = [{"prompt_token_ids": random_ids(9, seed=i)} for i in range(4)]
    with pytest.raises(EngineDeadError, match=f"rank {rank} has ended with SIGKILL"):
        llm.generate(prompts, LONG, use_tqdm=False)
    with pytest.raises(EngineDeadError):
        llm.generate(prompts, LONG, use_tqdm=False)
    llm.close()
    assert time.monotonic() - killed[0] < 5
    assert are_collected(pids) and num_descriptors() == before and num_rings(os.getpid()) == rings


@pytest.mark.parametrize(("rank", "ranks"), [(0, TWO), (1, TWO), (0, {"pipeline_parallel_size": 2})], ids=str)
def test_a_rank_that_is_killed_in_a_batch_ends_it_with_an_error(rank: int, ranks: dict[str, Any]) -> None:
    kill_in_a_batch(rank, 7, **ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "rank", "num_steps"),
    [(TWO, 0, 2), ({"pipeline_parallel_size": 2}, 1, 33)],
    ids=["tp=2, the first, early", "pp=2, the second, late"],
)
def test_a_program_ends_with_the_reason_when_a_rank_is_killed_in_a_batch(
    ranks: dict[str, Any], rank: int, num_steps: int
) -> None:
    """tests/server/deaths.py does it twenty times in a row."""
    assert kill_a_rank(rank, num_steps, **ranks).of_requests < 5


_PARENT = """
import os, sys
from teachllm.engine.llm_engine import Engine
from teachllm.config import EngineConfig
engine = Engine(EngineConfig(**{settings!r}))
print(*[process.pid for process in engine.core.executor._ranks.processes], flush=True)
engine.add_request("a", [1, 2, 3])
while True:
    engine.step()
"""


def test_ranks_end_when_their_parent_is_killed() -> None:
    with program(_PARENT, tiny(**TWO)) as parent:
        assert parent.stdout is not None
        pids = list(map(int, parent.stdout.readline().split()))
        assert len(pids) == 2 and not any(map(is_gone, pids))
        parent.kill()
    wait_for(lambda: all(map(is_gone, pids)), 5)


@needs_proc
@pytest.mark.parametrize("busy", [False, True])
def test_a_server_s_engine_ends_with_the_reason_when_a_rank_is_killed(busy: bool) -> None:
    ended: list[Exception | None] = []

    async def main(llm: AsyncLLM, pid: int) -> None:
        stream = await llm.submit(random_ids(4), LONG) if busy else None
        if stream is not None:
            await anext(stream)
        os.kill(pid, signal.SIGKILL)
        if stream is not None:
            with pytest.raises(EngineDeadError, match="rank 0 has ended with SIGKILL"):
                async with asyncio.timeout(5):
                    async for _ in stream:
                        pass
            await stream.aclose()
        wait_for(lambda: bool(ended), 5)
        assert isinstance(ended[0], EngineDeadError) and "rank 0 has ended with SIGKILL" in str(ended[0])

    with closing(AsyncLLM.start(EngineConfig(**tiny(**MP)), on_end=ended.append)) as llm:
        core = llm._engine._core._links[0].process  # type: ignore[attr-defined]
        [worker] = children(core.pid)
        asyncio.run(main(llm, worker))
    assert core.returncode == 1


def test_each_rank_has_a_gpu_of_its_own_from_the_named_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert devices_of(EngineConfig(device="cuda", **TWO), 2) == ["cuda:0", "cuda:1"]
    assert devices_of(EngineConfig(device="cuda:2", **TWO), 2) == ["cuda:2", "cuda:3"]
    assert devices_of(EngineConfig(device="cpu", **TWO), 2) == ["cpu", "cpu"]
    with pytest.raises(
        ValueError, match=r"need 2 GPUs from cuda:3 on, and this machine has 4 .* tensor_parallel_size$"
    ):
        devices_of(EngineConfig(device="cuda:3", **TWO), 2)


def test_what_was_timed_crosses_as_a_table() -> None:
    prior = Prior(lambda count, level: count + level / 10, 0.25)
    found = prior_of(table_of(prior, 4, 3))
    assert found is not None and found.per_token_behind == 0.25 and prior_of({}) is None
    assert [found.ratio(count, 2) for count in (0, 1, 4, 9)] == [1.2, 1.2, 4.2, 4.2]
