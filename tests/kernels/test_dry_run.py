"""A dry run allocates, launches nothing, and answers for the card that it names."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from teachllm_kernels import dry_run as module
from teachllm_kernels._hopper import has_hopper
from teachllm_kernels._triton import HAS_GLUON, launch_options, triton
from teachllm_kernels.attention.kv_quantization import has_fp8
from teachllm_kernels.dry_run import compute_capability, dry_run, per_device
from teachllm_kernels.gpu_type import GPU_TYPES
from teachllm_kernels.linear.scaled.scaled_mm import library_multiplies
from teachllm_kernels.rms_norm import rms_norm_triton

META, CPU = torch.device("meta"), torch.device("cpu")


class Launched(Exception):
    pass


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a launch say so, natively and interpreted."""

    def run(*_: Any, **__: Any) -> None:
        raise Launched

    for kind in module._launching_classes():
        monkeypatch.setattr(kind, "run", run)


def norm(device: torch.device) -> tuple[torch.Size, torch.device]:
    y = torch.empty(3, 64, dtype=torch.bfloat16, device=device)
    normed, _ = rms_norm_triton(y, torch.empty_like(y), torch.ones(64, dtype=torch.bfloat16, device=device), 1e-6)
    return normed.shape, normed.device


@pytest.mark.usefixtures("launching")
def test_nothing_is_launched_inside_and_everything_outside_even_after_an_error() -> None:
    with pytest.raises(Launched):
        norm(CPU)
    with dry_run(GPU_TYPES["sm_80"]):
        assert norm(META) == ((3, 64), META)
        with dry_run(GPU_TYPES["sm_90"]):
            assert norm(META) == ((3, 64), META)
        assert norm(META) == ((3, 64), META)
    with pytest.raises(ValueError, match="of the block"), dry_run(GPU_TYPES["sm_80"]):
        raise ValueError("of the block")
    with pytest.raises(Launched):
        norm(CPU)


@pytest.mark.usefixtures("launching")
def test_other_threads_launch_meanwhile() -> None:
    found: list[str] = []

    def launch() -> None:
        try:
            norm(CPU)
        except Launched:
            found.append("launched")

    with dry_run(GPU_TYPES["sm_90"]):
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    assert found == ["launched"]


def test_of_two_threads_one_waits_for_the_other() -> None:
    order: list[str] = []
    is_inside = threading.Event()

    def second() -> None:
        is_inside.wait()
        order.append("asks")
        with dry_run(GPU_TYPES["sm_90"]):
            order.append("enters")

    before = triton.JITFunction.run
    thread = threading.Thread(target=second)
    thread.start()
    with dry_run(GPU_TYPES["sm_80"]):
        is_inside.set()
        thread.join(0.1)
        assert order == ["asks"] and compute_capability(META) == (8, 0)
    thread.join()
    assert order == ["asks", "enters"] and triton.JITFunction.run is before


@pytest.mark.skipif(not HAS_GLUON, reason="has_hopper needs Gluon")
def test_the_meta_device_is_the_named_card_and_no_card_outside() -> None:
    def answers() -> tuple[tuple[int, int], bool, bool]:
        return compute_capability(META), has_hopper(META), launch_options(META)["PDL"]

    assert answers() == ((0, 0), False, False)
    with dry_run(GPU_TYPES["sm_90"]):
        assert answers() == ((9, 0), True, True)
        with dry_run(GPU_TYPES["sm_80"]):
            assert answers() == ((8, 0), False, False)
        assert answers() == ((9, 0), True, True)
        with dry_run(GPU_TYPES["sm_100"]):
            assert answers() == ((10, 0), False, True)
        assert compute_capability(CPU) == (0, 0) and not has_hopper(CPU)
    assert answers() == ((0, 0), False, False)


def test_a_launch_for_amd_has_no_option_of_nvidia_and_no_kernel_that_its_fp8_does_not_run() -> None:
    with dry_run(GPU_TYPES["sm_80"]):
        assert launch_options(META, maxnreg=128) == {"PDL": False, "maxnreg": 128}
        assert launch_options(META, maxnreg=None) == {"PDL": False}
    with dry_run(GPU_TYPES["gfx942"]):
        assert launch_options(META, maxnreg=128) == {"PDL": False}
        assert not has_fp8(META) and not has_hopper(META)
        assert not library_multiplies(compute_capability(META), 128, 128, is_e4m3=True, has_blocks=False)


def test_a_device_is_asked_once_and_the_meta_device_once_for_each_card() -> None:
    asked: list[tuple[torch.device, tuple[int, int]]] = []
    ask = per_device(lambda device: asked.append((device, compute_capability(device))))
    for _ in range(2):
        ask(CPU), ask(META)
    assert asked == [(CPU, (0, 0)), (META, (0, 0))]
    for target in ("sm_90", "sm_80", "sm_90"):
        with dry_run(GPU_TYPES[target]):
            ask(META), ask(META), ask(CPU)
    ask(META)
    assert asked[2:] == [(META, (9, 0)), (META, (8, 0))]


@pytest.mark.skipif(not HAS_GLUON, reason="has_hopper needs Gluon")
@pytest.mark.parametrize("is_dry_first", [False, True])
def test_a_thread_outside_and_a_dry_run_each_get_their_own_answer(is_dry_first: bool) -> None:
    answers: list[tuple[bool, bool, bool]] = []

    def ask() -> None:
        answers.append((has_hopper(META), launch_options(META)["PDL"], has_fp8(META)))

    with dry_run(GPU_TYPES["sm_90"]):
        if is_dry_first:
            ask()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        ask()
    assert answers == [(True, True, True)] * is_dry_first + [(False, False, False), (True, True, True)]
