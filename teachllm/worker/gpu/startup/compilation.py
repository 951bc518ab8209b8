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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from teachllm.config import EngineConfig
from teachllm.distributed.layout import layout_of
from teachllm.models.model_config import ModelConfig, load_model_config
from teachllm.models.own_model import model_of_rank
from teachllm.spec_decode.load import DrafterConfig, load_drafter_config
from teachllm.worker.gpu.startup.compiled_record import CompiledRecord
from teachllm.worker.gpu.startup.rehearsal import known_variants
from teachllm_kernels.compile_pool import Compilation, compile_in_processes
from teachllm_kernels.gpu_type import GPUType
from teachllm_kernels.kernel_cache import cache_folder
from teachllm_kernels.variants import KernelVariant

_MOST_PROCESSES = 16


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
    layout = layout_of(config)
    found: dict[object, KernelVariant] = {}
    for stage in range(layout.pipeline):  # whose ranks have equal parts
        part = model_of_rank(model, layout.coords(layout.stage(stage)[0]))
        found |= known_variants(config, part, gpu, drafter).by_key
    return list(found.values())


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
    variants = _variants(*described, gpu)
    outcomes: list[Compilation] = []
    with _alone(folder):
        for outcome in compile_in_processes(variants, gpu, num_processes or num_cores()):
            outcomes.append(outcome)
            if progress is not None:
                progress(len(outcomes), len(variants))
    kernels = [each.kernel for each in outcomes if each.kernel is not None]
    if len(kernels) == len(variants):
        CompiledRecord(folder, *described, gpu).write(kernels)
    failures = [f"{each.variant.name}: {each.error}" for each in outcomes if each.error is not None]
    num_cached = sum(each.was_cached and each.error is None for each in outcomes)
    return Compiled(gpu.target, len(outcomes) - num_cached - len(failures), num_cached, str(folder), failures)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the cache's lock, if its file system has locks."""
    with (folder / "teachllm.lock").open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def num_cores() -> int:
    """Return how many processes compile at once: the cores that this process may use, `_MOST_PROCESSES` at most."""
    can_tell = hasattr(os, "sched_getaffinity")  # macOS cannot
    return min(len(os.sched_getaffinity(0)) if can_tell else os.cpu_count() or 1, _MOST_PROCESSES)
