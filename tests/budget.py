"""CPU seconds of the tests by folder, beside the share that `budget.toml` gives each: a pytest plugin.

CPU seconds, children included, hardly depend on what else runs on the machine. A folder that is over its share is named
at the end of the run; nothing fails. `make test-thorough` prints the figures without judging them.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.thorough import THOROUGH

TABLE = Path(__file__).with_name("budget.toml")
_starts: list[str] = []


def _note_start(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen" and str(arguments[0]) == sys.executable:
        _starts.append(event)


sys.addaudithook(_note_start)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all children that have ended."""
    return sum(os.times()[:4])


def folder_of(path: str, table: dict[str, float]) -> str:
    """Return the entry of the table that a test file belongs to: the longest one that is a parent of it."""
    parents = [str(parent) for parent in Path(path).parents]
    return next((parent for parent in parents if parent in table), parents[0])


class Budget:
    """Collect what each phase of a test cost: measured where the test runs, added up where the report is printed."""

    def __init__(self) -> None:
        self.table: dict[str, float] = tomllib.loads(TABLE.read_text())["cpu_seconds"]
        self.used: Counter[str] = Counter()
        self.num_starts = 0
        self._before = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = cpu_seconds()
        report.cpu_seconds, self._before = now - self._before, now
        report.num_starts = len(_starts)
        _starts.clear()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.used[folder_of(report.nodeid.partition("::")[0], self.table)] += getattr(report, "cpu_seconds", 0.0)
        self.num_starts += getattr(report, "num_starts", 0)

    def pytest_runtest_logstart(self) -> None:
        self._before = cpu_seconds()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not terminalreporter.config.getoption("--budget"):
            return
        terminalreporter.section("CPU seconds by folder")
        for folder, used in sorted(self.used.items(), key=lambda entry: -entry[1]):
            share = self.table.get(folder)
            over = share is not None and used > share and not THOROUGH
            of = "no share in tests/budget.toml" if share is None else f"of {share:4.0f}"
            terminalreporter.write_line(f"{used:7.1f} {of}  {folder}{'  OVER ITS SHARE' if over else ''}")
        terminalreporter.write_line(f"{self.num_starts:7} Python processes that tests started themselves (at most 50)")
        total = sum(self.used.values())
        terminalreporter.write_line(
            f"{total:7.1f} of {sum(self.table.values()):4.0f}  all tests, without collecting them"
        )
