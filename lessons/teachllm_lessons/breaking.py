"""A planted fault to find: the engine with one line changed, in a process of its own; this one stays whole.

broken = plant("05a")
broken.symptom("teachllm_lessons.helpers.lesson_05:two_beginnings")   # what a user would see
broken.guess("teachllm/core/prefix_cache.py", "hash_block")
broken.reveal()                                             # the line, what it does, and the test that notices
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import tempfile
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from teachllm_lessons.broken_process import BrokenProcess, run_scenario
from teachllm_lessons.faults import ROOT, Fault, find_fault
from teachllm_lessons.mutants import copy_to, last_words

_SECONDS = 240.0  # for a question


@dataclass(frozen=True)
class MarkdownText:
    """A few words, as Markdown in a notebook."""

    text: str

    def _repr_markdown_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text


class Broken:
    """An engine with a fault in it."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._process: BrokenProcess | None = None

    def symptom(self, scenario: str) -> MarkdownText:
        """Return what a scenario prints with the fault, beside what it prints without.

        Args:
            scenario: "module:function"; the function takes nothing and prints.
        """
        whole = io.StringIO()
        with contextlib.redirect_stdout(whole), warnings.catch_warnings(action="ignore"):
            run_scenario(scenario)
        _, broken = self._asked("scenario", scenario)
        here, there = whole.getvalue().rstrip(), broken.rstrip()
        return MarkdownText(f"The engine as it is:\n\n```\n{here}\n```\n\nWith the fault:\n\n```\n{there}\n```\n")

    def guess(self, path: str, function: str | None = None) -> MarkdownText:
        """Return whether the fault is in that file, or in that function of it."""
        ends = "/" + path.removeprefix("./").lstrip("/")
        meant = [each for each in _files() if f"/{each}".endswith(ends)]
        if not meant:
            return MarkdownText(f"? There is no `{path}` here.")
        if len(meant) > 1:
            return MarkdownText(f"? Which one: {', '.join(f'`{each}`' for each in sorted(meant))}?")
        if meant != [self.fault.path]:
            return MarkdownText(f"✗ Not in `{path}`: nothing is changed there.")
        place = self._function()
        asked = None if function is None else function.removesuffix("()").rpartition(".")[2]
        if asked in (None, place):
            return MarkdownText(
                f"✓ It is in `{self.fault.path}`" + (f", in `{place}`." if asked else ". Which function?")
            )
        if f"def {asked}(" not in (ROOT / self.fault.path).read_text(encoding="utf-8"):
            return MarkdownText(f"? The file is right. There is no `{function}` in it.")
        return MarkdownText(f"The file is right. `{asked}` is as it should be.")

    def reveal(self) -> MarkdownText:
        """Return what is wrong, the changed lines, what they do, and the words of the test that notices."""
        code, printed = self._asked("test", self.fault.test)
        before, after = self.fault.before.strip("\n").splitlines(), self.fault.after.strip("\n").splitlines()
        diff = [line for line in difflib.ndiff(before, after) if not line.startswith("?")]
        found = f"fails: `{last_words(printed)}`" if code == 1 else "passes: it should have failed, please report it"
        parts = (
            f"**{self.fault.name[0].upper()}{self.fault.name[1:]}**: `{self.fault.path}`, in `{self._function()}`",
            "\n".join(["```diff", *diff, "```"]),
            f"{self.fault.happens} `{self.fault.test}` {found}",
        )
        return MarkdownText("\n\n".join(parts))

    def _asked(self, kind: str, name: str) -> tuple[int, str]:
        if self._process is None or not self._process.is_there:
            folder = tempfile.TemporaryDirectory()
            copy_to(Path(folder.name))
            (Path(folder.name) / self.fault.path).write_text(self.fault.planted(), encoding="utf-8")
            self._process = BrokenProcess(Path(folder.name))
            weakref.finalize(self, _forget, self._process, folder)
        return self._process.ask(kind, name, _SECONDS)

    def _function(self) -> str:
        """The innermost function or method around the change."""
        text = (ROOT / self.fault.path).read_text(encoding="utf-8")
        line = text[: text.index(self.fault.before)].count("\n") + 1
        line += len(self.fault.before) - len(self.fault.before.lstrip("\n"))
        inside = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
        ]
        return max(inside, key=lambda node: node.lineno).name if inside else "the module"


def plant(id: str) -> Broken:
    """Return the engine with the fault of this id, see `faults.py`, which names all of them.

    Raises:
        ValueError: there is none.
    """
    return Broken(find_fault(id))


def _files() -> Iterator[str]:
    """Those that a fault may be in."""
    for wing in ("teachllm", "kernels"):
        for path in (ROOT / wing).rglob("*.py"):
            yield path.relative_to(ROOT).as_posix()


def _forget(process: BrokenProcess, folder: tempfile.TemporaryDirectory[str]) -> None:
    process.close()
    folder.cleanup()
