"""Processes as a user starts them, and what they have started in turn."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")


def environment(**variables: str) -> dict[str, str]:
    """In which a process finds what this one finds."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)} | variables


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def processes_under(pid: int) -> list[int]:
    """Those that it has started."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def has_ended(pid: int) -> bool:
    """Whoever inherits it may be slow to collect it."""
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
