"""A process that has the project with a fault in it, and stays: to import PyTorch takes longer than most questions.

It reads a line of JSON for each, ["scenario", "module:function"] or ["test", "path::name"], and writes [exit code, what
was printed]. It ends with whoever asks.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import threading
import traceback
import warnings
from pathlib import Path

from teachllm_lessons.mutants import pytest_arguments, start_python


class BrokenProcess:
    """Asks it.

    Args:
        folder: the copy of the project.
    """

    def __init__(self, folder: Path) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = start_python(folder, "-m", "teachllm_lessons.broken_process", **pipes)

    def ask(self, kind: str, name: str, seconds: float) -> tuple[int, str]:
        """(exit code, what was printed).

        Raises:
            TimeoutError: it has taken longer, and was ended.
        """
        process, is_late = self._process, threading.Event()
        assert process.stdin is not None and process.stdout is not None

        def end() -> None:
            is_late.set()
            process.kill()

        watch = threading.Timer(seconds, end)
        watch.start()
        try:
            process.stdin.write(json.dumps([kind, name]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            watch.cancel()
        if answer:
            code, printed = json.loads(answer)
            return code, printed
        code = process.wait()  # its pipe is closed, and it is about to end
        if is_late.is_set():
            raise TimeoutError(f"no answer within {seconds:.0f} seconds: is the machine busy? Run the cell again")
        return code, "it ended without a word"

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def run_scenario(scenario: str) -> None:
    """Calls "module:function", which prints."""
    module, _, name = scenario.partition(":")
    getattr(importlib.import_module(module), name)()


def _exit_code(kind: str, name: str) -> int:
    if kind == "test":
        import pytest

        return int(pytest.main(pytest_arguments(name)))
    try:
        run_scenario(name)
    except Exception as error:  # a fault may do anything
        print(traceback.format_exception_only(error)[-1].rstrip())
        return 1
    return 0


def main() -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is not printed by Python is no part of an answer
    for line in sys.stdin:
        kind, name = json.loads(line)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = _exit_code(kind, name)
        print(json.dumps([code, printed.getvalue()]), file=answers, flush=True)


if __name__ == "__main__":
    main()
