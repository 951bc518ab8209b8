"""Variants of kernels are told apart as Triton does it, and compiled in processes, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `variants_and_pool.py` prints."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    command = [
        sys.executable,
        str(Path(__file__).parent / "variants_and_pool.py"),
        str(tmp_path_factory.mktemp("cache")),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_launches_of_other_types_or_alignment_are_other_variants_and_equal_ones_are_one(found: dict[str, Any]) -> None:
    assert found["aligned"] == [True, False, True]
    assert found["early launch"]  # which Hopper's variant has, and Ampere's has not


def test_what_was_compiled_is_found_in_the_cache(found: dict[str, Any]) -> None:
    assert found["first"] == [{"cached": False, "error": None}] * 3
    assert found["again"] == [{"cached": True, "error": None}] * 3


def test_a_process_that_the_compiler_takes_down_costs_its_variant_alone(found: dict[str, Any]) -> None:
    crashed, failed, other = found["broken"]
    assert crashed["error"] == "its compiler's process ended with exit code 3"
    assert failed["error"] == "ValueError: and another"
    assert other["error"] is None


def test_processes_end_with_whoever_reads_their_outcomes(found: dict[str, Any]) -> None:
    assert found["left"] == 0


def test_a_process_with_a_context_of_cuda_is_refused(found: dict[str, Any]) -> None:
    assert found["refused"] == "compile in a process that has not initialized CUDA: forked processes could not use it"
