"""`teachllm trace`: what is in a trace, and a trace in other formats."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from teachllm_cli.errors import one_line_errors
from teachllm_cli.terminal import answers, notes

if TYPE_CHECKING:
    from teachllm.trace.reader import Trace

trace = typer.Typer(name="trace", no_args_is_help=True, help="Look into traces, which --trace FILE writes.")

TraceFile = Annotated[Path, typer.Argument(metavar="FILE", help="A trace.", show_default=False)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@trace.command()
def show(
    file: TraceFile,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    debug: Debug = False,
) -> None:
    """Sum a trace up."""
    with one_line_errors(debug=debug):
        found = _read(file)
        if json_output:
            from teachllm.trace.figures import figures
            from teachllm.trace.ranks import rank_figures

            ranks = {"ranks": told} if (told := [asdict(each) for each in rank_figures(found.lines)]) else {}
            typer.echo(json.dumps(asdict(figures([found.header, *found.lines])) | ranks))
            return
        from rich.table import Table
        from rich.text import Text

        from teachllm.engine.text.tokenizer import sanitize_for_terminal
        from teachllm.trace.summary import summary

        table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
        for what, text in summary(found):
            table.add_row(Text(what, style="bold"), Text(sanitize_for_terminal(text)))
        answers().print(table)


@trace.command()
def export(
    file: TraceFile,
    perfetto: Annotated[Path | None, typer.Option(help="Write a timeline for https://ui.perfetto.dev.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page that shows the trace, to mail or to host.")] = None,
    title: Annotated[
        str | None, typer.Option(help="The page's title; without it, FILE's name.", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a trace in other formats."""
    with one_line_errors(debug=debug):
        if perfetto is None and html is None:
            raise ValueError("nothing to write: give --perfetto FILE, --html FILE, or both")
        if title is not None and html is None:
            raise ValueError("--title is the page's: give --html FILE, too")
        found = _read(file)
        if perfetto is not None:
            from teachllm.trace.perfetto import to_perfetto

            _write(perfetto, json.dumps(to_perfetto(found)) + "\n", file)
            notes().print(f"for https://ui.perfetto.dev: {perfetto}", markup=False, soft_wrap=True)
        if html is not None:
            from teachllm_webui.export import html_page

            lines = map(json.dumps, [found.header, *found.lines])
            _write(html, html_page(lines, file.name if title is None else title), file)
            notes().print(f"for any browser: {html}", markup=False, soft_wrap=True)


def _write(path: Path, text: str, source: Path) -> None:
    """For its owner alone, as the trace is: it says the same.

    Raises:
        ValueError: it is the trace itself.
        OSError: it cannot be written.
    """
    if path.exists() and path.samefile(source):
        raise ValueError(f"{path} is the trace itself: give another name")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as output:
        output.write(text)


def _read(file: Path) -> Trace:
    """A trace as far as it is sound, with a warning of what is wrong with the rest."""
    from teachllm.trace.reader import read_trace

    found = read_trace(file)
    for message in (found.note, found.problem):
        if message is not None:
            warnings.warn(f"{file}: {message}", stacklevel=2)
    return found
