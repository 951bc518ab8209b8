"""The process that compiles beside an engine tells how far it is, and its end is never taken for success."""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton")

from teachllm.config import EngineConfig
from teachllm.worker.gpu.memory.predicted import PredictedNeeds
from teachllm.worker.gpu.startup import compile_process
from teachllm.worker.gpu.startup.compilation import Compiled
from teachllm.worker.gpu.startup.compile_process import CompileProcess, Compiling, finish_compiling, start_compiling
from teachllm.worker.gpu.startup.compiled_record import Found
from teachllm_kernels import kernel_cache
from teachllm_kernels.gpu_type import GPU_TYPES
from tests.processes import is_gone
from tests.waiting import wait_for

CONFIG, GPU = EngineConfig(model="teachlm", speculative_config={"method": "ngram"}), GPU_TYPES["sm_90"]
DONE = Compiled("sm_90", 3, 1, "/cache", [])
NEEDS = [PredictedNeeds({"activations": 5}, 0)]


def nothing(done: int, of: int) -> None: ...


def in_place_of_python(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a shell script run: it is started as `python -P -m MODULE DESCRIPTOR`."""
    path = folder / "python"
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def saying(*lines: Any) -> str:
    return "\n".join(f"echo '{json.dumps(line)}' >&$4" for line in lines)


def test_it_waits_for_the_end_and_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = saying({"done": 1, "of": 2}, {"done": 2, "of": 2}, {"compiled": DONE._asdict()})
    in_place_of_python(tmp_path, script, monkeypatch)
    seen: list[tuple[int, int]] = []
    process = CompileProcess(CONFIG, GPU)
    assert process.wait(lambda done, of: seen.append((done, of))) == DONE
    assert seen == [(1, 2), (2, 2)]
    process.close()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (saying({"done": 1, "of": 2}) + "; exit 7", "the process for it ended: exit code 7"),
        ("exit 0", "the process for it ended: exit code 0"),
        ("kill -9 $$", "the process for it ended: SIGKILL"),
        (saying({"refused": "no such model"}), "no such model"),
        (saying({"compiled": DONE._replace(failures=["_pick: OSError: full"])._asdict()}), "_pick: OSError: full"),
        (saying({"compiled": DONE._replace(failures=["_pick: a", "_scan: b"])._asdict()}), "_pick: a, and 1 more"),
    ],
)
def test_what_was_not_compiled_is_told_in_a_warning_and_left_to_the_engine(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place_of_python(tmp_path, script, monkeypatch)
    process = CompileProcess(CONFIG, GPU)
    with pytest.warns(UserWarning, match=f"^not compiled ahead, so at its launch: {message}$"):
        finish_compiling(process, nothing)
    assert process._process.returncode is not None and process._said.closed


def test_it_ends_with_all_its_children_when_it_is_closed_or_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place_of_python(tmp_path, f"sleep 600 & echo $! > {tmp_path / 'child'}; echo '{{}}' >&$4; wait", monkeypatch)
    for leave in (lambda process: process.close(), lambda process: None):
        process = CompileProcess(CONFIG, GPU)
        process._said.readline()
        started = process._process
        leave(process)
        del process
        assert started.returncode is not None
        child = int((tmp_path / "child").read_text())
        wait_for(lambda: is_gone(child))  # noqa: B023 - before the next one


@pytest.mark.parametrize("error", [None, ValueError("max_model_len=0")])
def test_the_process_compiles_for_what_it_is_told(error: ValueError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_known(config: EngineConfig, gpu: Any, progress: Any) -> Compiled:
        assert (config, gpu) == (CONFIG, GPU)
        warnings.warn("of the settings", stacklevel=1)  # which the engine has said: an error here
        progress(1, 2)
        if error is not None:
            raise error
        return DONE

    monkeypatch.setattr(compile_process, "compile_known", compile_known)
    monkeypatch.setattr(compile_process, "what_to_do", lambda: json.dumps([asdict(CONFIG), GPU]))
    for name in ("leave_signals_to_the_parent", "end_with_the_parent", "leave_compiler_out"):
        monkeypatch.setattr(compile_process, name, lambda: None)
    reads, writes = os.pipe()
    monkeypatch.setattr(sys, "argv", ["compile_process", str(writes)])
    compile_process.main()
    with open(reads, encoding="utf-8") as said:
        first, last = map(json.loads, said)
    assert first == {"done": 1, "of": 2}
    assert last == ({"compiled": DONE._asdict()} if error is None else {"refused": "max_model_len=0"})


# -- an engine's start -------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """In place of processes: the cache's folder, as each would see it."""
    started: list[str] = []
    monkeypatch.setattr(compile_process, "CompileProcess", lambda *_: started.append(os.environ["TRITON_CACHE_DIR"]))
    monkeypatch.setattr(compile_process, "gpu_type", lambda device: GPU)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return started


class _Record:
    """A record of what is compiled, in the folders of `complete`."""

    complete: ClassVar[set[str]] = set()

    def __init__(self, folder: Path, *engine: object) -> None:
        self._folder = str(folder)

    def read(self) -> Found | None:
        return Found([], NEEDS) if self._folder in self.complete else None

    def write(self, found: Found) -> None:
        self.complete.add(self._folder)


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The folders that have a record."""
    monkeypatch.setattr(_Record, "complete", set())
    monkeypatch.setattr(compile_process, "CompiledRecord", _Record)
    return _Record.complete


def start() -> Compiling:
    return start_compiling(CONFIG, None, None, torch.device("cuda"))  # type: ignore[arg-type]


def test_what_an_earlier_start_has_compiled_needs_no_process(
    started: list[str], complete: set[str], tmp_path: Path
) -> None:
    assert start() == Compiling(None, None) and started == [str(tmp_path / "cache")]
    complete.add(str(tmp_path / "cache"))
    assert start() == Compiling(None, NEEDS) and len(started) == 1


def test_a_cache_that_can_only_be_read_is_copied_to_one_that_can_be_written_to(
    started: list[str], complete: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("no folder, so nothing can be written into it")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    complete.add(str(tmp_path / "cache"))
    with warnings.catch_warnings(action="error"):
        assert start() == Compiling(None, NEEDS)
    assert not started and Path(os.environ["TRITON_CACHE_DIR"]).parent == tmp_path


def test_a_cache_that_cannot_be_written_to_is_replaced_and_a_line_says_so(
    started: list[str], complete: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match=r"cache \(file exists\) and are in .*: set TRITON_CACHE_DIR"):
        start()
    other = Path(started[0])
    assert other.parent == tmp_path and other.stat().st_mode & 0o777 == 0o700
    other.chmod(0o777)  # anybody could put kernels there
    monkeypatch.setattr(kernel_cache, "_IN_MEMORY", tmp_path / "memory")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.warns(UserWarning, match="memory"):
        start()


def test_an_engine_starts_where_no_process_can_be_started(
    started: list[str], complete: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*engine: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(compile_process, "CompileProcess", fail)
    with pytest.warns(UserWarning, match="not compiled ahead, so at its launch: every kernel .*Cannot allocate memory"):
        assert start() == Compiling(None, None)
