"""`teachllm warm`: what it compiles for, what it says, and when it fails."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from teachllm.worker.gpu.startup import compilation
from teachllm.worker.gpu.startup.compilation import Compiled
from teachllm_kernels.gpu_type import GPU_TYPES


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was to be compiled, in place of doing so."""
    asked: list[tuple[Any, ...]] = []

    def compile_known(config: Any, gpu: Any, num_processes: int | None, progress: Any) -> Compiled:
        asked.append((config.model, config.quantization, gpu, num_processes))
        progress(1, 1)
        return Compiled(
            gpu.target, 70, 3, "/somewhere/[cache]", ["_pick: OSError: [disk] full"] if config.quantization else []
        )

    monkeypatch.setattr(compilation, "compile_known", compile_known)
    return asked


def test_it_compiles_for_the_named_gpu_and_says_what_and_where(teachllm: Any, asked: list[tuple[Any, ...]]) -> None:
    result = teachllm("warm", "--gpu", "sm_90", "--processes", "3")
    assert asked == [("teachlm", None, GPU_TYPES["sm_90"], 3)]
    assert result.exit_code == 0
    assert "70 kernels compiled for sm_90 in 0 s, 3 were there already: /somewhere/[cache]" in result.stdout


def test_its_help_names_each_type_of_gpu(teachllm: Any) -> None:
    result = teachllm("warm", "--help")
    assert all(target in result.stdout for target in GPU_TYPES)


def test_a_kernel_that_does_not_compile_is_named_and_fails_the_command(
    teachllm: Any, asked: list[tuple[Any, ...]]
) -> None:
    result = teachllm("warm", "--gpu", "sm_80", "--quantization", "int4")
    assert asked[0][1:] == ("int4", GPU_TYPES["sm_80"], None)
    assert result.exit_code == 1
    assert "not compiled: _pick: OSError: [disk] full" in result.stderr


def test_an_unknown_gpu_or_none_is_refused_in_a_line(
    teachllm: Any, asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = teachllm("warm", "--gpu", "sm_99")
    assert result.exit_code == 1 and "gpu='sm_99' is no type of GPU" in result.stderr
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = teachllm("warm")
    assert result.exit_code == 1 and "there is no GPU here whose type could be asked for" in result.stderr
    assert not asked


def test_without_triton_it_says_what_to_install(
    teachllm: Any, asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teachllm.engine.warm.find_spec", lambda name: None)
    result = teachllm("warm", "--gpu", "sm_90")
    assert result.exit_code == 1 and "pip install 'teachllm[gpu]'" in result.stderr and not asked
