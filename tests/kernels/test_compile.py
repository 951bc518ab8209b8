"""Every kernel compiles ahead of time for Ampere and Hopper, with or without a GPU at hand.

There are six hundred variants, which take minutes: usually one of each kernel is compiled, for Hopper.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.thorough import THOROUGH

ROOT = Path(__file__).parent.parent.parent
KERNELS = ROOT / "kernels" / "teachllm_kernels"


def test_every_kernel_compiles() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    command = [sys.executable, str(Path(__file__).parent / "compile_all.py"), *([] if THOROUGH else ["--one-each"])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = {line.split()[0] for line in done.stdout.splitlines()}
    entries = {name for file in KERNELS.rglob("*.py") for name in entry_points(file.read_text())}
    assert entries and compiled == entries


def entry_points(source: str) -> set[str]:
    """Return the names of kernels that are launched: `_name[grid](...)`."""
    return set(re.findall(r"^\s+(_\w+)\[.*\]\(", source, re.MULTILINE))
