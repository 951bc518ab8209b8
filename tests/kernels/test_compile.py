"""Every kernel compiles ahead of time for Ampere and Hopper, with or without a GPU at hand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
KERNELS = ROOT / "kernels" / "teachllm_kernels"


def test_every_kernel_compiles_for_ampere_and_hopper() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "compile_all.py")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    compiled = {line.split()[0] for line in done.stdout.splitlines()}
    entries = {name for file in KERNELS.rglob("*.py") for name in entry_points(file.read_text())}
    assert entries and compiled == entries


def entry_points(source: str) -> set[str]:
    """The kernels that are launched: `_name[grid](...)`."""
    return set(re.findall(r"^\s+(_\w+)\[.*\]\(", source, re.MULTILINE))
