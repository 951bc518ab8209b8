"""Every kernel compiles ahead of time for each type of GPU that it may run on, with or without one at hand, and fits.

There are hundreds of variants, which take minutes: usually one of each kernel is compiled, for Ampere and Hopper.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.compiled import ROOT, run_compiled
from tests.thorough import THOROUGH

KERNELS = ROOT / "kernels" / "teachllm_kernels"


def test_every_kernel_compiles(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program, arguments = Path(__file__).parent / "compile_all.py", [] if THOROUGH else ["--one-each"]
    compiled = {target: set(names) for target, names in run_compiled(program, *arguments, cache=tmp_path).items()}
    entries = {name for file in KERNELS.rglob("*.py") for name in entry_points(file.read_text())}
    assert entries and compiled["sm_90"] == entries
    hoppers = {name for name in entries if name.startswith("_hopper")} | {"_plan_prefill"}
    for target in compiled.keys() - {"sm_90"}:
        assert compiled[target] == entries - hoppers


def entry_points(source: str) -> set[str]:
    """Return the names of kernels that are launched: `_name[grid](...)`."""
    return set(re.findall(r"^\s+(_\w+)\[.*\]\(", source, re.MULTILINE))
