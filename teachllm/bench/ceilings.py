"""Measure what this machine can do at best: the ceilings of its roofline.

A data sheet promises more than any program gets. What a step is held against is what the simplest program gets:
a sum or a matrix-vector product over gigabytes for reads, a copy, one large matrix product, and the library's causal
attention over a long sequence. The best of all measurements counts, see `engine/observability/ceilings.py`.

Source: Williams, Waterman, Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from teachllm.roofline import Ceilings

if TYPE_CHECKING:
    import torch

    from teachllm.config import EngineConfig


@dataclass(frozen=True)
class Sizes:
    """Set the sizes: bytes read, rows of the square product, tokens and heads of the attention, and how often."""

    num_bytes: int
    gemm_size: int
    attention_len: int
    num_heads: int
    head_size: int
    repeats: int


_ON_GPU = Sizes(num_bytes=4 << 30, gemm_size=8192, attention_len=16384, num_heads=32, head_size=128, repeats=15)
_ON_CPU = Sizes(num_bytes=256 << 20, gemm_size=1024, attention_len=1024, num_heads=8, head_size=64, repeats=5)


def ceilings_of(config: EngineConfig) -> Ceilings:
    """Measure where an engine of this configuration computes, in its model's dtype; return the best known, if higher.

    Raises:
        ValueError: there is no such device or model.
    """
    from teachllm.engine.observability.ceilings import at_best
    from teachllm.models.model_config import load_model_config
    from teachllm.worker.device import select_device

    device = select_device(config.device)
    return at_best(measure_ceilings(str(device), load_model_config(config, device.type).dtype))


def measure_ceilings(device: str = "auto", dtype: str = "auto", sizes: Sizes | None = None) -> Ceilings:
    """Measure a device in a second or two, then release the memory. Traces find the ceilings from then on.

    Args:
        device: as in `EngineConfig`.
        dtype: "auto" is bfloat16 on a GPU, float32 on a CPU.

    Raises:
        ValueError: there is no such device.
    """
    import torch

    from teachllm.engine.observability.ceilings import device_name, remember
    from teachllm.worker.device import select_device

    where = select_device(device)
    on_gpu = where.type == "cuda"
    if dtype == "auto":
        dtype = "bfloat16" if on_gpu else "float32"
    is_standard = sizes is None  # smaller ones are quick and tell little
    sizes = sizes or (_ON_GPU if on_gpu else _ON_CPU)
    if on_gpu:  # a small card reads less; whole rows of the matrix either way
        sizes = replace(sizes, num_bytes=min(sizes.num_bytes, torch.cuda.mem_get_info(where)[0] // 4 >> 20 << 20))
    kind = getattr(torch, dtype)
    with torch.inference_mode():
        from_rest = _memory(where, sizes)
        gemm_s, attention_s = _gemm(where, kind, sizes), _attention(where, kind, sizes)
        read_s, copy_s = map(min, from_rest, _memory(where, sizes))  # a card that was idle is slow to wake
    if on_gpu:
        torch.cuda.empty_cache()
    pairs = sizes.attention_len * (sizes.attention_len + 1) // 2
    found = Ceilings(
        device=device_name(str(where)),
        dtype=dtype,
        read_bandwidth=sizes.num_bytes / read_s,
        copy_bandwidth=sizes.num_bytes / copy_s,
        gemm_flops=2 * sizes.gemm_size**3 / gemm_s,
        attention_flops=4 * pairs * sizes.num_heads * sizes.head_size / attention_s,
    )
    if is_standard:
        remember(found)
    return found


def _memory(device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """Return the seconds to read `num_bytes`, and the seconds to read half of them and write as many."""
    import torch

    # bfloat16 on a GPU, where the narrow dtype's kernels are the tuned ones; a CPU has fast ones for float32 only.
    dtype, columns = (torch.bfloat16, 8192) if device.type == "cuda" else (torch.float32, 4096)
    rows = sizes.num_bytes // (columns * dtype.itemsize)
    matrix = torch.empty(rows, columns, dtype=dtype, device=device).normal_()
    vector = torch.empty(columns, dtype=dtype, device=device).normal_()
    as_floats = matrix.view(torch.float32)
    ways: list[Callable[[], object]] = [lambda: torch.mv(matrix, vector), lambda: as_floats.sum()]
    read_s = min(median_seconds(way, device, sizes.repeats) for way in ways)
    first, second = matrix.view(-1).chunk(2)
    return read_s, median_seconds(lambda: second.copy_(first), device, sizes.repeats)


def _gemm(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    import torch

    # Random numbers, not zeros: a card that multiplies zeros draws less power and clocks higher.
    a, b = (torch.randn(sizes.gemm_size, sizes.gemm_size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return median_seconds(lambda: torch.mm(a, b, out=out), device, sizes.repeats)


def _attention(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    """Time the fastest of PyTorch's backends that take these shapes."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (1, sizes.num_heads, sizes.attention_len, sizes.head_size)
    q, k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(3))

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    found: list[float] = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) if device.type == "cuda" else ():
        # A backend that does not take the dtype or is not built in says so by raising.
        with contextlib.suppress(RuntimeError), sdpa_kernel(backend):
            found.append(median_seconds(attend, device, sizes.repeats))
    return min(found) if found else median_seconds(attend, device, sizes.repeats)


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median after three warm-up calls; on a GPU by its own events, so that launching does not count."""
    for _ in range(3):
        run()
    clock = _gpu_times(run, device) if device.type == "cuda" else _cpu_times(run)
    return statistics.median(next(clock) for _ in range(repeats))


def _cpu_times(run: Callable[[], object]) -> Iterator[float]:
    while True:
        start = time.perf_counter()
        run()
        yield time.perf_counter() - start


def _gpu_times(run: Callable[[], object], device: torch.device) -> Iterator[float]:
    import torch

    with torch.cuda.device(device):
        while True:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            yield start.elapsed_time(end) / 1000
