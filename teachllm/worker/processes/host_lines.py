"""An engine's connections to the machines that have joined it: what is said, who is there, and that one has gone."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import threading
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from teachllm.worker.errors import EngineDeadError
from teachllm.worker.processes.agreement import check_agreement, ranks_text, versions
from teachllm.worker.processes.answers import Kind
from teachllm.worker.processes.host_messages import (
    Begin,
    End,
    Hello,
    HostDied,
    HostRefused,
    Said,
    ToHost,
    decode_from_host,
    encode,
)
from teachllm.worker.processes.host_plan import HostPlan
from teachllm.worker.processes.host_socket import ConnectionMonitor, frames_of, listen
from teachllm.worker.processes.rank_lines import RankWork
from teachllm.worker.processes.rank_processes import RankProcesses

log = logging.getLogger(__name__)
_NOT_STARTED = "the engine could not start, and says why where it runs"
_SECONDS_TO_END = 6.0  # a little more than a machine takes for its processes


@dataclass(frozen=True)
class _Host:
    """A machine that has joined.

    Attributes:
        identity: what the router calls it.
        descriptor: of its connection.
    """

    identity: bytes
    descriptor: int
    name: str
    ranks: list[int]

    def __str__(self) -> str:
        return f"{self.name} with {ranks_text(self.ranks)}"


class HostLines:
    """Their connections, which are to be given back, and the thread that watches them, which knows nothing of whoever
    uses this.

    A ZeroMQ socket is for one thread at a time. Whoever has the lock has the router: the engine's thread, to speak and
    to listen, and in the end the one that notices it.
    """

    def __init__(self, plan: HostPlan) -> None:
        self._plan = plan
        self.death: str | None = None
        self.refusal: ValueError | None = None
        self.store: Any = None
        self._hosts: dict[bytes, _Host] = {}
        self._has_begun = self._is_closed = self._in_haste = False
        self._changed = threading.Condition(threading.RLock())
        self._context = zmq.Context()
        try:
            self.router = listen(self._context, plan.host, plan.port, plan.secret)
        except BaseException:
            self._context.term()
            plan.dismiss()
            raise
        self.local = RankProcesses(plan.here, on_end=self.end)
        self.sentinel, self._sentinel_end = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        for source in (self.router, self.local, self.sentinel, self._woken):
            self._selector.register(source, selectors.EVENT_READ)
        self._watch = ConnectionMonitor(self.router, self._lost, self._refused)

    @property
    def missing(self) -> list[list[int]]:
        """Return the ranks of each machine that has not joined yet."""
        with self._changed:
            there = [host.ranks for host in self._hosts.values()]
            return [list(ranks) for ranks in self._plan.elsewhere if list(ranks) not in there]

    def check(self) -> None:
        """Raise an error if the engine is closed, was refused or has died."""
        if self._is_closed:
            raise RuntimeError("the engine is closed")
        if self.refusal is not None:
            raise self.refusal
        if self.death is not None:
            raise EngineDeadError(self.death)

    def wait(self, seconds: float | None) -> bool:
        """Wait until there may be something to receive, here or there, or for so long."""
        ready = self._selector.select(seconds)
        if any(key.fileobj is self._woken for key, _ in ready):
            self._woken.recv(4096)
        return bool(ready)

    def begin(self, work: RankWork) -> None:
        """Begin when all have joined.

        Raises:
            EngineDeadError: one has gone since.
        """
        with self._changed:
            if missing := self.missing:
                self.end(f"the machine with {ranks_text(missing[0])} has gone")
            self.check()
            self._has_begun = True
            for host in list(self._hosts.values()):
                self._send(host.identity, Begin(host.ranks, work))

    def tell(self, message: ToHost) -> None:
        """Send a message to all machines."""
        with self._changed:
            for host in list(self._hosts.values()):
                self._send(host.identity, message)

    def take(self) -> bool:
        """Receive what the machines have sent; return False if that was nothing."""
        has_news = False
        with self._changed, contextlib.suppress(zmq.Again):
            while True:
                identity, *frames = self.router.recv_multipart(zmq.NOBLOCK, copy=False)
                has_news = True
                self._hear(identity.bytes, frames)
        return has_news

    def end(self, why: str) -> None:
        with self._changed:
            if self._is_closed or self.death is not None:
                return
            self.death = why
            os.close(self._sentinel_end)
            self.tell(End(True, why))
        self.local.end(why)

    def kill(self) -> None:
        self._in_haste = True
        self.local.kill()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self.tell(End(True, _NOT_STARTED) if self._in_haste else End(False))
        self.local.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._hosts, _SECONDS_TO_END)
            self._watch.stop()
        self._watch.join()
        self.router.close()
        self._selector.close()
        self._context.term()
        self.store = None
        for end in (self._woken, self._waker):
            end.close()
        os.close(self.sentinel)
        if self.death is None:
            os.close(self._sentinel_end)
        self._plan.dismiss()

    # -- with the lock -------------------------------------------------------------------------------------

    def _hear(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        host = self._hosts.get(identity)
        try:
            said = decode_from_host(b"".join(frame.bytes for frame in frames))
        except msgspec.DecodeError:
            self._send(identity, HostRefused("the engine does not understand it: install the same teachllm everywhere"))
            return
        match said:
            case Hello() if host is None:
                try:
                    ranks = self._ranks_for(said)
                except ValueError as error:
                    self._send(identity, HostRefused(str(error)))
                    return
                self._hosts[identity] = _Host(identity, int(frames[0].get(zmq.SRCFD)), said.name, ranks)
            case Said() if host is not None:
                kind, content = Kind(said.kind), said.content
                if kind is Kind.REFUSED:  # of which a number says too little: a person has to go there
                    why, *rest = json.loads(content)
                    content = json.dumps([f"{host.name}: {why}", *rest]).encode()
                self.local.frames.append((said.rank, kind, said.number, content))
            case HostDied() if host is not None:
                self.end(f"on {host.name} {said.why}")

    def _ranks_for(self, hello: Hello) -> list[int]:
        """Return the ranks of a machine that wants to join.

        Raises:
            ValueError: there is nothing to do for it; if it has other versions, the engine must not wait either.
        """
        missing, places = self.missing, self._plan.elsewhere
        if not missing:
            raise ValueError("all ranks of this engine have their machines")
        if hello.place is None:
            ranks = missing[0]
        elif not 1 <= hello.place <= len(places) or (ranks := list(places[hello.place - 1])) not in missing:
            numbers = [number for number, ranks in enumerate(places, 1) if list(ranks) in missing]
            raise ValueError(f"node_rank={hello.place} is not wanted: choose one of {', '.join(map(str, numbers))}")
        try:
            check_agreement({-1: versions(), ranks[0]: hello.versions})
        except ValueError as error:
            self.refusal = ValueError(f"{hello.name}: {error}")
            raise self.refusal from None
        return ranks

    def _send(self, identity: bytes, message: ToHost) -> None:
        """Send a message; the other thread notices a host that has gone."""
        with contextlib.suppress(zmq.ZMQError):
            self.router.send_multipart([identity, *frames_of(encode(message))], zmq.NOBLOCK)

    # -- in the thread that watches ------------------------------------------------------------------------

    def _lost(self, descriptor: int) -> None:
        """Drop the host whose connection has gone; connections of strangers, any number of them, end here too."""
        with self._changed:
            has_news = self.take()  # its last words
            for host in [host for host in self._hosts.values() if host.descriptor == descriptor]:
                has_news = True
                del self._hosts[host.identity]
                self._changed.notify_all()
                if self._has_begun:
                    self.end(f"{host} has gone")
        if has_news:  # what was taken here, the other one does not wait for
            with contextlib.suppress(BlockingIOError):  # a full pipe will do it
                self._waker.send(b"!")

    def _refused(self) -> None:
        log.warning("refused a connection: not a worker, or the wrong secret")
