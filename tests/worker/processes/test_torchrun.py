"""Ranks that torchrun starts: the same tokens, exit codes, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from teachllm import LLM, EngineConfig, SamplingParams
from teachllm.worker.processes.torchrun import plan_of_torchrun, works_for_process_0
from tests.processes import children, is_gone
from tests.programs import environment_with
from tests.thorough import THOROUGH
from tests.waiting import HANG_SECONDS, wait_for
from tests.worker.engines import random_ids, tiny
from tests.worker.processes.process_trees import free_port, needs_proc

TORCHRUN: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "torchrun"}


@contextmanager
def torchrun(*command: str) -> Iterator[subprocess.Popen[str]]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *launcher, *command], env=environment_with(), **pipes) as process:
        try:
            yield process
        finally:
            process.terminate()


_SCRIPT = """
import json
from teachllm import LLM, SamplingParams
llm = LLM(**{settings!r})
[output] = llm.generate([{{"prompt_token_ids": {prompt}}}], {greedy!r}, use_tqdm=False)
print(json.dumps(output.outputs[0].token_ids))
llm.close()
"""


@pytest.mark.skipif(not THOROUGH, reason="starts five processes; the tests below show what torchrun's do")
def test_one_command_runs_once_and_answers_as_one_process_does() -> None:
    settings, prompt = tiny(), random_ids(9)
    llm = LLM(**settings)
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    [expected] = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
    code = _SCRIPT.format(settings=settings | TORCHRUN, prompt=prompt, greedy=greedy)
    with torchrun("--no-python", sys.executable, "-c", code) as launcher:
        answer, said = launcher.communicate(timeout=HANG_SECONDS)
    assert launcher.returncode == 0, said
    assert [json.loads(line) for line in answer.splitlines()] == [expected.outputs[0].token_ids]


@needs_proc
@pytest.mark.skipif(not THOROUGH, reason="starts five processes; test_rank_processes.py kills a rank of two")
def test_a_rank_that_is_killed_ends_every_process_with_an_error() -> None:
    code = _SCRIPT.replace("[output]", "while True: [output]")
    code = code.format(settings=tiny(**TORCHRUN), prompt=random_ids(9), greedy=SamplingParams(max_tokens=80))
    with torchrun("--no-python", sys.executable, "-c", code) as launcher:
        wait_for(lambda: len(ranks := children(launcher.pid)) == 2 and all(map(children, ranks)))
        commands = children(launcher.pid)
        ranks = [rank for each in commands for rank in children(each)]
        os.kill(ranks[1], signal.SIGKILL)
        _, said = launcher.communicate(timeout=HANG_SECONDS)
    assert launcher.returncode == 1
    assert "the process of rank 1 has ended with SIGKILL" in said
    wait_for(lambda: all(map(is_gone, [*commands, *ranks])))


def test_a_process_that_is_not_the_first_ends_where_it_would_have_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teachllm.engine.llm_engine.works_for_process_0", lambda config: True)
    with pytest.raises(SystemExit, match=r"^0$"):
        LLM(**tiny(**TORCHRUN))


def started_by_torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, port: int = 1, attempt: int = 0) -> None:
    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    known["TORCHELASTIC_RESTART_COUNT"] = attempt
    for name, value in {**known, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def port() -> Iterator[int]:
    """Of a store as torchrun has one."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=HANG_SECONDS), wait_for_workers=False)
    yield store.port


def test_processes_with_different_settings_are_refused_and_what_differs_is_named(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_by_torchrun(monkeypatch, 0, 2, port)
    assert not works_for_process_0(EngineConfig(**TORCHRUN))
    assert not works_for_process_0(EngineConfig(**TORCHRUN, seed=3))  # an engine's own are not what was typed
    started_by_torchrun(monkeypatch, 1, 2, port)
    with pytest.raises(ValueError, match="disagree about block_size: 16 at rank 0; 32 at rank 1: start all ranks with"):
        works_for_process_0(EngineConfig(**TORCHRUN, block_size=32))


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Addresses and secrets with which somebody has joined an engine."""
    calls = list[tuple[str, str]]()
    monkeypatch.setattr(
        "teachllm.worker.processes.host.join", lambda address, secret, **_: calls.append((address, secret))
    )
    return calls


def test_after_a_restart_processes_find_each_other_and_not_those_before(
    port: int, joined: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = list[str]()
    for attempt in (0, 1):
        config = EngineConfig(**TORCHRUN, block_size=16 * (attempt + 1))  # a script may change meanwhile
        started_by_torchrun(monkeypatch, 0, 2, port, attempt)
        assert not works_for_process_0(config)
        plan = plan_of_torchrun(config)
        plan.invite(f"tcp://127.0.0.1:{attempt}", print)
        secrets.append(plan.secret)
        started_by_torchrun(monkeypatch, 1, 2, port, attempt)
        assert works_for_process_0(config)
    assert joined == [("tcp://127.0.0.1:0", secrets[0]), ("tcp://127.0.0.1:1", secrets[1])]


def test_a_second_engine_is_refused_at_once_since_the_others_end_with_the_first(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_by_torchrun(monkeypatch, 0, 2, port)
    config = EngineConfig(**TORCHRUN)
    assert not works_for_process_0(config)
    plan_of_torchrun(config).invite("tcp://127.0.0.1:1", print)
    with pytest.raises(
        ValueError, match=r"^torchrun's other processes work for the first engine .*: start torchrun again"
    ):
        works_for_process_0(config)  # as the next one does


def test_a_secret_that_is_set_is_used_and_does_not_go_through_the_store_that_anybody_can_read(
    port: int, joined: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(**TORCHRUN)
    monkeypatch.setenv("TEACHLLM_SECRET", "sesame")
    started_by_torchrun(monkeypatch, 0, 2, port)
    assert not works_for_process_0(config)
    plan = plan_of_torchrun(config)
    plan.invite("tcp://127.0.0.1:1", print)
    assert plan.secret == "sesame"
    store = dist.TCPStore("127.0.0.1", port, None, False)
    assert json.loads(store.get("teachllm/attempt_0/where")) == ["tcp://127.0.0.1:1", None]
    started_by_torchrun(monkeypatch, 1, 2, port)
    assert works_for_process_0(config) and joined == [("tcp://127.0.0.1:1", "sesame")]
    monkeypatch.delenv("TEACHLLM_SECRET")
    with pytest.raises(
        ValueError, match=r"^TEACHLLM_SECRET is set where torchrun's first process runs, and not here: "
    ):
        works_for_process_0(config)


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_what_torchrun_would_have_set_is_named_where_it_is_not(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started_by_torchrun(monkeypatch, 0, 2)
    monkeypatch.delenv(variable)
    monkeypatch.setattr("teachllm.worker.processes.torchrun._SECONDS", 1.0)
    said = (
        rf"^distributed_executor_backend=torchrun, and torchrun has not started this \({variable} not set\): run torch"
    )
    with pytest.raises(ValueError, match=said):
        works_for_process_0(EngineConfig(**TORCHRUN))


@pytest.mark.parametrize(
    ("size", "settings", "message"),
    [
        (
            0,
            TORCHRUN,
            r"torchrun has not started this \(RANK, .* not set\): run torchrun --nproc-per-node 2 -m teachllm_cli",
        ),
        (3, TORCHRUN, r"^torchrun has started 3 processes, and tensor_parallel_size=2 .* need 2: give it --nproc"),
        (2, {"tensor_parallel_size": 2}, r"would be an engine with 2 ranks of its own: set distributed_executor_back"),
    ],
)
def test_processes_and_settings_that_do_not_go_together_are_refused(
    size: int, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if size:
        started_by_torchrun(monkeypatch, 0, size)
    with pytest.raises(ValueError, match=message):
        LLM(**tiny(**settings))
