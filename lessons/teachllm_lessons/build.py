"""Makes the notebooks of lessons from their sources: `NN_name.py`, in jupytext's percent format, to `NN_name.ipynb`.

    python -m teachllm_lessons.build            # all that are not up to date
    python -m teachllm_lessons.build 05 08      # these

A notebook is run from top to bottom in a kernel of its own, and kept with its outputs. A cell that fails ends it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from teachllm_lessons.faults import ROOT

FOLDER = ROOT / "lessons"
WINGS = [str(ROOT), *(str(ROOT / wing) for wing in ("kernels", "cli", "webui", "lessons"))]
SECONDS = 300  # for a cell, on a machine that has other things to do


def sources() -> list[Path]:
    """Of all lessons, in order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def read(source: Path) -> Any:
    """A notebook without outputs, as its source says."""
    import jupytext

    notebook = jupytext.read(source, fmt="py:percent")
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index:02}"  # stable, so that a notebook made again differs where it differs
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def inputs(notebook: Any) -> list[tuple[str, str]]:
    """(kind, text) of every cell."""
    return [(cell.cell_type, cell.source.rstrip()) for cell in notebook.cells]


def is_up_to_date(source: Path) -> bool:
    import nbformat

    made = source.with_suffix(".ipynb")
    return made.exists() and inputs(nbformat.read(made, as_version=4)) == inputs(read(source))


def execute(notebook: Any, folder: Path) -> float:
    """Runs it; returns the seconds that it took.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed, and its words.
    """
    from nbclient import NotebookClient

    began = time.monotonic()
    os.environ["PYTHONPATH"] = os.pathsep.join(WINGS)  # the kernel's: this project, whatever else is installed
    NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=40"],  # errors only: it warns of its own way to talk on this machine
    ).execute()
    return time.monotonic() - began


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("lessons", nargs="*", help="numbers; without any, those that are not up to date")
    options = parser.parse_args(arguments)
    import nbformat

    for source in sources():
        if source.name[:2] not in options.lessons and (options.lessons or is_up_to_date(source)):
            continue
        notebook = read(source)
        seconds = execute(notebook, FOLDER)
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times, which would differ each time
        nbformat.write(notebook, source.with_suffix(".ipynb"))
        print(f"{source.stem}: {len(notebook.cells)} cells, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
