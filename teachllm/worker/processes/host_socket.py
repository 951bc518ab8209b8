"""Sockets between the machines of an engine: who gets in, and how both ends notice that the other one has gone.

The server's key pair is made of a secret that both ends know. CURVE never sends the public key, and no program that
lacks it comes through the handshake: a stranger can neither join nor read along. Heartbeats are sent by ZeroMQ's own
thread, whatever Python does meanwhile. A monitor tells of every connection that has ended, be it that a process has, or
that a machine no longer answers.

A frame is read whole before ZeroMQ looks at it, be it a stranger's who has not come through the handshake: whoever
announces one that is too large is cut off. A message may have any size, as an output does with log-probabilities for
every token of a prompt: it goes in as many frames as it needs.

Source: CurveZMQ, https://rfc.zeromq.org/spec/26; ZMTP 3.1 for heartbeats, https://rfc.zeromq.org/spec/37
"""

from __future__ import annotations

import errno
import hashlib
import socket
import threading
from collections.abc import Callable
from functools import cache

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

SECRET = "TEACHLLM_SECRET"  # the environment variable that has it
_HEARTBEAT_MS, _SILENCE_MS = 1000, 3000  # between heartbeats; without an answer to one: up to 4 s in all
_FRAME_BYTES = 1 << 18  # a step of hundreds of decodes fills a tenth of that
_OVERHEAD_BYTES = 64  # CURVE's of a frame are 33
_SALT = b"teachllm: ranks on several machines"
_PORT_ERRORS = {errno.EADDRINUSE: "is taken on", errno.EACCES: "needs rights that this process lacks on"}
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def listen(context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, secret: str) -> zmq.Socket[bytes]:
    """Open the engine's end: a router, so that it can answer each machine.

    Args:
        port: 0: any that is free.

    Raises:
        ValueError: one cannot listen there; names the setting.
    """
    router = context.socket(zmq.ROUTER)
    _set_up(router)
    router.router_mandatory = True
    router.curve_server = True
    router.curve_secretkey = _server_key(secret)
    try:
        address = socket.gethostbyname(host)
        if address == "0.0.0.0":
            raise ValueError(f"master_addr={host} is no address that others can reach: set it to this machine's own")
        router.bind(f"tcp://{address}:{port or '*'}")
    except (OSError, zmq.ZMQError) as error:
        router.close()
        if error.errno in _PORT_ERRORS:
            why = _PORT_ERRORS[error.errno]
            raise ValueError(f"master_port={port} {why} {host}: choose another, or 0 for a free one") from None
        raise ValueError(f"master_addr={host} is no address of this machine: {error.strerror or error}") from None
    except BaseException:
        router.close()
        raise
    return router


def connect(context: zmq.Context[zmq.Socket[bytes]], address: str, secret: str) -> zmq.Socket[bytes]:
    """Open the end of another machine; the engine may begin to listen later.

    Raises:
        ValueError: this is no address.
    """
    dealer = context.socket(zmq.DEALER)
    _set_up(dealer)
    dealer.curve_serverkey = zmq.curve_public(_server_key(secret))
    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    try:
        dealer.connect(address)
    except zmq.ZMQError as error:
        dealer.close()
        raise ValueError(f"{address!r} is no address of an engine ({error}): write it like tcp://HOST:PORT") from None
    return dealer


def port_of(router: zmq.Socket[bytes]) -> int:
    """Return the port that it listens on."""
    return int(router.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def frames_of(message: bytes) -> list[bytes]:
    """Split a message into the frames in which it is sent; joined, they are the message."""
    return [message[first : first + _FRAME_BYTES] for first in range(0, max(len(message), 1), _FRAME_BYTES)]


class ConnectionMonitor:
    """A thread that tells what becomes of a socket's connections, until `stop`; `join` waits for that.

    Args:
        on_lost: called with the descriptor of a connection that has ended.
        on_refused: called when a connection fails the handshake.
    """

    def __init__(
        self, watched: zmq.Socket[bytes], on_lost: Callable[[int], None], on_refused: Callable[[], None]
    ) -> None:
        self._watched, self._on_lost, self._on_refused = watched, on_lost, on_refused
        monitor = watched.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED | _REFUSALS)
        self._thread = threading.Thread(target=self._run, args=(monitor,), name="connections", daemon=True)
        self._thread.start()

    def _run(self, monitor: zmq.Socket[bytes]) -> None:
        with monitor:
            while (told := recv_monitor_message(monitor))["event"] != zmq.EVENT_MONITOR_STOPPED:
                if told["event"] == zmq.EVENT_DISCONNECTED:
                    self._on_lost(told["value"])
                else:
                    self._on_refused()

    def stop(self) -> None:
        """Stop watching; call this from a thread that may use the socket, before the socket is closed."""
        self._watched.disable_monitor()

    def join(self) -> None:
        self._thread.join()


def _set_up(either: zmq.Socket[bytes]) -> None:
    either.set_hwm(0)  # what is under way is bounded by the plans
    either.maxmsgsize = _FRAME_BYTES + _OVERHEAD_BYTES  # of a frame, whatever its name says
    either.linger = 1000  # milliseconds, for last words
    either.heartbeat_ivl, either.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS


@cache  # scrypt takes long on purpose
def _server_key(secret: str) -> bytes:
    return z85.encode(hashlib.scrypt(secret.encode(), salt=_SALT, n=1 << 14, r=8, p=1, dklen=32))
