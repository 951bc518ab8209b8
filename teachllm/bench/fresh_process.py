"""Run a program in a new process that finds compiled kernels in a folder of its own, or nothing.

Compiled kernels and saved tuning live in folders on disk, and an import or a GPU's context lasts as long as a process.
So what a user meets first is measured in a process that is started for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
_LONGEST_S = 600.0


class PrintedLine(NamedTuple):
    """A line that the program has printed.

    Attributes:
        seconds: since the process was started.
    """

    seconds: float
    text: str


def environment_with_caches(folder: Path) -> dict[str, str]:
    """Return this process's environment, for a program whose caches are in a folder of its own.

    Args:
        folder: what the program leaves there, the next one finds.
    """
    caches = {name: str(folder / name.lower()) for name in _CACHES}
    return os.environ | caches | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def run_fresh(module: str, arguments: Sequence[str], folder: str, wanted: Sequence[str]) -> list[PrintedLine]:
    """Run `python -m module`, and return the lines that it prints with the beginnings `wanted`, one of each, in order.

    Args:
        folder: where its caches are; what it leaves there, the next one finds.

    Raises:
        RuntimeError: the program failed, or has not printed these lines; with the last line of its standard error.
    """
    environment = environment_with_caches(Path(folder))
    errors, found = Path(folder) / "stderr", list[PrintedLine]()
    with errors.open("w") as stderr:
        start = time.perf_counter()
        command = [sys.executable, "-m", module, *arguments]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        ) as process:
            assert process.stdout is not None
            patience = threading.Timer(_LONGEST_S, _kill_all, (process,))
            patience.start()
            try:
                for line in process.stdout:
                    if len(found) < len(wanted) and line.startswith(wanted[len(found)]):
                        found.append(PrintedLine(time.perf_counter() - start, line.rstrip("\n")))
                process.wait()
            finally:
                patience.cancel()
                _kill_all(process)
    if process.returncode or len(found) < len(wanted):
        last = (errors.read_text(errors="replace").strip() or "no word").splitlines()[-1]
        raise RuntimeError(f"the process of {module} ended with {process.returncode}: {last}")
    return found


def _kill_all(process: subprocess.Popen[str]) -> None:
    """End a program and all that it has started: these hold its output open."""
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
