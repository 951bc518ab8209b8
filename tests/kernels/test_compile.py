"""Every kernel compiles ahead of time for each type of GPU that it may run on, with or without one at hand.

There are hundreds of variants, which take minutes: usually one of each kernel is compiled, for Ampere and Hopper.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.thorough import THOROUGH

ROOT = Path(__file__).parent.parent.parent
KERNELS = ROOT / "kernels" / "teachllm_kernels"


def test_every_kernel_compiles(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).parent / "compile_all.py"), *([] if THOROUGH else ["--one-each"])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = {target: set(names) for target, names in json.loads(done.stdout).items()}
    entries = {name for file in KERNELS.rglob("*.py") for name in entry_points(file.read_text())}
    assert entries and compiled["sm_90"] == entries
    hoppers = {name for name in entries if name.startswith("_hopper")} | {"_plan_prefill"}
    for target in compiled.keys() - {"sm_90"}:
        assert compiled[target] == entries - hoppers


def entry_points(source: str) -> set[str]:
    """Return the names of kernels that are launched: `_name[grid](...)`."""
    return set(re.findall(r"^\s+(_\w+)\[.*\]\(", source, re.MULTILINE))
