"""An engine with ranks, here threads: the same tokens, failed steps, interrupts, and nothing left behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from teachllm import EngineConfig, SamplingParams
from teachllm.core.scheduler_output import ScheduledRequest, SchedulerOutput
from teachllm.engine.llm_engine import Engine
from teachllm.worker.errors import EngineDeadError
from teachllm.worker.processes import rank_processes
from teachllm.worker.processes.answers import Answers, Kind
from teachllm.worker.processes.child import LENGTH
from teachllm.worker.processes.multiprocess import MultiprocessExecutor
from teachllm.worker.processes.rank_processes import RankProcesses
from teachllm.worker.processes.worker_process import WorkerStart
from tests.processes import num_descriptors
from tests.waiting import wait_for
from tests.worker.engines import VARIED, drain, make_engine, random_ids, tiny, tokens
from tests.worker.processes.child_threads import ChildThread, loading, patched, ranks_in_threads

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
MP = {"distributed_executor_backend": "mp"}
TWO = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # so that a collection looks at what the tests have made alone
    with patched(ranks_in_threads):
        yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def two(threads: None) -> Iterator[Engine]:
    with closing(make_engine(**TWO, async_scheduling=True)) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    """The tokens of one process."""
    return [tokens(output) for output in run(make_engine(), [GREEDY, GREEDY])]


def executor_of(engine: Engine) -> MultiprocessExecutor:
    executor = engine.core.executor
    assert isinstance(executor, MultiprocessExecutor)
    return executor


def ranks_of(engine: Engine) -> Sequence[Any]:
    """Return what stands for the processes."""
    ranks = executor_of(engine)._ranks
    assert isinstance(ranks, RankProcesses)
    return ranks.processes


def run(engine: Engine, params: list[SamplingParams]) -> list[Any]:
    outputs = [engine.add_request(str(i), random_ids(9 + 8 * i, seed=i), each) for i, each in enumerate(params)]
    drain(engine)
    return outputs


def open_descriptors() -> int:
    gc.collect()  # what a thread has mapped goes with its objects
    return num_descriptors()


def first_plan() -> SchedulerOutput:
    """Return what an engine plans first."""
    engine = make_engine()
    engine.add_request("a", random_ids(9), GREEDY)
    return engine.core.scheduler.schedule()


# -- the same tokens ---------------------------------------------------------------------------------------


def test_ranks_give_what_one_process_gives_with_plans_in_flight() -> None:
    with closing(make_engine(**TWO, async_scheduling=True)) as two:
        remote = run(two, VARIED)
    for here, there in zip(run(make_engine(), VARIED), remote, strict=True):
        assert tokens(here) == tokens(there)
        assert [list(each or ()) for each in here.prompt_logprobs or ()] == [
            list(each or ()) for each in there.prompt_logprobs or ()
        ]
        for mine, its in zip(here.outputs, there.outputs, strict=True):
            assert [list(each) for each in mine.logprobs or ()] == [list(each) for each in its.logprobs or ()]


def test_an_engine_that_waits_awake_gives_the_same(
    two: Engine, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = executor_of(two)._ranks
    assert isinstance(ranks, RankProcesses) and ranks._spin_seconds == 0
    monkeypatch.setattr(ranks, "_spin_seconds", 0.002)  # some steps take longer
    assert [tokens(each) for each in run(two, [GREEDY, GREEDY])] == expected


@pytest.mark.parametrize("ranks", [MP, STAGES], ids=["one rank", "two stages"])
def test_drafts_found_on_the_host_are_verified_elsewhere(ranks: dict[str, Any]) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    prompt, found = random_ids(6) * 5, []
    for settings in ({}, ranks | {"speculative_config": speculation}):
        with closing(make_engine(**settings)) as engine:
            engine.count()
            output = engine.add_request("a", prompt, LONG)
            drain(engine)
            found.append(tokens(output))
            stats = engine.stats()
    assert found[0] == found[1]
    assert stats is not None and stats.num_draft_tokens > 0


# -- steps that fail, and Ctrl-C ---------------------------------------------------------------------------


def test_a_step_that_fails_is_told_with_its_rank_and_the_ranks_go_on(two: Engine) -> None:
    executor = executor_of(two)
    row = next(iter(first_plan().scheduled))
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


@pytest.mark.parametrize("ahead", [False, True])
def test_the_engine_takes_a_failed_step_back_and_gives_the_same_tokens(
    ahead: bool, expected: list[list[list[int]]]
) -> None:
    with closing(make_engine(async_scheduling=ahead, **TWO)) as engine:
        executor, failing = executor_of(engine), {0, 5}
        execute = executor.execute

        def spoil(plan: SchedulerOutput) -> Any:
            if plan.step in failing:  # after the rows of new requests were opened
                failing.discard(plan.step)
                stranger = ScheduledRequest("nobody", 0, 1, [], True, 0, [])
                plan = replace(plan, scheduled=[*plan.scheduled, stranger])
            return execute(plan)

        executor.execute = spoil  # type: ignore[method-assign]
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


def test_ctrl_c_while_a_step_is_waited_for_loses_nothing(
    two: Engine, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = executor_of(two)._ranks
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
    outputs = [two.add_request(str(i), random_ids(9 + 8 * i, seed=i), GREEDY) for i in range(2)]
    num_interrupts = 0
    while two.has_unfinished_requests:
        try:
            two.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts > 5 and [tokens(output) for output in outputs] == expected


@pytest.mark.parametrize("where", ["read", "write"])
def test_ctrl_c_in_the_middle_of_a_message_is_the_end(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(make_engine(**TWO)) as engine:
        engine.add_request("x", random_ids(5), GREEDY)
        uninterrupted, this_thread = getattr(os, where), threading.current_thread()

        def interrupted(*arguments: Any) -> Any:
            if threading.current_thread() is not this_thread:
                return uninterrupted(*arguments)
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(os, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        with pytest.raises(EngineDeadError, match=r"^interrupted in the middle of a message$"):
            engine.step()


def test_what_was_sampled_elsewhere_must_be_learned() -> None:
    with closing(make_engine(**STAGES)) as engine:
        executor = executor_of(engine)
        executor._sampled_tokens.append((99, [[1]]))  # of a step that nobody took
        with pytest.raises(EngineDeadError, match="the process of rank 0 has ended with exit code 1"):
            executor.execute(first_plan()).result()


# -- beginning and end -------------------------------------------------------------------------------------


def test_progress_is_told_and_closing_leaves_nothing_behind() -> None:
    before, seen = open_descriptors(), list[tuple[str, int, int]]()
    settings = tiny(**TWO)
    config = EngineConfig(**settings | {"model": Path(settings["model"])})
    engine = Engine(config, progress=lambda *numbers: seen.append(numbers))
    assert engine.config.model == settings["model"]
    assert seen[-1][0] == "weights" and seen[-1][1] == seen[-1][2] > 0 and engine.core.executor.num_blocks == 120
    ranks = ranks_of(engine)
    run(engine, [GREEDY])
    engine.close()
    engine.close()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert open_descriptors() == before
    with pytest.raises(RuntimeError, match=r"^the engine is closed$"):
        engine.add_request("a", random_ids(4), GREEDY)
        engine.step()


def test_an_engine_that_nobody_closes_leaves_no_rank() -> None:
    before = open_descriptors()
    engine = make_engine(**TWO)
    ranks = ranks_of(engine)
    del engine
    gc.collect()
    assert [rank.returncode for rank in ranks] == [0, 0] and open_descriptors() == before


def test_what_a_rank_refuses_is_refused_in_the_words_of_one_process() -> None:
    before, changes = open_descriptors(), {"num_gpu_blocks_override": 10**9}
    with pytest.raises(ValueError) as here:
        make_engine(**changes)
    with pytest.raises(type(here.value)) as there:
        make_engine(**changes, **TWO)
    assert str(there.value).split(" does not fit")[0] == str(here.value).split(" does not fit")[0]
    del there
    assert open_descriptors() == before


def ready(child: ChildThread) -> None:
    """Say that it has loaded, and nothing more until it is killed."""
    start = WorkerStart(*json.loads(child.read(*LENGTH.unpack(child.read(LENGTH.size)))))
    Answers(child.copies[start.answers]).say(Kind.READY, 120)
    child.killed.wait()


def put_in_place(patch: pytest.MonkeyPatch, started: list[ChildThread], *does: Callable[[ChildThread], object]) -> None:
    """Have ranks do this; an error is raised instead of starting one."""

    def start(module: str, *, pass_fds: Sequence[int], environment: Any) -> ChildThread:
        what = does[len(started)]
        started.append(ChildThread(what, pass_fds))
        return started[-1]

    patch.setattr(rank_processes, "start_child", start)


def test_a_rank_that_is_killed_while_it_loads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before, started = open_descriptors(), list[ChildThread]()
    put_in_place(monkeypatch, started, loading, lambda child: child.kill())
    with pytest.raises(EngineDeadError, match=r"^the process of rank 1 has ended with SIGKILL$"):
        make_engine(**TWO)
    assert [rank.returncode for rank in started] == [-signal.SIGKILL] * 2 and open_descriptors() == before


def test_a_rank_that_is_killed_while_idle_ends_the_others_and_every_later_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = list[ChildThread]()
    put_in_place(monkeypatch, started, ready, ready)
    with closing(make_engine(**TWO)) as engine:
        started[0].kill()
        wait_for(lambda: started[1].poll() is not None)
        engine.add_request("b", random_ids(5), GREEDY)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="rank 0 has ended with SIGKILL"):
                engine.step()


def test_what_was_started_is_ended_if_another_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    before, started = open_descriptors(), list[ChildThread]()

    def start(*_: Any, **__: Any) -> ChildThread:
        if started:
            raise OSError("no more processes")
        started.append(ChildThread(loading))
        return started[0]

    monkeypatch.setattr(rank_processes, "start_child", start)
    with pytest.raises(OSError, match=r"^no more processes$"):
        make_engine(**TWO)
    assert started[0].returncode == -signal.SIGKILL and open_descriptors() == before


def test_ctrl_c_while_a_rank_is_started_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before, started = open_descriptors(), list[ChildThread]()

    def start(*_: Any, **__: Any) -> ChildThread:
        started.append(ChildThread(loading))
        signal.raise_signal(signal.SIGINT)  # it runs, and nobody has been told of it yet
        return started[-1]

    monkeypatch.setattr(rank_processes, "start_child", start)
    with pytest.raises(KeyboardInterrupt):
        make_engine(**TWO)
    assert [rank.returncode for rank in started] == [-signal.SIGKILL] and open_descriptors() == before


def test_ctrl_c_while_a_rank_is_told_what_to_load_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something is left in the pipe's buffer then, and cannot be written any more."""

    class Interrupted(SimpleNamespace):
        def flush(self) -> None:
            raise KeyboardInterrupt

    def start(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["true"], stdin=subprocess.PIPE)
        process.wait()
        assert process.stdin is not None
        process.stdin = Interrupted(write=process.stdin.write, close=process.stdin.close)  # type: ignore[assignment]
        return process

    monkeypatch.setattr(rank_processes, "start_child", start)
    with pytest.raises(KeyboardInterrupt):
        make_engine(**MP)


def test_ranks_are_ended_if_the_core_around_them_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    before, started = open_descriptors(), list[ChildThread]()
    put_in_place(monkeypatch, started, ready)
    monkeypatch.setattr("teachllm.engine.make_core.hash_root", lambda *_: 1 / 0)
    monkeypatch.setattr(rank_processes, "_SECONDS_TO_END", 0.01)  # it does not listen
    with pytest.raises(ZeroDivisionError):
        make_engine(**MP)
    assert started[0].poll() is not None and open_descriptors() == before
