"""Compile an engine's kernels ahead of its start, on this machine or for another one."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from teachllm.config import EngineConfig

if TYPE_CHECKING:
    from teachllm.worker.gpu.startup.compilation import Compiled


def warm(
    config: EngineConfig,
    target: str | None = None,
    num_processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Compiled:
    """Compile the kernels that an engine launches into Triton's cache, where its steps then find them.

    Args:
        target: of the GPU, as "sm_90"; None: that of the GPU which is here.
        num_processes: that compile at once; None: one for each core, up to 16.
        progress: called with (kernels that are done, kernels in all).

    Raises:
        ValueError: the checkpoint or the settings are refused, there is no such GPU, or no Triton; one line says why.
        RuntimeError: this process has initialized CUDA.
    """
    if find_spec("triton") is None:
        raise ValueError("kernels are compiled by Triton, which is not installed here: pip install 'teachllm[gpu]'")
    from teachllm.worker.gpu.startup.compilation import compile_known
    from teachllm.worker.gpu.startup.machine import gpu_type_named

    return compile_known(config, gpu_type_named(target), num_processes, progress)
