"""The process that compiles beside an engine tells how far it is, and its end is never taken for success."""

from __future__ import annotations

import io
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from teachllm.config import EngineConfig
from teachllm.worker.gpu.startup import compile_process
from teachllm.worker.gpu.startup.compilation import Compiled
from teachllm.worker.gpu.startup.compile_process import CompileProcess
from teachllm_kernels.gpu_type import GPU_TYPES

CONFIG, GPU = EngineConfig(model="teachlm", speculative_config={"method": "ngram"}), GPU_TYPES["sm_90"]
DONE = Compiled("sm_90", 3, 1, "/cache", ["_pick: OSError: full"])


def in_place_of_python(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_it_waits_for_the_end_and_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        json.dumps({"done": 1, "of": 2}),
        json.dumps({"done": 2, "of": 2}),
        json.dumps({"compiled": DONE._asdict()}),
    ]
    said = "\n".join(f"echo '{line}'" for line in lines)
    in_place_of_python(tmp_path, f"cat > {tmp_path / 'asked'}\n{said}", monkeypatch)
    seen: list[tuple[int, int]] = []
    assert CompileProcess(CONFIG, GPU).wait(lambda done, of: seen.append((done, of))) == DONE
    assert seen == [(1, 2), (2, 2)]
    assert pickle.loads((tmp_path / "asked").read_bytes()) == (CONFIG, GPU)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo \'{"done": 1, "of": 2}\'; exit 7', "the process for it ended with exit code 7"),
        ("exit 0", "the process for it ended with exit code 0"),
        ('echo \'{"refused": "no such model"}\'', "could not be compiled ahead: no such model"),
    ],
)
def test_an_end_before_it_is_done_is_an_error(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place_of_python(tmp_path, script, monkeypatch)
    with pytest.raises(RuntimeError, match=message):
        CompileProcess(CONFIG, GPU).wait()


def test_closing_it_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_place_of_python(tmp_path, "exec sleep 600", monkeypatch)
    process = CompileProcess(CONFIG, GPU)
    process.close()
    assert process._process.returncode is not None


@pytest.mark.parametrize("error", [None, ValueError("max_model_len=0")])
def test_the_process_compiles_for_what_it_reads(
    error: ValueError | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile_known(config: EngineConfig, gpu: Any, progress: Any) -> Compiled:
        assert (config, gpu) == (CONFIG, GPU)
        progress(1, 2)
        if error is not None:
            raise error
        return DONE

    monkeypatch.setattr(compile_process, "compile_known", compile_known)
    stdin = io.TextIOWrapper(io.BytesIO(pickle.dumps((CONFIG, GPU))))
    monkeypatch.setattr(sys, "stdin", stdin)
    compile_process.main()
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"done": 1, "of": 2}
    assert last == ({"compiled": DONE._asdict()} if error is None else {"refused": "max_model_len=0"})
