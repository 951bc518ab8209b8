"""Ranks on several machines: the same tokens, and the end of one is the end of all. One machine here is a thread, or a
process tree as a user starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from typer.testing import CliRunner

from teachllm import SamplingParams
from teachllm.distributed.rendezvous import keep_store
from teachllm.engine.llm_engine import Engine
from teachllm.worker.errors import EngineDeadError
from teachllm_cli.app import app
from tests.processes import children, is_gone, open_files
from tests.programs import start_program
from tests.thorough import THOROUGH
from tests.waiting import HANG_SECONDS, wait_for
from tests.worker.engines import drain, make_engine, random_ids, tiny, tokens
from tests.worker.processes.child_threads import ranks_in_threads
from tests.worker.processes.kill import program
from tests.worker.processes.process_trees import free_port, needs_proc

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
NAME = socket.gethostname()


@contextmanager
def machine(port: int) -> Iterator[subprocess.Popen[str]]:
    """A worker as a user starts it."""
    command = ("-m", "teachllm_cli", "worker", "--join", f"tcp://127.0.0.1:{port}")
    with start_program(*command, environment={"TEACHLLM_SECRET": "sesame"}, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def run(engine: Engine) -> list[list[list[int]]]:
    outputs = [engine.add_request(str(i), random_ids(9 + 8 * i, seed=i), GREEDY) for i in range(3)]
    drain(engine)
    return [tokens(output) for output in outputs]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHLLM_SECRET", "sesame")


def test_two_machines_give_what_one_process_gives_and_end_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)
    keep_store("127.0.0.1", 1.0)  # what PyTorch opens with the first one it keeps open
    expected, port, before = run(make_engine()), free_port(), open_files()
    with ThreadPoolExecutor(1) as thread:
        address = f"tcp://127.0.0.1:{port}"
        there = thread.submit(CliRunner().invoke, app, ["worker", "--join", address])
        with closing(make_engine(nnodes=2, master_port=port, pipeline_parallel_size=2)) as engine:
            assert run(engine) == expected  # which the other machine says
        result = there.result(HANG_SECONDS)
    assert result.exit_code == 0
    assert f"joining the engine at {address}\n" in result.stderr and "ranks here: 1\n" in result.stderr
    assert not open_files() - before


@needs_proc
@pytest.mark.skipif(not THOROUGH, reason="test_rank_processes.py kills a rank, and in test_joining.py machines end")
@pytest.mark.parametrize("whose", ["there", "here"])
def test_a_rank_that_is_killed_ends_all_on_both_machines(whose: str) -> None:
    expected, port = run(make_engine()), free_port()
    with machine(port) as there, closing(make_engine(nnodes=2, master_port=port, tensor_parallel_size=2)) as engine:
        assert run(engine) == expected
        engine.add_request("a", random_ids(9), LONG)
        for _ in range(5):
            engine.step()
        [rank], [own] = children(there.pid), engine.core.executor._ranks._local.processes  # type: ignore[attr-defined]
        if whose == "there":
            os.kill(rank, signal.SIGKILL)
            why = f"on {NAME} the process of rank 1 has ended with SIGKILL"
            with pytest.raises(EngineDeadError, match=f"^{why}$"):
                drain(engine)
        else:  # nobody steps
            own.kill()
            why = "the process of rank 0 has ended with SIGKILL"
        assert there.wait(HANG_SECONDS) == 1 and there.stderr is not None
        wait_for(lambda: is_gone(rank) and is_gone(own.pid))
        said = there.stderr.read()
        assert f"joining the engine at tcp://127.0.0.1:{port}\n" in said and "ranks here: 1\n" in said
        assert said.endswith(f"error: {why.removeprefix(f'on {NAME} ')}\n")
        with pytest.raises(EngineDeadError, match=f"^{why}$"):
            engine.step()


_PARENT = """
from teachllm.engine.llm_engine import Engine
from teachllm.config import EngineConfig
engine = Engine(EngineConfig(**{settings!r}))
print("ready", flush=True)
engine.add_request("a", [1, 2, 3])
while True:
    engine.step()
"""


@needs_proc
@pytest.mark.skipif(not THOROUGH, reason="test_joining.py cuts the connection of one that is a thread")
def test_a_machine_ends_when_the_engine_is_killed() -> None:
    port = free_port()
    settings = tiny(tensor_parallel_size=2, nnodes=2, master_port=port)
    with machine(port) as there:
        with program(_PARENT, settings) as engine:
            assert engine.stdout is not None and engine.stdout.readline() == "ready\n"
            pids = [*children(engine.pid), *children(there.pid)]
            assert len(pids) == 2
            engine.kill()
        assert there.wait(HANG_SECONDS) == 1 and there.stderr is not None
        assert there.stderr.read().endswith(f"error: the engine at tcp://127.0.0.1:{port} has gone\n")
    wait_for(lambda: all(map(is_gone, pids)))
