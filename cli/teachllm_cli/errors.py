"""Report errors in one line on stderr; `--debug` shows where they come from."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator

import typer

from teachllm.core.memory import NotEnoughMemoryError

INTERRUPTED = 130  # what a shell reports for a process ended by Ctrl-C


@contextlib.contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Turn what the engine refuses into one line and exit code 1, a warning into one, and Ctrl-C into a quiet 130."""
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.showwarning = lambda message, *where, **more: _print_warning(message)
            yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader has left (`... | head -1`): so do we, without a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        print_error(error)
        raise typer.Exit(1) from None


def _print_warning(message: Warning | str) -> None:
    """`warning: …` on stderr, in one line."""
    from rich.text import Text

    from teachllm_cli.terminal import notes

    notes().print(Text.assemble(("warning: ", "bold yellow"), _one_line(str(message))), soft_wrap=True)


def print_error(error: Exception) -> None:
    """`error: …` on stderr, in red on a terminal, on one line, without markup. A table of where memory went follows."""
    from rich.text import Text

    from teachllm_cli.terminal import notes

    table = error.table if isinstance(error, NotEnoughMemoryError) else ""
    text = str(error).removesuffix(table)
    message = _one_line(text) or type(error).__name__
    if not isinstance(error, (ValueError, OSError, RuntimeError, ImportError)):
        message = f"{type(error).__name__}: {message} (--debug shows where)"
    notes().print(Text.assemble(("error: ", "bold red"), message, f"\n{table}" if table else ""), soft_wrap=True)


def _one_line(text: str) -> str:
    """Without line breaks and control characters, which a message may quote from a file or a model."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())
