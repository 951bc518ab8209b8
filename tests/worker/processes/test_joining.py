"""Who may join an engine on another machine, who is refused, and that one has gone: no rank is needed for that."""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import zmq

from teachllm import EngineConfig
from teachllm.worker.errors import EngineDeadError
from teachllm.worker.processes.agreement import versions
from teachllm.worker.processes.answers import Kind
from teachllm.worker.processes.host import join
from teachllm.worker.processes.host_messages import Refused, decode_to_host
from teachllm.worker.processes.host_plan import HostPlan
from teachllm.worker.processes.host_socket import connect
from teachllm.worker.processes.rank_hosts import RankHosts
from teachllm.worker.processes.rank_lines import Work
from tests.processes import num_descriptors
from tests.waiting import wait_for
from tests.worker.doors import make_engine
from tests.worker.processes.process_trees import environment

NAME = socket.gethostname()


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHLLM_SECRET", "sesame")


class Joining(threading.Thread):
    """A machine in a thread, and what came of it."""

    def __init__(self, address: str, secret: str = "sesame", place: int | None = None) -> None:
        super().__init__(daemon=True)
        self.place = place
        self._join = lambda: join(address, secret, place=place)
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._join()
        except BaseException as error:
            self.error = error


def plan(machines: list[Any], start: Callable[[str], Any], *others: Callable[[str], Any], count: int = 1) -> HostPlan:
    """Of a rank on each other machine; who listens has these start."""

    def invite(address: str, _: object) -> None:
        for each in (start, *others):
            machines.append(each(address))
            if isinstance(machines[-1], Joining):
                machines[-1].join(0.5)

    elsewhere = [[rank] for rank in range(1, count + 1)]
    return HostPlan([], elsewhere, "127.0.0.1", 0, "sesame", invite, "run it at {address}")


WORK = Work(EngineConfig(device="cpu", tensor_parallel_size=2, nnodes=2))
_SILENT = """
import sys, time, zmq
from teachllm.worker.processes.host_messages import Hello, encode
from teachllm.worker.processes.host_socket import connect
line = connect(zmq.Context(), sys.argv[1], "sesame")
line.send(encode(Hello("silent", {versions!r})))
time.sleep(60)
"""


def silent(address: str) -> subprocess.Popen[bytes]:
    """A machine that joins and does nothing."""
    code = _SILENT.replace("{versions!r}", repr(versions()))
    return subprocess.Popen([sys.executable, "-c", code, address], env=environment())


@contextmanager
def killed_in_the_end(machines: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in machines:
            each.kill()
            each.wait()


def test_who_has_joined_before_the_engine_looks_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teachllm.worker.processes.rank_hosts._SECONDS_TO_JOIN", 10.0)
    machines = list[subprocess.Popen[bytes]]()
    begun = list[float]()

    def invite(address: str, _: object) -> None:
        machines.append(silent(address))
        assert hosts._hosts.router.poll(30_000)
        begun.append(time.monotonic())

    plan_ = replace(plan([], Joining), invite=invite)
    with closing(RankHosts(plan_)) as hosts, killed_in_the_end(machines):
        hosts.start(WORK)
        assert time.monotonic() - begun[0] < 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_machine_that_no_longer_answers_is_noticed_within_seconds_by_whoever_waits(number: signal.Signals) -> None:
    machines = list[subprocess.Popen[bytes]]()
    with closing(RankHosts(plan(machines, silent))) as hosts, killed_in_the_end(machines):
        hosts.start(WORK)
        began = time.monotonic()
        machines[0].send_signal(number)
        assert select.select([hosts.sentinel], [], [], 10)[0]  # nobody reads or writes
        with pytest.raises(EngineDeadError, match=r"^silent with rank 1 has gone$"):
            hosts.receive()
        assert time.monotonic() - began < 5


def test_who_does_not_know_the_secret_is_refused_and_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("teachllm.worker.processes.rank_hosts._SECONDS_TO_JOIN", 1.0)
    machines = list[Joining]()
    with (
        closing(RankHosts(plan(machines, lambda address: Joining(address, "open")))) as hosts,
        pytest.raises(
            TimeoutError,
            match=r"^1 of 1 machines did not join within 1 s, which should have rank 1: run it at tcp://127.0.0.1:\d+$",
        ),
    ):
        hosts.start(WORK)
    machines[0].join(5)
    assert isinstance(machines[0].error, ValueError)
    assert "another secret: set TEACHLLM_SECRET to the engine's" in str(machines[0].error)
    assert "somebody who wanted to join has been refused" in caplog.text


def test_a_machine_with_another_version_is_named_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teachllm.worker.processes.host.versions", lambda: versions() | {"torch": "1.0"})
    machines = list[Joining]()
    said = rf"{NAME}: the ranks disagree about torch: '.*' at the engine; '1.0' at rank 1: install the same everywhere$"
    with closing(RankHosts(plan(machines, Joining))) as hosts, pytest.raises(ValueError, match=f"^{said}"):
        hosts.start(WORK)
    machines[0].join(5)
    assert isinstance(machines[0].error, ValueError)
    assert str(machines[0].error).endswith("at rank 1: install the same everywhere")


def test_who_speaks_another_language_is_refused_and_nobody_else_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teachllm.worker.processes.rank_hosts._SECONDS_TO_JOIN", 1.0)
    with zmq.Context() as context, closing(RankHosts(plan([], lambda address: lines.append(address)))) as hosts:
        lines = list[str]()
        with pytest.raises(TimeoutError):
            hosts.start(WORK)
        with connect(context, lines[0], "sesame") as line:
            line.send(b"what?")
            wait_for(lambda: hosts.receive(0.1) or line.poll(0))
            assert decode_to_host(line.recv()) == Refused(
                "nobody here understands it: install the same teachllm everywhere"
            )


def test_what_a_machine_refuses_is_heard_before_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(config: EngineConfig, count: int) -> list[str]:
        if count:
            raise ValueError("there is 1 CUDA device: lower it")
        return []

    monkeypatch.setattr("teachllm.worker.processes.rank_processes.devices_of", devices)
    machines = list[Joining]()
    with closing(RankHosts(plan(machines, Joining))) as hosts:
        hosts.start(WORK)
        while not hosts.frames:
            hosts.receive()
        [(rank, kind, _, said)] = hosts.frames
        assert (rank, kind) == (1, Kind.REFUSED)
        assert json.loads(said) == [f"{NAME}: there is 1 CUDA device: lower it", False, None]
        assert machines[0].is_alive()  # until it is told to end
    machines[0].join(5)
    assert isinstance(machines[0].error, ValueError)


def test_a_place_that_is_taken_or_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teachllm.worker.processes.rank_hosts._SECONDS_TO_JOIN", 2.0)
    machines = list[Joining]()
    places = [partial(Joining, place=place) for place in (2, 2, 7)]
    missing = pytest.raises(TimeoutError, match=r"^1 of 2 machines .* which should have rank 1: ")
    with closing(RankHosts(plan(machines, *places, count=2))) as hosts, missing:
        hosts.start(WORK)
    for each in machines:
        each.join(5)
    assert sum(each.error is None for each in machines) == 1  # it was told to end
    for each in machines:
        said = f"refuses this machine: node_rank={each.place} is not wanted: choose one of 1"
        assert each.error is None or (isinstance(each.error, ValueError) and said in str(each.error))
    assert machines[2].error is not None


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"master_port": "taken"}, r"^master_port=\d+ is taken on 127.0.0.1: choose another, or 0 for a free one$"),
        ({"master_addr": "192.0.2.1"}, r"^master_addr=192.0.2.1 is no address of this machine: "),
        ({"master_addr": "0.0.0.0"}, r"^master_addr=0.0.0.0 is no address that others can reach: set it to"),
    ],
)
def test_where_an_engine_cannot_listen_is_said_before_anything_starts(where: dict[str, Any], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = {name: listener.getsockname()[1] if value == "taken" else value for name, value in where.items()}
        before = num_descriptors()
        with pytest.raises(ValueError, match=message):
            make_engine(tensor_parallel_size=2, nnodes=2, **where)
        assert num_descriptors() == before


def test_without_the_extra_both_ends_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("host_plan", "host_socket", "rank_hosts", "host_messages", "host"):
        monkeypatch.delitem(sys.modules, f"teachllm.worker.processes.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ImportError, match=r"^ranks on other machines need zmq: pip install 'teachllm\[serve\]'$"):
        make_engine(tensor_parallel_size=2, nnodes=2)


@pytest.mark.parametrize(
    ("variables", "arguments", "said"),
    [
        ({}, ["tcp://127.0.0.1:1"], "TEACHLLM_SECRET is not set: the engine says what it is when it begins to wait"),
        ({"TEACHLLM_SECRET": "x"}, ["here"], "'here' is no address of an engine"),
    ],
)
def test_a_worker_that_cannot_join_says_why(
    variables: dict[str, str], arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from teachllm_cli.app import app

    monkeypatch.delenv("TEACHLLM_SECRET")
    result = CliRunner().invoke(app, ["worker", "--join", *arguments], env=variables)
    assert result.exit_code == 1 and said in result.stderr.replace("\n", " ")
