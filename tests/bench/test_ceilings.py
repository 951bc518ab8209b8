"""The ceilings of a machine are measured, for its dtype."""

from __future__ import annotations

import pytest

from teachllm.bench import ceilings
from teachllm.bench.ceilings import Sizes, ceilings_of, measure_ceilings
from teachllm.bench.figures import Figure, raise_ceilings
from teachllm.config import EngineConfig
from teachllm.roofline import Ceilings, Work

TINY = Sizes(num_bytes=1 << 20, gemm_size=64, attention_len=64, num_heads=2, head_size=16, repeats=3)


def test_a_cpu_has_four_ceilings_in_float32() -> None:
    found = measure_ceilings("cpu", sizes=TINY)
    assert (found.dtype, found.device.endswith("threads")) == ("float32", True)
    for rate in (found.read_bandwidth, found.copy_bandwidth, found.gemm_flops, found.attention_flops):
        assert 1e6 < rate < 1e15


def test_another_dtype_is_measured_when_asked_for() -> None:
    assert measure_ceilings("cpu", "bfloat16", TINY).dtype == "bfloat16"


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device='tpu': use auto, cpu, cuda or cuda:N"):
        measure_ceilings("tpu")


@pytest.mark.gpu
def test_a_gpu_is_measured_in_bfloat16_and_gives_its_memory_back() -> None:
    import torch

    before = torch.cuda.memory_allocated()
    found = measure_ceilings("cuda")
    assert found.dtype == "bfloat16"
    assert found.read_bandwidth > 1e11
    assert found.gemm_flops > found.attention_flops > 1e12
    assert torch.cuda.memory_allocated() - before <= 64 << 20  # the library's workspace stays


def test_an_engines_are_the_best_of_where_it_runs_in_its_models_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def measure(device: str, dtype: str) -> Ceilings:
        asked.append((device, dtype))
        return Ceilings("NVIDIA H200", dtype, 1.0, 9e20, 1.0, 1.0)

    monkeypatch.setattr(ceilings, "measure_ceilings", measure)
    found = [ceilings_of(EngineConfig(model="teachlm", device="cpu", dtype=dtype)) for dtype in ("auto", "bfloat16")]
    assert asked == [("cpu", "float32"), ("cpu", "bfloat16")]
    assert found[0] == Ceilings("NVIDIA H200", "float32", 1.0, 9e20, 1.0, 1.0)
    assert found[1].copy_bandwidth == 9e20 and found[1].read_bandwidth > 4e12  # such a card has read more


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((4.0, 2.0), (1.0, 1.0)),  # within the ceilings: these stay
        ((1.0, 2.0), (2.0, 1.0)),  # what reads is twice as fast, what computes is not
        ((4.0, 0.5), (1.0, 2.0)),
        ((1.0, 0.5), (2.0, 2.0)),
    ],
)
def test_the_ceiling_that_was_exceeded_rises_and_no_other(
    seconds: tuple[float, float], expected: tuple[float, float]
) -> None:
    measured = Ceilings("cpu", "float32", read_bandwidth=1.0, copy_bandwidth=1.0, gemm_flops=1.0, attention_flops=1.0)
    reads, computes = Work(2, 0, 0), Work(0, 1, 0)

    def figures_under(ceilings: Ceilings) -> list[Figure]:
        limits = reads.seconds(ceilings), computes.seconds(ceilings)
        return [Figure("f", "s", value, limit) for value, limit in zip(seconds, limits, strict=True)]

    figures, raised = raise_ceilings(figures_under, measured)
    assert (raised.read_bandwidth, raised.gemm_flops) == expected
    assert max(figure.of_ceiling for figure in figures) <= 1.0
    assert [figure.value for figure in figures] == list(seconds)
