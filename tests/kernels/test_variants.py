"""Variants of kernels are told apart as Triton does it, and compiled in processes, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compiled import run_compiled


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `variants_and_pool.py` prints."""
    pytest.importorskip("triton")
    program = Path(__file__).parent / "variants_and_pool.py"
    result: dict[str, Any] = run_compiled(program, cache=tmp_path_factory.mktemp("cache"))
    return result


def test_launches_of_other_types_or_alignment_are_other_variants_and_equal_ones_are_one(found: dict[str, Any]) -> None:
    assert found["aligned"] == [True, False, True]
    assert found["early launch"]  # which Hopper's variant has, and Ampere's has not


def test_what_was_compiled_is_found_in_the_cache(found: dict[str, Any]) -> None:
    assert found["first"] == [{"cached": False, "error": None}] * 3
    assert found["again"] == [{"cached": True, "error": None}] * 3


def test_a_kernel_of_which_a_file_is_damaged_is_noticed_and_compiled_again(found: dict[str, Any]) -> None:
    assert found["whole"] == found["whole again"] == [True] * 3
    assert found["keys"] and found["damaged"] == [1] * 3 and found["forgotten"].count(False) == 1
    assert found["mended"] == [[None] * 3] * 3


def test_a_kernel_has_one_name_whatever_was_launched_before(found: dict[str, Any]) -> None:
    assert found["name"] == found["named after another"]


def test_a_process_that_the_compiler_takes_down_costs_its_variant_alone(found: dict[str, Any]) -> None:
    crashed, failed, other = found["broken"]
    assert crashed["error"] == "its compiler's process ended with exit code 3"
    assert failed["error"] == "ValueError: and another"
    assert other["error"] is None


def test_processes_end_with_whoever_reads_their_outcomes(found: dict[str, Any]) -> None:
    assert found["left"] == 0


def test_a_process_with_a_context_of_cuda_is_refused(found: dict[str, Any]) -> None:
    assert found["refused"] == "compile in a process that has not initialized CUDA: forked processes could not use it"
