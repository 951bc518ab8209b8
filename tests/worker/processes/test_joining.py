"""Who may join an engine on another machine, who is refused, and that one has gone: no rank is needed for that."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import zmq

from teachllm import EngineConfig
from teachllm.distributed.rendezvous import Rendezvous, keep_store
from teachllm.worker.errors import EngineDeadError
from teachllm.worker.processes import host_socket
from teachllm.worker.processes.agreement import versions
from teachllm.worker.processes.answers import Kind
from teachllm.worker.processes.host import _Line
from teachllm.worker.processes.host_messages import Begin, Hello, HostRefused, Order, Said, decode_to_host
from teachllm.worker.processes.host_plan import HostPlan, plan_of
from teachllm.worker.processes.host_socket import connect, listen, port_of
from teachllm.worker.processes.rank_hosts import RankHosts
from teachllm.worker.processes.rank_lines import RankWork
from tests.processes import open_files
from tests.thorough import times
from tests.waiting import HANG_SECONDS, wait_for
from tests.worker.engines import make_engine
from tests.worker.processes.child_threads import ChildThread, loading
from tests.worker.processes.machines import Cable, Joining

NAME = socket.gethostname()


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHLLM_SECRET", "sesame")


def plan(machines: list[Any], start: Callable[[str], Any], *others: Callable[[str], Any], count: int = 1) -> HostPlan:
    """Of a rank on each other machine; who listens has these start."""

    def invite(address: str, _: object) -> None:
        machines.extend(each(address) for each in (start, *others))

    elsewhere = [[rank] for rank in range(1, count + 1)]
    return HostPlan([], elsewhere, "127.0.0.1", 0, "sesame", invite, "run it at {address}")


WORK = RankWork(EngineConfig(device="cpu", tensor_parallel_size=2, nnodes=2))


class ByHand:
    """A machine that says what a test has it say, over a cable that may be cut."""

    def __init__(self, address: str, name: str = "b") -> None:
        self.cable = Cable(int(address.rpartition(":")[2]))
        self.line = _Line(self.cable.address, "sesame")
        self.line.say(Hello(name, versions()))

    def close(self) -> None:
        self.line.close()
        self.cable.close()


@contextmanager
def closed_in_the_end(machines: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in machines:
            if isinstance(each, ByHand):
                each.close()
            else:
                each.join(HANG_SECONDS)


def test_who_has_joined_before_the_engine_looks_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teachllm.worker.processes.rank_hosts._SECONDS_TO_JOIN", 5.0)  # or it gives up
    machines = list[ByHand]()

    def invite(address: str, _: object) -> None:
        machines.append(ByHand(address))
        assert hosts._hosts.router.poll(int(1000 * HANG_SECONDS))

    plan_ = replace(plan([], ByHand), invite=invite)
    with closing(RankHosts(plan_)) as hosts, closed_in_the_end(machines):
        hosts.start(WORK)


@pytest.mark.parametrize("is_cut", [True, False], ids=["it ends", "it hangs"])
def test_a_machine_that_no_longer_answers_is_noticed_by_whoever_waits(
    is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_socket, "_HEARTBEAT_MS", 300)
    monkeypatch.setattr(host_socket, "_SILENCE_MS", 1000)
    machines = list[ByHand]()
    with closing(RankHosts(plan(machines, ByHand))) as hosts, closed_in_the_end(machines):
        hosts.start(WORK)
        cable = machines[0].cable
        cable.cut() if is_cut else cable.fall_silent()
        assert select.select([hosts.sentinel], [], [], HANG_SECONDS)[0]  # nobody reads or writes
        with pytest.raises(EngineDeadError, match=r"^b with rank 1 has gone$"):
            hosts.receive()


def test_a_machine_whose_engine_has_gone_says_so_and_ends_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    cables, ranks = list[Cable](), list[ChildThread]()

    def start(*_: Any, **__: Any) -> ChildThread:
        ranks.append(ChildThread(loading))
        return ranks[0]

    def join_by_cable(address: str) -> Joining:
        cables.append(Cable(int(address.rpartition(":")[2])))
        return Joining(cables[0].address)

    monkeypatch.setattr("teachllm.worker.processes.rank_processes.start_child", start)
    machines = list[Joining]()
    with closing(RankHosts(plan(machines, join_by_cable))) as hosts, closed_in_the_end(machines):
        hosts.start(WORK)
        wait_for(lambda: ranks)
        cables[0].cut()
        machines[0].join(HANG_SECONDS)
    assert isinstance(machines[0].error, EngineDeadError)
    assert str(machines[0].error) == f"the engine at {cables[0].address} has gone"
    assert ranks[0].returncode == -signal.SIGKILL
    cables[0].close()


def test_a_machine_that_goes_before_the_ranks_are_told_to_begin_is_missed_and_nobody_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines = list[Any]()
    with closing(RankHosts(plan(machines, ByHand, Joining, count=2))) as hosts, closed_in_the_end(machines):

        def keep(host: str, seconds: float) -> tuple[Rendezvous, Any]:
            machines[0].cable.cut()
            wait_for(lambda: hosts._hosts.missing)
            return keep_store(host, seconds)

        monkeypatch.setattr("teachllm.worker.processes.rank_hosts.keep_store", keep)
        with pytest.raises(EngineDeadError, match=r"^the machine with rank [12] has gone$"):
            hosts.start(WORK)
        machines[1].join(HANG_SECONDS)
        assert isinstance(machines[1].error, EngineDeadError) and "has gone" in str(machines[1].error)


def test_a_machine_that_has_joined_ends_with_an_error_if_the_engine_does_not_start() -> None:
    machines = list[Joining]()
    with closing(RankHosts(plan(machines, Joining, count=2))) as hosts:

        def give_up() -> None:
            wait_for(lambda: len(hosts._hosts.missing) == 1)
            hosts.end("nobody else comes")

        threading.Thread(target=give_up, daemon=True).start()
        with pytest.raises(EngineDeadError, match=r"^nobody else comes$"):
            hosts.start(WORK)
    with closing(RankHosts(plan(machines, Joining))) as hosts:
        hosts._plan.invite(f"tcp://127.0.0.1:{port_of(hosts._hosts.router)}", hosts.end)
        wait_for(lambda: hosts.receive(0.1) or not hosts._hosts.missing)
        hosts.kill()  # as whoever starts it does if it fails
    for machine, why in zip(machines, ("nobody else comes", "the engine could not start"), strict=True):
        machine.join(HANG_SECONDS)
        assert isinstance(machine.error, EngineDeadError) and str(machine.error).startswith(why)


def test_a_worker_that_is_interrupted_is_named_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(config: EngineConfig, count: int) -> list[str]:
        if count:
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr("teachllm.worker.processes.rank_processes.devices_of", devices)
    with closing(RankHosts(plan([], Joining))) as hosts:
        hosts.start(WORK)
        with pytest.raises(EngineDeadError, match=f"^on {NAME} the worker was interrupted$"):
            hosts.receive()


def test_too_few_gpus_here_are_found_before_anybody_is_waited_for() -> None:
    config = EngineConfig(device="cuda:64", pipeline_parallel_size=2, nnodes=2)
    machines = list[Joining]()
    refused = pytest.raises(ValueError, match=r"^.* need 1 GPUs from cuda:64 on ")
    with closing(RankHosts(replace(plan(machines, Joining), here=[0]))) as hosts, refused:
        hosts.start(RankWork(config))
    assert not machines


def test_strangers_that_come_and_go_keep_nobody_from_noticing_that_a_machine_has_gone() -> None:
    machines = list[ByHand]()
    with closing(RankHosts(plan(machines, ByHand))) as hosts, closed_in_the_end(machines):
        hosts.start(WORK)
        watch, num_lost = hosts._hosts._watch, 0
        notice = watch._on_lost

        def count(descriptor: int) -> None:
            nonlocal num_lost
            notice(descriptor)
            num_lost += 1

        watch._on_lost = count
        try:
            hosts._hosts._waker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # room for few
            for number in range(1, times(61, 501)):  # nobody reads or writes meanwhile
                socket.create_connection(("127.0.0.1", port_of(hosts._hosts.router))).close()
                wait_for(lambda number=number: num_lost >= number - 20)  # no faster than they are noticed
            machines[0].cable.cut()
            assert select.select([hosts.sentinel], [], [], HANG_SECONDS)[0]
        finally:
            hosts._hosts.wait(0)  # whoever is stuck goes on, and this test ends


def test_who_does_not_know_the_secret_is_refused_and_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("teachllm.worker.processes.rank_hosts._SECONDS_TO_JOIN", 0.1)
    machines = list[Joining]()

    def invite(address: str, _: object) -> None:
        machines.append(Joining(address, "open"))
        machines[0].join(HANG_SECONDS)

    missing = r"^1 of 1 machines did not join within 0.1 s, which should have rank 1: run it at tcp://127.0.0.1:\d+$"
    with closing(RankHosts(replace(plan([], Joining), invite=invite))) as hosts:
        with pytest.raises(TimeoutError, match=missing):
            hosts.start(WORK)
        wait_for(lambda: "refused a connection: not a worker, or the wrong secret" in caplog.text)
    assert isinstance(machines[0].error, ValueError)
    assert "is no engine, or has another secret: set TEACHLLM_SECRET to the engine's" in str(machines[0].error)


def test_where_something_else_listens_a_worker_does_not_put_it_down_to_the_secret_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        machine = Joining(f"tcp://127.0.0.1:{port}")
        listener.accept()[0].close()  # as a proxy does whose server has ended
        machine.join(HANG_SECONDS)
    assert isinstance(machine.error, ValueError)
    assert str(machine.error).startswith(f"who listens at tcp://127.0.0.1:{port} is no engine, or has another secret: ")


def test_a_stranger_who_announces_gigabytes_is_cut_off_before_they_are_kept() -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with (
        closing(RankHosts(plan([], Joining))) as hosts,
        socket.create_connection(("127.0.0.1", port_of(hosts._hosts.router)), HANG_SECONDS) as stranger,
    ):
        stranger.sendall(greeting)
        heard = 0
        while heard < 64 and (some := stranger.recv(64 - heard)):  # it may come in pieces
            heard += len(some)
        assert heard == 64  # it is an engine, and speaks this language
        stranger.sendall(b"\x06" + (20 << 30).to_bytes(8, "big"))  # a long command
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


@contextmanager
def machine_by_hand() -> Iterator[tuple[RankHosts, _Line]]:
    """An engine that has begun, and a machine called b that has heard of it."""
    machines = list[ByHand]()
    with closing(RankHosts(plan(machines, ByHand))) as hosts, closed_in_the_end(machines):
        hosts.start(WORK)
        assert isinstance(machines[0].line.first(), Begin)
        yield hosts, machines[0].line


def test_messages_that_are_larger_than_a_frame_arrive_whole_at_both_ends() -> None:
    large = os.urandom(3 << 20)
    with machine_by_hand() as (hosts, line):
        hosts.write(large)
        assert line.first() == Order(large)
        line.say(Said(1, Kind.OUTPUT, 5, large))
        wait_for(lambda: hosts.receive(0.1) or hosts.frames)
        assert [*hosts.frames] == [(1, Kind.OUTPUT, 5, large)]


def test_what_a_rank_on_another_machine_refuses_names_the_machine() -> None:
    with machine_by_hand() as (hosts, line):
        line.say(Said(1, Kind.REFUSED, 0, b'["too little memory\\nused  9", false, "used  9"]'))
        wait_for(lambda: hosts.receive(0.1) or hosts.frames)
        [(_, _, _, said)] = hosts.frames
        assert json.loads(said) == ["b: too little memory\nused  9", False, "used  9"]


@pytest.mark.parametrize("known", ["sesame", "", None])
def test_whoever_is_invited_is_told_a_secret_that_the_engine_has_made(
    known: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if known is None:
        monkeypatch.delenv("TEACHLLM_SECRET")
    else:
        monkeypatch.setenv("TEACHLLM_SECRET", known)
    made = plan_of(EngineConfig(device="cpu", tensor_parallel_size=2, nnodes=2))
    made.invite("tcp://127.0.0.1:1", print)
    assert made.secret and (made.secret == known) == bool(known)
    assert (f"TEACHLLM_SECRET={made.secret} teachllm worker" in caplog.text) == (not known)


def test_a_machine_with_another_version_is_named_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teachllm.worker.processes.host.versions", lambda: versions() | {"torch": "1.0"})
    machines = list[Joining]()
    said = rf"{NAME}: the ranks disagree about torch: '.*' at the engine; '1.0' at rank 1: install the same everywhere$"
    with closing(RankHosts(plan(machines, Joining))) as hosts, pytest.raises(ValueError, match=f"^{said}"):
        hosts.start(WORK)
    machines[0].join(HANG_SECONDS)
    assert isinstance(machines[0].error, ValueError)
    assert str(machines[0].error).endswith("at rank 1: install the same everywhere")


def test_who_speaks_another_language_is_refused_and_nobody_else_notices() -> None:
    said = HostRefused("the engine does not understand it: install the same teachllm everywhere")
    with zmq.Context() as context, closing(RankHosts(plan([], Joining))) as hosts:
        line = connect(context, f"tcp://127.0.0.1:{port_of(hosts._hosts.router)}", "sesame")
        with line:
            line.send(b"what?")
            wait_for(lambda: hosts.receive(0.1) or line.poll(0))
            assert decode_to_host(line.recv()) == said


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
    machines[0].join(HANG_SECONDS)
    assert isinstance(machines[0].error, ValueError)


def test_a_place_that_is_taken_or_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teachllm.worker.processes.rank_processes.start_child", lambda *_, **__: ChildThread(loading))
    machines = list[Joining]()

    def the_last_one(address: str) -> threading.Thread:
        def wait_and_join() -> None:
            wait_for(lambda: sum(each.error is not None for each in machines) == 2)
            machines.append(Joining(address, place=1))

        waiting = threading.Thread(target=wait_and_join, daemon=True)
        waiting.start()
        return waiting

    def invite(address: str, _: object) -> None:
        machines.extend(Joining(address, place=place) for place in (2, 2, 7))
        the_last_one(address)

    with closing(RankHosts(replace(plan([], Joining, count=2), invite=invite))) as hosts:
        hosts.start(WORK)
        wait_for(lambda: all(each.ranks or each.error is not None for each in machines))
        hosts.kill()
    *three, last = machines
    assert [each.ranks for each in three].count([2]) == 1 and last.ranks == [1]
    for each in three:
        said = f"refuses this machine: node_rank={each.place} is not wanted: choose one of 1"
        assert each.ranks or (isinstance(each.error, ValueError) and said in str(each.error))
    assert not three[2].ranks


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
        before = open_files()
        with pytest.raises(ValueError, match=message):
            make_engine(tensor_parallel_size=2, nnodes=2, **where)
        assert not open_files() - before


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            "socket.gethostbyname",
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            r"^master_addr=b.example is no address of this machine: Name or service not known$",
        ),
        (
            "zmq.Socket.bind",
            zmq.ZMQError(errno.EACCES),
            r"^master_port=80 needs rights that this process lacks on b.example: choose another, or 0 for a free one$",
        ),
    ],
)
def test_why_an_engine_cannot_listen_is_told_as_the_system_says_it(
    function: str, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise error

    monkeypatch.setattr("socket.gethostbyname", lambda host: "127.0.0.1")
    monkeypatch.setattr(function, fail)
    with zmq.Context() as context, pytest.raises(ValueError, match=message):
        listen(context, "b.example", 80, "sesame")


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
