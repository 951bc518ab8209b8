"""Which kernels an engine may launch follows from its settings and the type of its GPU, before there is one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from teachllm.config import EngineConfig
from teachllm.worker.gpu.startup import compilation
from teachllm.worker.gpu.startup.compilation import Compiled, compile_known
from teachllm_kernels.compile_pool import Compilation
from teachllm_kernels.gpu_type import GPU_TYPES
from teachllm_kernels.variants import KernelVariant
from tests.compiled import run_compiled
from tests.thorough import THOROUGH


def test_kernels_follow_from_settings_and_gpu() -> None:
    result = run_compiled(Path(__file__).parent / "known_kernels.py")
    assert not result["loads PyTorch's compiler"]  # it takes as long as all of this
    found = result["kernels"]
    always = {"_append_tokens", "_gemv", "_paged_decode", "_pick", "_plan_decode", "_rms_norm", "_rope_kv_write"}
    always |= {"_scan", "_step_inputs", "_write_runs"}
    hoppers = {"_hopper_decode", "_hopper_linear", "_hopper_prefill", "_plan_prefill"}
    assert found["hopper"].keys() >= always | hoppers
    assert found["ampere"].keys() >= always | {"_skinny_gemm", "_paged_prefill"}
    assert not found["ampere"].keys() & hoppers
    assert found["int4"].keys() - found["hopper"].keys() == {"_hopper_packed_linear", "_packed_gemv", "_dequantize"}
    assert found["stages"] == found["hopper"]  # the stages' together
    assert found["drafts"].keys() - found["hopper"].keys() >= {"_accept_drafts", "_propose", "_push_drafts"}


@pytest.mark.skipif(not THOROUGH, reason="a minute's work; make test-thorough")
def test_one_that_was_killed_and_several_at_once_leave_a_whole_cache(tmp_path: Path) -> None:
    found = run_compiled(Path(__file__).parent / "shared_cache.py", "8", cache=tmp_path)
    assert not found["after one was killed"] and found["in the end"] and not found["failures"]
    first, *others = sorted(found["compiled"], reverse=True)
    assert first > 0 and not any(others)  # one compiles what is missing while the others wait
    assert len({sum(counts) for counts in zip(found["compiled"], found["found"], strict=True)}) == 1


def test_a_cache_that_cannot_be_written_to_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "_variants", lambda *_: pytest.fail("it goes on"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match=r"file/cache \(not a directory\): set TRITON_CACHE_DIR to another"):
        compile_known(EngineConfig(model="teachlm"), GPU_TYPES["sm_90"])

    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(ValueError, match=r"new \(no space left on device\)"):
        compile_known(EngineConfig(model="teachlm"), GPU_TYPES["sm_90"])


def test_what_was_compiled_was_there_or_failed_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    variant = KernelVariant(SimpleNamespace(__name__="_pick"), {}, {}, {}, None)
    outcomes = [(False, None), (True, None), (False, "too large"), (True, "too large"), (False, None)]
    found = [Compilation(variant, 1.0, was_cached, error, None) for was_cached, error in outcomes]
    monkeypatch.setattr(compilation, "_variants", lambda *_: [variant] * len(found))
    monkeypatch.setattr(compilation, "compile_in_processes", lambda *_: iter(found))
    seen: list[tuple[int, int]] = []
    result = compile_known(EngineConfig(model="teachlm"), GPU_TYPES["sm_90"], 2, lambda *so_far: seen.append(so_far))
    assert result == Compiled("sm_90", 2, 1, str(tmp_path), ["_pick: too large"] * 2)
    assert seen == [(done, 5) for done in range(1, 6)]
