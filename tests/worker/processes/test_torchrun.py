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
from teachllm.worker.processes.torchrun import works_for_process_0
from tests.processes import children, is_gone
from tests.waiting import wait_for
from tests.worker.doors import random_ids, tiny
from tests.worker.processes.process_trees import environment, free_port, needs_proc

TORCHRUN: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "torchrun"}


@contextmanager
def torchrun(*command: str) -> Iterator[subprocess.Popen[str]]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *launcher, *command], env=environment(), **pipes) as process:
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


def test_one_command_runs_once_and_answers_as_one_process_does() -> None:
    settings, prompt = tiny(), random_ids(9)
    llm = LLM(**settings)
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    [expected] = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
    code = _SCRIPT.format(settings=settings | TORCHRUN, prompt=prompt, greedy=greedy)
    with torchrun("--no-python", sys.executable, "-c", code) as launcher:
        answer, said = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, said
    assert [json.loads(line) for line in answer.splitlines()] == [expected.outputs[0].token_ids]


@needs_proc
def test_a_rank_that_is_killed_ends_every_process_with_an_error() -> None:
    code = _SCRIPT.replace("[output]", "while True: [output]")
    code = code.format(settings=tiny(**TORCHRUN), prompt=random_ids(9), greedy=SamplingParams(max_tokens=80))
    with torchrun("--no-python", sys.executable, "-c", code) as launcher:
        wait_for(lambda: len(ranks := children(launcher.pid)) == 2 and all(map(children, ranks)), 60)
        commands = children(launcher.pid)
        ranks = [rank for each in commands for rank in children(each)]
        os.kill(ranks[1], signal.SIGKILL)
        _, said = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert "the process of rank 1 has ended with SIGKILL" in said
    wait_for(lambda: all(map(is_gone, [*commands, *ranks])), 5)


def test_a_process_that_is_not_the_first_ends_where_it_would_have_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teachllm.engine.engine.works_for_process_0", lambda config: True)
    with pytest.raises(SystemExit, match=r"^0$"):
        LLM(**tiny(**TORCHRUN))


def started_by_torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, port: int = 1) -> None:
    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    for name, value in {**known, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, str(value))


def test_processes_with_different_settings_are_refused_and_what_differs_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    started_by_torchrun(monkeypatch, 0, 2, store.port)
    assert not works_for_process_0(EngineConfig(**TORCHRUN))
    assert not works_for_process_0(EngineConfig(**TORCHRUN, seed=3))  # an engine's own are not what was typed
    started_by_torchrun(monkeypatch, 1, 2, store.port)
    with pytest.raises(ValueError, match="disagree about block_size: 16 at rank 0; 32 at rank 1: start all ranks with"):
        works_for_process_0(EngineConfig(**TORCHRUN, block_size=32))


@pytest.mark.parametrize(
    ("size", "settings", "message"),
    [
        (0, TORCHRUN, r"torchrun has not started this: run torchrun --nproc-per-node 2 -m teachllm_cli"),
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
