"""An engine on a GPU is ready when it says so: what it needs is compiled and recorded, and a second start finds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compiled import run_compiled

pytestmark = pytest.mark.gpu
SETTINGS: dict[str, Any] = {"model": "teachlm", "max_num_seqs": 8, "num_gpu_blocks_override": 512}


def start(folder: Path, name: str, **settings: Any) -> dict[str, Any]:
    """Return what `counted_start.py` prints."""
    program = Path(__file__).parent / "counted_start.py"
    arguments = [str(folder / name), json.dumps(SETTINGS | settings)]
    result: dict[str, Any] = run_compiled(program, *arguments, cache=folder / "cache")
    return result


@pytest.mark.parametrize(
    "settings",
    [{}, {"speculative_config": {"method": "ngram"}}, {"quantization": "int4"}],
    ids=["plain", "ngram", "int4"],
)
def test_a_process_compiles_all_before_an_engine_is_ready_and_a_second_start_compiles_nothing(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    first, second = (start(tmp_path, name, **settings) for name in ("first", "second"))
    assert first["stages"]["kernels"] > 50 and first["by programs"] > 50
    assert first["in the engine"] == []
    for each in (first, second):
        assert each["stages"]["graphs"] > 20
        assert each["when ready"] == {"compiled": [], "recorded": []}
    assert "kernels" not in second["stages"] and second["by programs"] == 0


def test_a_fast_start_records_graphs_when_they_are_needed(tmp_path: Path) -> None:
    found = start(tmp_path, "fast", startup="fast")
    assert "graphs" not in found["stages"] and found["stages"]["kernels"] > 50
    assert found["in the engine"] == found["when ready"]["compiled"] == []
    assert len(found["when ready"]["recorded"]) > 3
