"""Make the notebooks of lessons from their sources: `NN_name.py`, in jupytext's percent format, to `NN_name.ipynb`.

    python -m teachllm_lessons.build                    # all that are not up to date
    python -m teachllm_lessons.build 05 08              # these
    python -m teachllm_lessons.build --keep-outputs     # execute and stamp; leave the notebooks as they are

A notebook is executed from top to bottom in a kernel of its own, and kept with its outputs. A cell that fails ends it;
a cell with the tag `skip-execution` (one that reveals a fault) is left to the reader.
`stamps.json` holds a hash of what each notebook was made from when it was last executed without an error, so that a
test can tell which ones have to be executed again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from teachllm_lessons.faults import ROOT
from teachllm_lessons.index import find
from teachllm_lessons.links import head, install_cell, linked

FOLDER = ROOT / "lessons"
STAMPS = FOLDER / "stamps.json"
WINGS = [str(ROOT), *(str(ROOT / wing) for wing in ("kernels", "cli", "webui", "lessons"))]
SECONDS = 1500  # for a cell: more than `exercise.check` takes where the machine has other things to do


def sources() -> list[Path]:
    """Return the sources of all lessons, in order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def read(source: Path) -> Any:
    """Return a notebook without outputs: the source's cells with their links, and one that installs before the code."""
    import jupytext
    import nbformat

    lesson = find(source.name[:2])
    notebook = jupytext.read(source, fmt="py:percent")
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = linked(cell.source)
    notebook.cells[0].source += "\n\n" + head(lesson)
    notebook.cells.insert(1, nbformat.v4.new_code_cell(install_cell(lesson)))
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


def stamp(source: Path) -> str:
    """Return the SHA-256 of a lesson's source and of its own helper modules."""
    helpers = FOLDER / "teachllm_lessons" / "helpers"
    hashed = hashlib.sha256()
    for path in (source, *sorted(helpers.rglob(f"lesson_{source.name[:2]}*.py"))):
        hashed.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()


def stamps() -> dict[str, str]:
    """Return the stamp that each notebook had when it was last executed, by name."""
    return json.loads(STAMPS.read_text(encoding="utf-8")) if STAMPS.exists() else {}


def write_stamp(source: Path) -> None:
    """Note that a notebook has been executed as it is now."""
    known = dict(sorted((stamps() | {source.stem: stamp(source)}).items()))
    STAMPS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def is_up_to_date(source: Path) -> bool:
    import nbformat

    made = source.with_suffix(".ipynb")
    if not made.exists() or inputs(nbformat.read(made, as_version=4)) != inputs(read(source)):
        return False
    return stamps().get(source.stem) == stamp(source)


def execute(notebook: Any, folder: Path, on_cell: Callable[[int], None] = lambda index: None) -> float:
    """Runs it; returns the seconds that it took.

    Args:
        on_cell: called with the index of each cell before it runs.

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
        coalesce_streams=True,  # one output, however many messages the kernel sent it in
        extra_arguments=["--log-level=40"],  # errors only: it warns of its own way to talk on this machine
        on_cell_start=lambda cell, cell_index: on_cell(cell_index),
    ).execute()
    return time.monotonic() - began


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("lessons", nargs="*", help="numbers; without any, those that are not up to date")
    parser.add_argument("--keep-outputs", action="store_true", help="execute and stamp; write no notebook")
    options = parser.parse_args(arguments)
    import nbformat

    for source in sources():
        if source.name[:2] not in options.lessons and (options.lessons or is_up_to_date(source)):
            continue
        notebook = read(source)
        seconds = execute(notebook, FOLDER)
        if not options.keep_outputs:
            for cell in notebook.cells:
                cell.metadata.pop("execution", None)  # times, which would differ each time
            nbformat.write(notebook, source.with_suffix(".ipynb"))
        write_stamp(source)
        print(f"{source.stem}: {len(notebook.cells)} cells, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
