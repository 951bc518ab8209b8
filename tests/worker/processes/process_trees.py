"""Processes as a user starts them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
