"""The commands and what they are called. A command loads torch when it runs, never when it is listed."""

from __future__ import annotations

from typing import Annotated

import typer

from teachllm import __version__
from teachllm_cli.commands.bench import bench
from teachllm_cli.commands.chat import chat
from teachllm_cli.commands.complete import complete
from teachllm_cli.commands.generate import generate
from teachllm_cli.commands.info import info
from teachllm_cli.commands.ladder import ladder
from teachllm_cli.commands.lesson import lesson
from teachllm_cli.commands.quantize import quantize
from teachllm_cli.commands.run_batch import run_batch
from teachllm_cli.commands.serve import serve
from teachllm_cli.commands.spec import spec
from teachllm_cli.commands.trace import trace
from teachllm_cli.commands.viz import viz
from teachllm_cli.commands.warm import warm
from teachllm_cli.commands.worker import worker

app = typer.Typer(
    name="teachllm",
    help="An LLM inference engine to use, to read and to watch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (chat, generate, info, warm, serve, worker, complete, run_batch, quantize, ladder, viz):
    app.command()(command)
for group in (bench, lesson, spec, trace):
    app.add_typer(group)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"teachllm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """An LLM inference engine to use, to read and to watch."""
