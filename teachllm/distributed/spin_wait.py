"""Spin-wait for messages: a thread that expects one within a step polls for it before it blocks.

An idle processor goes to sleep, and waking the thread that waits there takes 10 to 100 microseconds. A pipeline pays
that at each hand-over of every plan: the engine's process tells the first stage, the last one tells the engine. So
where GPUs wait for these processes, and cores are plentiful, they spin for as long as a step takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from teachllm.config import EngineConfig

_SECONDS = 0.02  # a step of decodes takes less; during longer ones there is time to wake up


def spin_seconds(config: EngineConfig) -> float:
    """Return how long the processes of an engine's ranks spin; 0 without a GPU, or with too few cores."""
    num_processes = config.data_parallel_size * (config.num_local_ranks + 1)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _SECONDS if config.device.startswith("cuda") and num_cores >= 2 * num_processes else 0.0


def spin_until(is_ready: Callable[[], object], seconds: float) -> None:
    """Spin until `is_ready` is true or `seconds` have passed; the caller may block after that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not is_ready():
        pass
