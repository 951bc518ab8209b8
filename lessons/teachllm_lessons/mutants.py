"""`make mutants`: plants every fault in a copy of the project, one after the other, and has its test find it.

    python -m teachllm_lessons.mutants [--only WORDS] [--jobs N]

A fault that no test finds is one that a change could bring in unseen; then the exit code is 1, and likewise if a test
fails without any.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rich.console import Console
from rich.table import Table

from teachllm_lessons.faults import FAULTS, ROOT, Fault

_WINGS = ("teachllm", "kernels", "cli", "webui", "lessons", "tests")
_SECONDS = 300.0


@dataclass(frozen=True)
class Outcome:
    """Describe what became of a fault.

    Attributes:
        is_found: its test failed with it.
        is_clean: and passed without.
        message: the test's last words.
    """

    fault: Fault
    is_found: bool
    is_clean: bool
    message: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.is_found and self.is_clean


def copy_to(folder: Path) -> None:
    """The project, its large files as links."""
    for wing in _WINGS:
        ignored = shutil.ignore_patterns("assets", "golden", "*.ipynb*", ".*")  # bytecode goes along: it is valid there
        shutil.copytree(ROOT / wing, folder / wing, ignore=ignored)
    for linked in ("teachllm/assets", "tests/golden", "tests/quantization/formats/golden"):
        (folder / linked).symlink_to(ROOT / linked, target_is_directory=True)
    shutil.copy(ROOT / "pyproject.toml", folder)


def environment(folder: Path) -> dict[str, str]:
    """In which a process imports the project that lies in a folder, and may test it."""
    paths = [str(folder), *(str(folder / wing) for wing in ("kernels", "cli", "webui", "lessons"))]
    interpreted = {} if os.path.exists("/dev/nvidiactl") else {"TRITON_INTERPRET": "1"}  # as tests have it
    return interpreted | {
        "PYTHONPATH": os.pathsep.join(paths),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / ".found"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # to load them all takes longer than most tests
        "PYTHONDONTWRITEBYTECODE": "1",  # a fault may be planted within the second that bytecode is dated with
    }


def start_python(folder: Path, *arguments: str, **pipes: Any) -> subprocess.Popen[str]:
    """Python with these arguments, `-m module` and the module's, which imports the project that lies in a folder.

    Args:
        pipes: `stdin`, `stdout` and `stderr`, text, as of `Popen`.
    """
    known = os.environ | environment(folder)
    return subprocess.Popen([sys.executable, *arguments], cwd=folder, env=known, text=True, **pipes)


def pytest_arguments(*tests: str) -> list[str]:
    """Return the arguments with which pytest runs some tests by themselves, the same on every run."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "--color=no", "--hypothesis-seed=0"]
    return [*options, "-p", "_hypothesis_pytestplugin", "-o", "addopts=--import-mode=importlib", *tests]


def last_words(printed: str) -> str:
    """Return pytest's first line that names a failure, or its last line."""
    lines = printed.splitlines()
    said = [line for line in lines if line.startswith("E  ")] or lines[-1:]
    return said[0].removeprefix("E").strip() if said else ""


def run_test(folder: Path, *tests: str) -> tuple[int, str]:
    """Return (pytest's exit code, its last words) of some tests in a copy."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with start_python(folder, "-m", "pytest", *pytest_arguments(*tests), **pipes) as process:
        try:
            printed, _ = process.communicate(timeout=_SECONDS)
        finally:
            process.kill()
    return process.returncode, last_words(printed)


def try_fault(folder: Path, fault: Fault) -> Outcome:
    """In a copy, which is as it was afterwards."""
    began, file = time.monotonic(), folder / fault.path
    text = file.read_text(encoding="utf-8")
    clean, words = run_test(folder, fault.test)
    file.write_text(fault.planted(), encoding="utf-8")
    try:
        found, message = run_test(folder, fault.test)
    finally:
        file.write_text(text, encoding="utf-8")
    # 1: a test failed; any other code is not the test's word.
    return Outcome(fault, found == 1, clean == 0, message if clean == 0 else words, time.monotonic() - began)


def try_all(faults: Sequence[Fault], jobs: int) -> list[Outcome]:
    """Each job in a copy of its own."""
    with tempfile.TemporaryDirectory() as name:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            copy_to(Path(name, str(job)))
            copies.put(Path(name, str(job)))

        def attempt(fault: Fault) -> Outcome:
            folder = copies.get()
            try:
                return try_fault(folder, fault)
            finally:
                copies.put(folder)

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(attempt, faults))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="those whose name has these words")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    outcomes = try_all([fault for fault in FAULTS if options.only in f"{fault.id} {fault.name}"], options.jobs)
    table = Table(box=None, padding=(0, 1))
    for column in ("lesson", "fault", "found by", "seconds"):
        table.add_column(column)
    for each in outcomes:
        where = each.fault.test.rpartition("::")[2] if each.is_good else f"[bold red]NOT FOUND[/]: {each.fault.test}"
        if not each.is_clean:
            where = f"[bold red]FAILS WITHOUT IT[/]: {each.fault.test}: {each.message}"
        table.add_row(each.fault.id, each.fault.name, where, f"{each.seconds:.0f}")
    Console().print(table)
    num_found = sum(each.is_good for each in outcomes)
    print(f"{num_found} of {len(outcomes)} planted faults are found by their tests, which pass without them")
    return int(num_found < len(outcomes) or not outcomes)


if __name__ == "__main__":
    sys.exit(main())
