"""What goes wrong is said in one line on stderr; `--debug` shows where."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import typer

INTERRUPTED = 130  # what a shell reports for a process ended by Ctrl-C


@contextlib.contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Turn what the engine refuses into one line and exit code 1, and Ctrl-C into a quiet 130."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader has left (`... | head -1`): so do we, without a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if debug or isinstance(error, typer.Exit):
            raise
        print_error(error)
        raise typer.Exit(1) from None


def print_error(error: Exception) -> None:
    """`error: …` on stderr, in red on a terminal, on one line, without markup."""
    from rich.text import Text

    from teachllm_cli.terminal import notes

    message = "".join(c for c in " ".join(str(error).split()) if c.isprintable()) or type(error).__name__
    notes().print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
