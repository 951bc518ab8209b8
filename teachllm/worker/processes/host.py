"""A machine that has some of an engine's ranks: it joins, starts them, and passes on what is said.

    the engine ── socket ──▶ this process ── ring ──▶ ranks
               ◀── socket ──              ◀── pipes ──

It ends when the engine says so, when the engine has gone, and when a rank has. The other end is `rank_hosts.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

import zmq

from teachllm.worker.errors import EngineDeadError
from teachllm.worker.processes.agreement import versions
from teachllm.worker.processes.answers import Kind
from teachllm.worker.processes.host_messages import (
    Begin,
    End,
    FromHost,
    Hello,
    HostDied,
    HostRefused,
    Order,
    Said,
    ToHost,
    decode_to_host,
    encode,
)
from teachllm.worker.processes.host_socket import SECRET, ConnectionMonitor, connect, frames_of
from teachllm.worker.processes.rank_processes import RankProcesses

_SECONDS_TO_JOIN = 600.0  # for the engine to listen, and for all other machines to join


def join(
    address: str,
    secret: str,
    *,
    place: int | None = None,
    first_gpu: int = 0,
    joined: Callable[[Sequence[int]], None] = lambda ranks: None,
) -> None:
    """Work for the engine that listens at an address, until that ends.

    Args:
        address: tcp://HOST:PORT.
        place: which of the machines this is, from 1 on; None: any that is missing.
        first_gpu: the GPU of its first rank, if the engine computes on GPUs.
        joined: called with the ranks that are to be here.

    Raises:
        ValueError: this is no address, or the engine refuses this machine; says why.
        EngineDeadError: the engine has gone, or a rank has ended.
        TimeoutError: no engine listens there, or a machine is missing.
    """
    with contextlib.closing(_Line(address, secret)) as line:
        line.say(Hello(socket.gethostname(), versions(), place))
        match line.first():
            case Begin() as begin:
                joined(begin.ranks)
                _work(line, begin, first_gpu)
            case HostRefused(why):
                raise ValueError(f"the engine at {address} refuses this machine: {why}")
            case End(_, death) if death is not None:
                raise EngineDeadError(death)


def _work(line: _Line, begin: Begin, first_gpu: int) -> None:
    """Let the ranks work, until the end."""
    ranks, config = RankProcesses(begin.ranks), begin.work.config
    device = f"cuda:{first_gpu}" if config.device.startswith("cuda") else config.device
    line.when_lost(ranks.end)  # this thread may be in the middle of a message
    try:
        ranks.start(replace(begin.work, config=replace(config, device=device)))
        _pass_on(line, ranks)
    except ValueError as error:
        refusal = json.dumps([str(error), False, None]).encode()
        line.say(Said(begin.ranks[0], Kind.REFUSED, 0, refusal))
        line.first()  # to be told to end: the reason must not be taken for the end of a machine
        raise
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        line.say(HostDied("the worker was interrupted" if interrupted else str(error) or type(error).__name__))
        ranks.kill()
        raise
    finally:
        ranks.close()


def _pass_on(line: _Line, ranks: RankProcesses) -> None:
    """Send messages on, in both directions."""
    poller = zmq.Poller()
    for source in (line.socket, ranks.fileno()):
        poller.register(source, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if ranks.fileno() in ready:
            ranks.receive(0)
            while ranks.frames:
                line.say(Said(*ranks.frames.popleft()))
        if line.socket in ready:
            match line.receive():
                case Order(content):
                    ranks.write(content)
                case End(at_once, death):
                    if at_once:
                        ranks.kill()
                    if death is not None:
                        raise EngineDeadError(death)
                    return


class _Line:
    """The connection to the engine, which must last: there is no second one."""

    def __init__(self, address: str, secret: str) -> None:
        self._address = address
        self._on_lost: Callable[[str], None] = lambda why: None
        self._why, self._is_refused = "", False
        self._lost, self._lost_end = os.pipe()
        self._context = zmq.Context()
        try:
            self.socket = connect(self._context, address, secret)
        except BaseException:
            self._context.term()
            raise
        self._watch = ConnectionMonitor(
            self.socket, lambda _: self._end(f"the engine at {address} has gone"), self._refused
        )

    def when_lost(self, end: Callable[[str], None]) -> None:
        """Register `end`, to be called with the reason, in another thread, when the connection has ended."""
        self._on_lost = end
        if self._why:
            end(self._why)

    def say(self, message: FromHost) -> None:
        self.socket.send_multipart(frames_of(encode(message)))

    def receive(self) -> ToHost:
        return decode_to_host(b"".join(self.socket.recv_multipart()))

    def first(self) -> ToHost:
        """Wait for a message while there are no ranks.

        Raises:
            ValueError, EngineDeadError, TimeoutError: as `join`.
        """
        poller = zmq.Poller()
        for source in (self.socket, self._lost):
            poller.register(source, zmq.POLLIN)
        ready = dict(poller.poll(int(1000 * _SECONDS_TO_JOIN)))
        if self.socket in ready:
            return self.receive()
        if self._lost in ready:
            raise ValueError(self._why) if self._is_refused else EngineDeadError(self._why)
        raise TimeoutError(f"no engine at {self._address} began within {_SECONDS_TO_JOIN:g} s: start it, or the others")

    def close(self) -> None:
        self._watch.stop()
        self._watch.join()
        self.socket.close()
        self._context.term()
        for end in (self._lost, self._lost_end):
            os.close(end)

    def _refused(self) -> None:
        self._is_refused = True
        self._end(f"who listens at {self._address} is no engine, or has another secret: set {SECRET} to the engine's")

    def _end(self, why: str) -> None:
        if not self._why:
            self._why = why
            os.write(self._lost_end, b"!")
            self._on_lost(why)
