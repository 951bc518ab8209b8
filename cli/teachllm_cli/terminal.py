"""The two consoles: answers go to stdout, everything about them to stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def answers() -> Console:
    """stdout: nothing but what the model says, and on a terminal the conversation around it."""
    from rich.console import Console

    return Console(highlight=False)


def notes() -> Console:
    """stderr: progress, figures, errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def write_model_text(console: Console, text: str, style: str | None = None) -> None:
    """Print text that a model wrote or read: no markup, no highlighting, no control characters."""
    from teachllm.engine.text.tokenizer import sanitize_for_terminal

    text = sanitize_for_terminal(text)
    if style and console.is_terminal:
        console.out(text, end="", highlight=False, style=style)
    else:
        console.file.write(text)  # rich would turn tabs into spaces
        console.file.flush()


_STAGES = {  # by the names of `teachllm.startup_progress`
    "weights": "loading weights",
    "kernels": "compiling kernels",
    "graphs": "recording CUDA graphs",
}


@contextlib.contextmanager
def loading_bar(name: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr while an engine starts, gone when it is ready; nothing where stderr is not a terminal.

    Yields what to call with (stage, how much is done, of what). Until then the bar pulses: torch itself is loading.
    """
    from rich.progress import BarColumn, Progress, TextColumn

    texts = [TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[amount]}")]
    console = notes()
    with Progress(
        texts[0], BarColumn(), texts[1], console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(f"loading {name}", total=None, amount="")

        def update(stage: str, done: int, total: int) -> None:
            amount = f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB" if stage == "weights" else f"{done} of {total}"
            progress.update(task, description=_STAGES[stage], completed=done, total=total, amount=amount)

        yield update
