"""A process that is forked when it is asked for is as one that was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from teachllm.worker.processes import child
from teachllm_lessons import mutants
from tests import ready_children
from tests.processes import children, is_gone
from tests.ready_children import ReadyChild
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def test_it_is_a_child_with_what_it_was_given_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHLLM_CACHE", "elsewhere")
    given, other, before = os.pipe(), os.pipe(), children(os.getpid())
    process = child.start_child("teachllm.worker.processes.worker_process", "word", pass_fds=[given[0]])
    assert isinstance(process, ReadyChild) and process.poll() is None
    assert children(os.getpid()) == [*before, process.pid]
    assert os.getsid(process.pid) == process.pid
    opened = Path(f"/proc/{process.pid}/fd")
    # What it opens itself, such as a module's source, it closes soon.
    wait_for(lambda: {int(name) for name in os.listdir(opened)} == {0, 1, 2, given[0]})
    assert (opened / str(given[0])).readlink() == Path(f"/proc/self/fd/{given[0]}").readlink()
    assert (opened / "1").readlink() == (opened / "2").readlink() == Path("/proc/self/fd/2").readlink()
    process.kill()
    assert process.wait(30) == -9
    assert is_gone(process.pid) and children(os.getpid()) == before
    for descriptor in (*given, *other):
        os.close(descriptor)


def test_its_input_ends_when_this_process_closes_it() -> None:
    process = child.start_child("teachllm.worker.processes.worker_process")
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == 1  # there was nothing to load


@pytest.mark.parametrize("is_ready", [False, True])
def test_of_a_copy_of_the_project_nothing_has_been_imported_before(is_ready: bool, tmp_path: Path) -> None:
    (tmp_path / "teachllm").mkdir()
    (tmp_path / "teachllm" / "__init__.py").write_text("word = 'copied'\n")
    code = "import os, sys, teachllm; print(teachllm.word, input(), os.getcwd(), sys.dont_write_bytecode)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    start = mutants.start_python if is_ready else ready_children.start_fresh_python
    with start(tmp_path, "-c", code, **pipes) as process:
        assert isinstance(process, ReadyChild) == is_ready
        printed, _ = process.communicate("a line\n", timeout=60)
    assert (printed, process.returncode) == (f"copied a line {tmp_path} True\n", 0)
