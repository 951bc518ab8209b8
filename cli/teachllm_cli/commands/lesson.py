"""`teachllm lesson`: the notebooks that step through the engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from teachllm_cli.errors import one_line_errors
from teachllm_cli.terminal import answers, notes

if TYPE_CHECKING:
    from teachllm_lessons.index import Lesson

lesson = typer.Typer(
    name="lesson", help="Step through the engine in notebooks, one concept at a time.", no_args_is_help=True
)

Number = Annotated[str, typer.Argument(metavar="NN", help="The lesson's number, as `teachllm lesson list` shows it.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@lesson.command("list")
def list_lessons() -> None:
    """Show what there is to learn."""
    from rich.table import Table

    from teachllm_lessons.index import LESSONS

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for each in LESSONS:
        table.add_row(each.number, each.concept, each.question)
    answers().print(table)


@lesson.command("open", context_settings={"ignore_unknown_options": True})
def open_lesson(
    number: Annotated[str, typer.Argument(metavar="NN", help="The lesson's number; without it, all are listed.")] = "",
    flags: Annotated[list[str] | None, typer.Argument(metavar="JUPYTER_FLAGS", help="As --port 8889.")] = None,
    debug: Debug = False,
) -> None:
    """Start Jupyter with a lesson; Ctrl-C ends it."""
    import subprocess

    with one_line_errors(debug):
        further = list(flags or ())
        if number.startswith("-"):
            number, further = "", [number, *further]
        path = _notebook(number or "00")
        _need("jupyterlab")
        root = path.parents[1]  # so that a notebook's links to sources and documentation can be followed
        opened = (path if number else path.parent).relative_to(root)
        _trust(path.parent)
        command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={root}"]
        command += [f"--LabApp.default_url=/lab/tree/{opened.as_posix()}", *further]
        notes().print(f"starting Jupyter with {opened.name} ...")
        raise typer.Exit(subprocess.call(command, cwd=root))


def _trust(folder: Path) -> None:
    """Sign the project's own notebooks. Without a signature Jupyter shows no picture that it has not just drawn."""
    from nbformat import read
    from nbformat.sign import NotebookNotary

    notary = NotebookNotary()
    for path in folder.glob("*.ipynb"):
        notary.sign(read(path, as_version=4))


@lesson.command("check")
def check_lesson(
    number: Number,
    notebook: Annotated[
        Path | None, typer.Option(help="A copy of it that you have written in; without, the lesson's own file.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run a saved notebook and say which pieces that you have written hold; the exit code is 1 if one does not."""
    with one_line_errors(debug):
        path = notebook or _notebook(number)
        _need("nbclient")
        from rich.markup import escape

        from teachllm_lessons.saved import verdicts

        marks = {"right": "[green]✓[/]", "wrong": "[red]✗[/]", "unwritten": "[dim]…[/]", "unjudged": "[yellow]?[/]"}
        with notes().status(f"running {path.name} ...") as status:
            found = verdicts(path, lambda cell: status.update(escape(f"running {path.name}, {cell} ...")))
        for each in found:
            answers().print(f"{marks[each.verdict]} {each.exercise}", end=" ")
            answers().print(each.says.partition("\n")[0], markup=False)
        if any(each.verdict != "right" for each in found):
            raise typer.Exit(1)


def _notebook(number: str) -> Path:
    """The notebook's file.

    Raises:
        ValueError: there is no such lesson, or the notebooks are not there.
    """
    from teachllm_lessons.index import find

    chosen: Lesson = find(number)
    if not chosen.notebook.exists():
        raise ValueError(
            f"{chosen.notebook}: not there; the notebooks are in the repository, not in the package: clone it"
        )
    return chosen.notebook


def _need(module: str) -> None:
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise ImportError(f"the lessons need {module}: pip install 'teachllm[lessons]'")
