"""A reader's saved notebook: run as it is, and what its checks say of the pieces in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachllm_lessons.build import execute
from teachllm_lessons.exercise import VERDICT_TYPE


@dataclass(frozen=True)
class ExerciseVerdict:
    """Hold the verdict on one exercise.

    Attributes:
        verdict: "right", "wrong" or "unwritten".
        says: why, in a few lines.
    """

    exercise: str
    verdict: str
    says: str


def verdicts(path: Path) -> list[ExerciseVerdict]:
    """Runs a saved notebook; it stays as it is.

    Raises:
        ValueError: it is no notebook, has no check in it, or a cell of it fails: which one, and with what words.
    """
    import nbformat
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    try:
        notebook = nbformat.read(path, as_version=4)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a notebook that can be read: {error}") from error
    try:
        execute(notebook, path.parent)
    except CellExecutionError as error:
        raise ValueError(f"{path.name}: a cell fails: {error.ename}: {error.evalue}") from error
    except CellTimeoutError as error:
        raise ValueError(f"{path.name}: a cell does not end") from error
    found = list(_told(notebook))
    if not found:
        raise ValueError(f"{path.name}: no cell shows what check(...) says: put the notebook back as it was")
    return found


def _told(notebook: Any) -> Iterator[ExerciseVerdict]:
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            told = output.get("data", {}).get(VERDICT_TYPE)
            if told is not None:
                yield ExerciseVerdict(told["exercise"], told["verdict"], told["says"])
