"""A reader's saved notebook: run as it is, and what its checks say of the pieces in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachllm_lessons.build import SECONDS, execute
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


def verdicts(path: Path, progress: Callable[[str], None] = lambda text: None) -> list[ExerciseVerdict]:
    """Runs a saved notebook; it stays as it is.

    Args:
        progress: called with which cell is to run, before each.

    Raises:
        ValueError: it is no notebook, has no check in it, or a cell of it fails: which one, and with what words.
    """
    import nbformat
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    try:
        notebook = nbformat.read(path, as_version=4)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a notebook that can be read: {error}") from error
    cell = "no cell"

    def begin(index: int) -> None:
        nonlocal cell
        cell = _name(notebook, index)
        progress(cell)

    try:
        execute(notebook, path.parent, begin)
    except CellExecutionError as error:
        raise ValueError(f"{path.name}: {cell} fails: {error.ename}: {error.evalue}") from error
    except CellTimeoutError as error:
        raise ValueError(
            f"{path.name}: {cell} was still running after {SECONDS} seconds: does a loop in it never end, or is the "
            "machine busy?"
        ) from error
    except DeadKernelError as error:
        raise ValueError(f"{path.name}: {cell} ends the process that runs the notebook: {error}") from error
    found = list(_told(notebook))
    if not found:
        raise ValueError(f"{path.name}: no cell shows what check(...) says: put the notebook back as it was")
    return found


def _name(notebook: Any, index: int) -> str:
    """Return a cell's place and its first line of code, if any, as `cell 3 of 40 (answer = check(...))`."""
    lines = [line.strip() for line in notebook.cells[index].source.splitlines()]
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return f"cell {index + 1} of {len(notebook.cells)}" + (f" ({first})" if first else "")


def _told(notebook: Any) -> Iterator[ExerciseVerdict]:
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            told = output.get("data", {}).get(VERDICT_TYPE)
            if told is not None:
                yield ExerciseVerdict(told["exercise"], told["verdict"], told["says"])
