"""Results of benchmarks that are kept with the project: what a lesson shows where there is no GPU to measure on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from teachllm_lessons.faults import ROOT


def committed(words: str) -> tuple[Path, dict[str, Any]]:
    """The newest result of a benchmark whose file's name has these words.

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted((ROOT / "benchmarks" / "results").glob(f"*{words}*.json"))
    if not found:
        raise FileNotFoundError(f"no result named *{words}*.json in benchmarks/results")
    return found[-1], json.loads(found[-1].read_text(encoding="utf-8"))
