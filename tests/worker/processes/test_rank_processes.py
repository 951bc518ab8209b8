"""Ranks that are processes: the same tokens, the bytes that were predicted, and every way to end.

What ranks and engine say to each other, and what comes of it when something fails, test_ranks.py shows with threads.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import time
from contextlib import closing
from typing import Any

import pytest

from teachllm import SamplingParams
from teachllm.core.scheduler_output import SchedulerOutput
from teachllm.engine.async_llm import AsyncLLM
from teachllm.engine.llm_engine import Engine
from teachllm.trace.recorder import Recorder
from teachllm.worker.errors import EngineDeadError
from teachllm.worker.processes.multiprocess import MultiprocessExecutor, RemoteStep
from tests.engine import streams
from tests.engine.streams import all_hear_that
from tests.processes import children, is_gone, num_descriptors, num_rings
from tests.thorough import THOROUGH, times
from tests.waiting import HANG_SECONDS, wait_for
from tests.worker.engines import drain, make_engine, random_ids, tiny, tokens
from tests.worker.processes.kill import kill_a_rank, program
from tests.worker.processes.process_trees import needs_proc

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
pytestmark = needs_proc


def run(engine: Engine) -> list[list[list[int]]]:
    params = [GREEDY, SEEDED, GREEDY]
    outputs = [engine.add_request(str(i), random_ids(9 + 20 * i, seed=i), each) for i, each in enumerate(params)]
    drain(engine)
    return [tokens(output) for output in outputs]


def traced(**settings: Any) -> tuple[Engine, list[str]]:
    lines: list[str] = []
    return make_engine(recorder=Recorder(lines.append, time.perf_counter), **settings), lines


def executor_of(engine: Engine) -> MultiprocessExecutor:
    executor = engine.core.executor
    assert isinstance(executor, MultiprocessExecutor)
    return executor


def processes_of(engine: Engine) -> list[subprocess.Popen[bytes]]:
    return list(executor_of(engine)._ranks.processes)


def assert_sent_as_predicted(lines: list[str], layout: list[int]) -> None:
    """Compare what every rank has counted with what was predicted. `layout`: the stage of each rank."""
    steps = [line for line in map(json.loads, lines) if line["event"] == "step"]
    assert len(steps) >= 20
    for step in steps:
        assert [told["stage"] for told in step["ranks"]] == layout
        for told in step["ranks"]:
            assert told["sent"] == told["expected"] and told["sent"]


async def kill_while_answering(llm: AsyncLLM, rank: int, process: subprocess.Popen[bytes]) -> None:
    """Kill a rank when every request has its first token: each is answered with an error that says why."""
    answers = [llm.generate(random_ids(9, seed=i), LONG) for i in range(4)]
    for each in answers:
        await anext(each)
    process.kill()
    await all_hear_that(f"^the process of rank {rank} has ended with SIGKILL$", answers)


@pytest.mark.parametrize("is_killed", [True, False][: times(1, 2)])
def test_two_ranks_give_what_one_process_gives_survive_signals_and_leave_nothing(is_killed: bool) -> None:
    expected = run(make_engine())
    gc.collect()
    before = num_descriptors(), num_rings(os.getpid())
    engine, lines = traced(**TWO, async_scheduling=True)
    with closing(engine):
        processes = processes_of(engine)
        assert num_rings(os.getpid()) == before[1] + 1
        assert run(engine) == expected
        for number in (signal.SIGTERM, signal.SIGINT):  # as a shell sends them to all
            for process in processes:
                process.send_signal(number)
        assert run(engine) == expected
        assert_sent_as_predicted(lines, [0, 0])
        if is_killed:
            with closing(AsyncLLM(engine)) as llm:
                streams.run(kill_while_answering(llm, 1, processes[1]))
    codes = [process.returncode for process in processes]
    assert codes[0] is not None and codes[1] == -signal.SIGKILL if is_killed else codes == [0, 0]
    assert (num_descriptors(), num_rings(os.getpid())) == before


def end_in_a_batch(engine: Engine, rank: int, num_steps: int, *, is_killed: bool) -> None:
    """End a rank after so many more steps, killed or as if its parent had ended, and look at what is left."""
    executor, processes = executor_of(engine), processes_of(engine)
    inner, executed = executor.execute, 0

    def execute(plan: SchedulerOutput) -> RemoteStep:
        nonlocal executed
        executed += 1
        step = inner(plan)
        if executed == num_steps and is_killed:
            processes[rank].kill()
        elif executed == num_steps:
            assert processes[rank].stdin is not None
            processes[rank].stdin.close()
        return step

    executor.execute = execute  # type: ignore[method-assign]
    for i in range(4):
        engine.add_request(str(i), random_ids(9, seed=i), LONG)
    for _ in range(2):
        how = "SIGKILL" if is_killed else "exit code 1"
        with pytest.raises(EngineDeadError, match=f"^the process of rank {rank} has ended with {how}$"):
            drain(engine)
    wait_for(lambda: all(process.poll() is not None for process in processes))


@pytest.mark.skipif(
    not THOROUGH, reason="stages are threads in test_ranks.py; a replica's parent is gone in test_expert_parallel.py"
)
def test_two_stages_give_what_one_process_gives_and_one_whose_parent_is_gone_ends_the_batch_with_an_error() -> None:
    expected = run(make_engine())
    gc.collect()
    before = num_descriptors(), num_rings(os.getpid()), children(os.getpid())
    engine, lines = traced(**STAGES)
    with closing(engine):
        assert run(engine) == expected
        assert_sent_as_predicted(lines, [0, 1])
        end_in_a_batch(engine, 0, 7, is_killed=False)
    assert (num_descriptors(), num_rings(os.getpid()), children(os.getpid())) == before


@pytest.mark.skipif(not THOROUGH, reason="the first test of this file kills a rank while it answers")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_in_a_batch_ends_it_with_an_error(rank: int) -> None:
    gc.collect()
    before = num_descriptors(), num_rings(os.getpid()), children(os.getpid())
    with closing(make_engine(**TWO)) as engine:
        end_in_a_batch(engine, rank, 7, is_killed=True)
    assert (num_descriptors(), num_rings(os.getpid()), children(os.getpid())) == before


@pytest.mark.skipif(not THOROUGH, reason="what the program does then is Python's to say")
@pytest.mark.parametrize(
    ("ranks", "rank", "num_steps"),
    [(TWO, 0, 2), (STAGES, 1, 33)],
    ids=["tp=2, the first, early", "pp=2, the second, late"],
)
def test_a_program_ends_with_the_reason_when_a_rank_is_killed_in_a_batch(
    ranks: dict[str, Any], rank: int, num_steps: int
) -> None:
    """tests/server/deaths.py does it twenty times in a row."""
    kill_a_rank(rank, num_steps, **ranks)


_PARENT = """
import time
from teachllm.config import EngineConfig
from teachllm.engine.llm_engine import Engine
engine = Engine(EngineConfig(**{settings!r}), own_process=True)
print(engine._core._links[0].process.pid, flush=True)
time.sleep({hang})
"""


@pytest.mark.skipif(not THOROUGH, reason="in test_expert_parallel.py their input ends, as it does then")
def test_a_core_and_its_rank_end_when_the_program_is_killed() -> None:
    """The core, since its standard input has ended, and the rank, since the core's has."""
    settings = tiny(distributed_executor_backend="mp")
    with program(_PARENT.replace("{hang}", str(HANG_SECONDS)), settings) as parent:
        assert parent.stdout is not None
        core = int(parent.stdout.readline())
        [rank] = children(core)
        assert not is_gone(core) and not is_gone(rank)
        parent.kill()
    wait_for(lambda: is_gone(core) and is_gone(rank))
