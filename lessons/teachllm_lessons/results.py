"""Results of benchmarks that are kept with the project: what a lesson shows where there is no GPU to measure on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from teachllm_lessons.faults import ROOT


def committed(words: str, key: str | None = None) -> tuple[Path, dict[str, Any]]:
    """The newest result of a benchmark whose file's name has these words, and that has a key.

    Raises:
        FileNotFoundError: there is none.
    """
    for path in sorted((ROOT / "benchmarks" / "results").glob(f"*{words}*.json"), reverse=True):
        result = json.loads(path.read_text(encoding="utf-8"))
        if key is None or key in result:
            return path, result
    of_key = "" if key is None else f" with {key!r}"
    raise FileNotFoundError(f"no result named *{words}*.json{of_key} in benchmarks/results")
