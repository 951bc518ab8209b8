"""Measure what was predicted: run the largest step on the GPU, and warn of differences."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch

from teachllm.core.memory import MemoryPlan, NotEnoughMemoryError, format_bytes
from teachllm.worker.memory_plan import memory_table

_REPORT_THRESHOLD_BYTES = 32 << 20


def measure_needs(
    plan: MemoryPlan, run: Callable[[], object], device: torch.device, taken_before: int, is_eager: bool
) -> dict[str, int]:
    """Measure the bytes of activations and libraries by running the largest step.

    Args:
        plan: the prediction, for the table in an error.
        run: runs the step, and returns what is alive at its end.
        taken_before: the bytes that were in use on the device before anything was loaded.
        is_eager: whether no step is recorded.

    Raises:
        NotEnoughMemoryError: the step does not fit.
    """
    allocated = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        result = run()
    except torch.cuda.OutOfMemoryError:
        message = "the largest step does not fit: set a smaller max_num_batched_tokens or max_num_seqs"
        raise NotEnoughMemoryError(message, memory_table(plan)) from None
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del result
    workspaces = torch.cuda.memory_allocated(device) - allocated  # allocated once, by this stream's first product
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - taken_before - torch.cuda.memory_reserved(device)
    num_streams = 1 if is_eager else 2  # graphs are recorded on one of their own
    return {
        "activations": peak - allocated - workspaces,
        "libraries": max(outside, 0) + num_streams * workspaces,
    }


def compare(plan: MemoryPlan, measured: Mapping[str, int]) -> None:
    """Warn in one line of weights or activations that are more than 5% and more than 32 MiB off the prediction."""
    off: list[str] = []
    for name in ("weights", "activations"):
        predicted, found = getattr(plan, name), measured[name]
        if abs(found - predicted) > max(predicted / 20, _REPORT_THRESHOLD_BYTES):
            off.append(f"{name} take {format_bytes(found)} instead of {format_bytes(predicted)}")
    if off:
        warnings.warn(f"memory is not as predicted: {', '.join(off)}; the KV cache gets what is left", stacklevel=3)
