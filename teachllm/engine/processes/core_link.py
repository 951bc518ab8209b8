"""A core's process, and the line to it: starts it, sends, receives, and notices when it is gone."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from teachllm.engine.processes.core_messages import Close, FromCore, Start, ToCore, decode_from_core, encode
from teachllm.worker.processes.child import how_it_ended, start_child

_NAME = "core"  # of the socket, in a folder of its own


class CoreLink:
    """One process. All is for one thread, but for `on_death`, which another one calls.

    Args:
        start: what it is to load.
        name: what an error calls it.
        on_death: called when it has ended, for whatever reason.

    Attributes:
        socket: to wait at.
        is_dead: it has ended.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], start: Start, name: str, on_death: Callable[[], None]
    ) -> None:
        self._name, self._on_death = name, on_death
        self._unsent: list[msgspec.Raw] = []
        self.is_dead = False
        with contextlib.ExitStack() as undo:
            self._folder = _new_folder()
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self.socket = context.socket(zmq.DEALER)
            undo.callback(self.socket.close)
            self.socket.set_hwm(0)
            self.socket.linger = 0
            self.socket.reconnect_ivl = 10  # milliseconds, until the process listens
            address = f"ipc://{self._folder}/{_NAME}"
            self.socket.connect(address)
            self.say(start)
            self.process = start_child("teachllm.engine.processes.core_process", address, pass_fds=start.descriptors)
            undo.callback(self._end_process)
            threading.Thread(target=self._watch, name="engine process", daemon=True).start()
            self.send()
            undo.pop_all()

    def say(self, message: ToCore | msgspec.Raw) -> None:
        """Add a message, or a packed one, to the messages that are sent together; with one send for each, this
        thread would wait for its turn in this process as often."""
        self._unsent.append(message if isinstance(message, msgspec.Raw) else msgspec.Raw(encode(message)))

    def send(self) -> None:
        """Send the messages that `say` has collected."""
        if self._unsent and not self.is_dead:  # who waits for an answer will hear of it
            self.socket.send(encode(self._unsent))
        self._unsent.clear()

    def receive(self) -> FromCore:
        return decode_from_core(self.socket.recv())

    def connected(self) -> None:
        """Remove the address's name: both ends have it open."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def how_it_ended(self) -> str:
        return f"{self._name} has ended with {how_it_ended(self.process.returncode)}"

    def tell_to_end(self) -> None:
        """Tell the process to end after its step, and return at once."""
        self.say(Close())
        self.send()

    def close(self, deadline: float) -> None:
        """Wait until the process has ended, and kill it if that takes too long.

        Args:
            deadline: on `time.monotonic`.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(deadline - time.monotonic(), 0.0))
        self._end_process()
        self.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_process(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def _watch(self) -> None:
        self.process.wait()
        self.is_dead = True
        self._on_death()


def _new_folder() -> str:
    """Make a directory that no other user may look into, with a path short enough for a socket, unlike some TMPDIRs."""
    folder = tempfile.mkdtemp(prefix="teachllm-")
    if len(os.fsencode(f"{folder}/{_NAME}")) <= zmq.IPC_PATH_MAX_LEN:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="teachllm-", dir="/tmp")
