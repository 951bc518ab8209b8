"""Show and write the results of all commands of `teachllm bench`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from teachllm_cli.terminal import notes

OutputJson = Annotated[Path | None, typer.Option(help="Write the results to this file.")]


def check_folder(flag: str, path: Path | None) -> None:
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.absolute().parent}")
    if path.is_dir():
        raise ValueError(f"{flag} {path}: that is a folder: give a file")


def write_json(output_json: Path | None, found: dict[str, Any]) -> None:
    if output_json is not None:
        output_json.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def progress_bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, gone at the end; nothing where stderr is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = notes()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(unit, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def number(value: float) -> str:
    """Three digits at least: 12,345, 123.4, 1.234, 0.1234."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
