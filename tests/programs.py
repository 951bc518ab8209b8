"""Programs that tests start: Python in a process of its own, which finds what this process finds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.waiting import HANG_SECONDS


def environment_with(**variables: str) -> dict[str, str]:
    """Return this process's environment, with its import path, and the given variables on top."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)} | variables


def start_program(
    *arguments: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None, **pipes: int
) -> subprocess.Popen[str]:
    """Start Python with these arguments, such as `-m module` or `-c code`, in a session of its own.

    Args:
        environment: Variables on top of this process's.
        cwd: Its folder; this process's by default.
        pipes: `stdin`, `stdout`, `stderr` as `subprocess.Popen` takes them; text.
    """
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, **pipes}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment_with(**(environment or {})),
        cwd=cwd,
        text=True,
        start_new_session=True,
        **options,
    )


def run_program(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end, and return what it printed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_program(*arguments, environment=environment, **pipes) as process:
        try:
            stdout, stderr = process.communicate(timeout=HANG_SECONDS)
        finally:
            process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)
