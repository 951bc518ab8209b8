"""A planted fault to find: the engine with one line changed, in a process of its own; this one stays whole.

broken = plant("a hash without its parent")
broken.symptom("teachllm_lessons.lesson_05:two_prompts")   # what a user would see
broken.guess("teachllm/core/prefix_cache.py", "hash_block")
broken.reveal()                                             # the line, and what the suite says of it
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import io
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from teachllm_lessons.faults import FAULTS, ROOT, Fault
from teachllm_lessons.mutants import copy_to, run_test

_RUN = "import importlib, sys; module, name = sys.argv[1].split(':'); getattr(importlib.import_module(module), name)()"


@dataclass(frozen=True)
class Said:
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

    def symptom(self, scenario: str) -> Said:
        """What a scenario prints with the fault, beside what it prints without.

        Args:
            scenario: "module:function"; the function takes nothing and prints.
        """
        whole = _run_here(scenario)
        with tempfile.TemporaryDirectory() as name:
            folder = self._planted(Path(name))
            broken = _run(folder, scenario)
        return Said(f"The engine as it is:\n\n```\n{whole}\n```\n\nWith the fault:\n\n```\n{broken}\n```\n")

    def guess(self, path: str, function: str | None = None) -> Said:
        """Whether the fault is in that file, or in that function of it."""
        ends = "/" + path.removeprefix("./").lstrip("/")
        if not any(f"/{each}".endswith(ends) for each in _files()):
            return Said(f"? There is no `{path}` here.")
        if not f"/{self.fault.path}".endswith(ends):
            return Said(f"✗ Not in `{path}`: nothing is changed there.")
        place = self._function()
        asked = None if function is None else function.removesuffix("()").rpartition(".")[2]
        if asked in (None, place):
            return Said(f"✓ It is in `{self.fault.path}`" + (f", in `{place}`." if asked else ". Which function?"))
        if f"def {asked}(" not in (ROOT / self.fault.path).read_text(encoding="utf-8"):
            return Said(f"? The file is right. There is no `{function}` in it.")
        return Said(f"The file is right. `{asked}` is as it should be.")

    def reveal(self) -> Said:
        """The changed lines, and the words of the test that notices."""
        with tempfile.TemporaryDirectory() as name:
            code, message = run_test(self._planted(Path(name)), self.fault.test)
        before, after = self.fault.before.strip("\n").splitlines(), self.fault.after.strip("\n").splitlines()
        diff = [line for line in difflib.ndiff(before, after) if not line.startswith("?")]
        found = f"fails: `{message}`" if code == 1 else "passes: it should have failed, please report it"
        return Said(
            f"`{self.fault.path}`, in `{self._function()}`:\n\n```diff\n" + "\n".join(diff) + "\n```\n\n"
            f"{self.fault.happens} `{self.fault.test}` {found}"
        )

    def _planted(self, folder: Path) -> Path:
        copy_to(folder)
        (folder / self.fault.path).write_text(self.fault.planted(), encoding="utf-8")
        return folder

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


def plant(name: str) -> Broken:
    """The engine with the fault of this name, see `faults.py`."""
    return Broken(next(fault for fault in FAULTS if fault.name == name))


def _files() -> Iterator[str]:
    """Those that a fault may be in."""
    for wing in ("teachllm", "kernels"):
        for path in (ROOT / wing).rglob("*.py"):
            yield path.relative_to(ROOT).as_posix()


def _run_here(scenario: str) -> str:
    """What a scenario prints."""
    module, _, name = scenario.partition(":")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(action="ignore"):
        getattr(importlib.import_module(module), name)()
    return printed.getvalue().rstrip()


def _run(folder: Path, scenario: str) -> str:
    """What a scenario prints in a process of its own, with the project that lies in a folder."""
    paths = [str(folder), *(str(folder / wing) for wing in ("kernels", "cli", "webui", "lessons"))]
    ran = subprocess.run(
        [sys.executable, "-B", "-W", "ignore", "-c", _RUN, scenario],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if ran.returncode:
        return ran.stdout + (ran.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    return ran.stdout.rstrip()
