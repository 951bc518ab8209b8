"""Ask which type of GPU is here, without initializing CUDA in this process."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch

from teachllm_kernels.dry_run import gpu_type
from teachllm_kernels.gpu_type import GPU_TYPES, GPUType


def gpu_type_named(target: str | None) -> GPUType:
    """Return a type of GPU by its target; None: the type of the GPU that is here.

    Raises:
        ValueError: there is no such target, or no GPU.
    """
    if target is not None and target not in GPU_TYPES:
        raise ValueError(f"gpu={target!r} is no type of GPU that kernels are compiled for: use {', '.join(GPU_TYPES)}")
    if target is not None:
        return GPU_TYPES[target]
    if not torch.cuda.is_available():
        raise ValueError(f"there is no GPU here whose type could be asked for: set gpu to {', '.join(GPU_TYPES)}")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # asking initializes CUDA
        return pool.submit(gpu_type, torch.device("cuda", 0)).result()
