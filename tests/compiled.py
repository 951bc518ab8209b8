"""Run a program of the tests in which Triton compiles kernels, where the tests themselves interpret them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def run_compiled(program: Path, *arguments: str, cache: Path | None = None) -> Any:
    """Return what the program prints, as JSON; fail if it fails.

    Args:
        cache: the folder of its compiled kernels; None: the usual one.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
