"""Compile, before there is a GPU's context, the kernels that an engine launches.

    describe   config.json says the model, the settings its steps; no weight is read
    rehearse   the steps run on the meta device, and each launch is noted (`rehearsal.py`)
    compile    as many processes as there are cores compile what was noted, into Triton's cache on disk

An engine finds them in the cache; a kernel that no rehearsal has met is compiled when a step first needs it. An engine
on a GPU has this done by a process beside it (`compile_process.py`). `teachllm warm` is this and nothing else, for an
image that is built where there is no GPU.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from teachllm.config import EngineConfig
from teachllm.distributed.layout import layout_of
from teachllm.models.build import META
from teachllm.models.model_config import ModelConfig, load_model_config
from teachllm.models.own_model import model_of_rank
from teachllm.spec_decode.load import DrafterConfig, load_drafter_config
from teachllm.worker.gpu.memory.predicted import PredictedNeeds, predict_needs
from teachllm.worker.gpu.startup.compiled_record import CompiledRecord, Found
from teachllm.worker.gpu.startup.rehearsal import known_variants
from teachllm_kernels.compile_pool import Compilation, compile_in_processes
from teachllm_kernels.dry_run import dry_run
from teachllm_kernels.gpu_type import GPUType
from teachllm_kernels.kernel_cache import cache_folder
from teachllm_kernels.variants import KernelVariant

_MOST_PROCESSES = 16
_LONGEST_WAIT_S, _POLL_S = 300.0, 0.05  # for another process that compiles into the same cache


class Compiled(NamedTuple):
    """Count the variants of kernels that an engine may launch.

    Attributes:
        target: the GPU's, that they were compiled for.
        num_compiled: that were compiled now.
        num_cached: that were in the cache before.
        folder: where they are.
        failures: "kernel: why" of each that could not be compiled; the engine will try again when it launches it.
    """

    target: str
    num_compiled: int
    num_cached: int
    folder: str
    failures: list[str]


def variants_of(config: EngineConfig, gpu: GPUType) -> list[KernelVariant]:
    """Return the variants of kernels that an engine of these settings may launch, on any of its ranks.

    Raises:
        ValueError: the checkpoint or the settings are refused.
    """
    return _variants(*_described(config), gpu)


def _described(config: EngineConfig) -> tuple[EngineConfig, ModelConfig, DrafterConfig | None]:
    """Return the configuration as resolved for its model, the model, and the drafter."""
    model = load_model_config(config, "cuda")
    config = replace(config, device="cuda").resolve(model.max_model_len)
    return config, model, load_drafter_config(config, model, "cuda")


def _variants(
    config: EngineConfig, model: ModelConfig, drafter: DrafterConfig | None, gpu: GPUType
) -> list[KernelVariant]:
    found: dict[object, KernelVariant] = {}
    for part in _parts(config, model):
        found |= known_variants(config, part, gpu, drafter).by_key
    return list(found.values())


def _predicted(
    config: EngineConfig, model: ModelConfig, drafter: DrafterConfig | None, gpu: GPUType
) -> list[PredictedNeeds]:
    """Return what a rank of each stage takes."""
    with dry_run(gpu):
        return [predict_needs(config, part, META, drafter) for part in _parts(config, model)]


def _parts(config: EngineConfig, model: ModelConfig) -> list[ModelConfig]:
    """Return a rank's part of each stage, whose ranks have equal ones."""
    layout = layout_of(config)
    return [model_of_rank(model, layout.coords(layout.stage(stage)[0])) for stage in range(layout.pipeline)]


def compile_known(
    config: EngineConfig,
    gpu: GPUType,
    num_processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Compiled:
    """Compile all of `variants_of` into Triton's cache, and record that.

    One process does this at a time: others that share the cache wait, and then find what it has compiled.

    Args:
        num_processes: None: one for each core, up to 16.
        progress: called with (variants that are done, variants in all).

    Raises:
        ValueError: as `variants_of`; or nothing can be written into the cache.
        RuntimeError: this process has initialized CUDA.
    """
    folder = cache_folder()
    described = _described(config)
    variants, needs = _variants(*described, gpu), _predicted(*described, gpu)
    record = CompiledRecord(folder, *described, gpu)
    outcomes: list[Compilation] = []
    with _alone(folder):
        record.remove_damaged()
        for outcome in compile_in_processes(variants, gpu, num_processes or num_cores()):
            outcomes.append(outcome)
            if progress is not None:
                progress(len(outcomes), len(variants))
    kernels = [each.kernel for each in outcomes if each.kernel is not None]
    if len(kernels) == len(variants):
        record.write(Found(kernels, needs))
    failures = [f"{each.variant.name}: {each.error}" for each in outcomes if each.error is not None]
    num_cached = sum(each.was_cached and each.error is None for each in outcomes)
    return Compiled(gpu.target, len(outcomes) - num_cached - len(failures), num_cached, str(folder), failures)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the cache's lock; continue without it if the file system has no locks, or after `_LONGEST_WAIT_S`."""
    file: int | None = None
    with suppress(OSError):
        file = os.open(folder / "teachllm.lock", os.O_RDONLY | os.O_CREAT, 0o666)
        until = time.monotonic() + _LONGEST_WAIT_S
        while time.monotonic() < until:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_POLL_S)
    try:
        yield
    finally:
        if file is not None:
            os.close(file)


def num_cores() -> int:
    """Return how many processes compile at once: the cores that this process may use, `_MOST_PROCESSES` at most."""
    can_tell = hasattr(os, "sched_getaffinity")  # macOS cannot
    return min(len(os.sched_getaffinity(0)) if can_tell else os.cpu_count() or 1, _MOST_PROCESSES)
