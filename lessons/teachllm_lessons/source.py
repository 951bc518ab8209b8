"""The source of the engine, printed live: what a lesson shows is what runs."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import Any

from teachllm_lessons.faults import ROOT


class Source:
    """Lines of a file, with what to look at.

    Args:
        what: a module, class, function or method; a class or module may be long, so name what is in it instead.
        look: {text that stands in a line: what to see there}. Each must stand in the source, or the lesson is out of
            date.
        doc: whether its docstring is shown, too.

    Raises:
        ValueError: a text to look at does not stand there.
    """

    def __init__(self, what: Any, look: dict[str, str] | None = None, *, doc: bool = True) -> None:
        what = getattr(what, "fn", what)  # a Triton kernel's own function
        lines, first = inspect.getsourcelines(inspect.unwrap(what))
        path = Path(inspect.getsourcefile(inspect.unwrap(what)) or "")
        self.where = f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{max(first, 1)}"
        if not doc:
            lines = _without_docstring(lines)
        self.lines = textwrap.dedent("".join(lines)).rstrip("\n").splitlines()
        self.notes: list[str] = []
        for text, note in (look or {}).items():
            at = next((number for number, line in enumerate(self.lines) if text in line), None)
            if at is None:
                raise ValueError(f"{self.where}: {text!r} does not stand there any more")
            self.notes.append(note)
            self.lines[at] += f"  # <- {len(self.notes)}"

    def _repr_markdown_(self) -> str:
        notes = "\n".join(f"{number}. {note}" for number, note in enumerate(self.notes, start=1))
        return f"`{self.where}`\n\n```python\n" + "\n".join(self.lines) + f"\n```\n\n{notes}\n"

    def __repr__(self) -> str:
        return "\n".join([self.where, *self.lines, *(f"{n}. {note}" for n, note in enumerate(self.notes, start=1))])


def _without_docstring(lines: list[str]) -> list[str]:
    """Of a function or class; what stands before it stays."""
    import ast

    tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    body = getattr(tree, "body", [])
    if len(body) < 2 or ast.get_docstring(tree) is None:  # type: ignore[arg-type]
        return lines
    return lines[: body[0].lineno - 1] + lines[body[0].end_lineno :]


def show(what: Any, look: dict[str, str] | None = None, *, doc: bool = True) -> Source:
    """The source of something, see `Source`."""
    return Source(what, look, doc=doc)
