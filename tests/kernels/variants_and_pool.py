"""A program that compiles variants in processes and prints, as JSON, what came of it. Run without TRITON_INTERPRET.

TRITON_CACHE_DIR=FOLDER python tests/kernels/variants_and_pool.py
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.runtime.cache import get_cache_manager

from teachllm_kernels import compile_pool
from teachllm_kernels.compile_pool import compile_in_processes
from teachllm_kernels.dry_run import dry_run
from teachllm_kernels.gpu_type import GPU_TYPES
from teachllm_kernels.kernel_cache import CachedKernel, forget, is_whole
from teachllm_kernels.silu_and_mul import silu_and_mul_triton
from teachllm_kernels.variants import KernelVariant, KernelVariants, compiled, key_of, target_of

GPU = GPU_TYPES["sm_80"]
HOPPERS = ["_hopper_prefill", "_hopper_decode"]  # which share functions


def recorded(target: str, *rows: torch.Tensor) -> list[KernelVariant]:
    variants = KernelVariants(GPU_TYPES[target])
    with dry_run(GPU_TYPES[target], variants.add):
        for x in rows:
            silu_and_mul_triton(x)
    return list(variants.by_key.values())


def aligned(variant: KernelVariant) -> bool:
    """Return whether the kernel may assume that its input begins at a multiple of 16 bytes."""
    return (0,) in variant.attributes and variant.attributes[(0,)] != []


def outcomes(variants: list[KernelVariant], num_processes: int = 2) -> list[dict[str, Any]]:
    """Return what came of each variant, in their order."""
    found = list(compile_in_processes(variants, GPU, num_processes))
    found.sort(key=lambda outcome: variants.index(outcome.variant))
    return [{"cached": each.was_cached, "error": each.error} for each in found]


def damage(kernel: CachedKernel, pattern: str) -> None:
    """Cut a kernel's file in half, as a machine may that loses power."""
    (file,) = Path(get_cache_manager(kernel.key).cache_dir).glob(pattern)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def named(*kernels: str) -> str:
    """Return Triton's name of the last kernel in a process that launches these, one after the other."""
    lines = ["from teachllm_kernels.attention.hopper_decode import _hopper_decode"]
    lines += ["from teachllm_kernels.attention.hopper_prefill import _hopper_prefill"]
    program = "\n".join([*lines, *(f"name = {kernel}.cache_key" for kernel in kernels), "print(name)"])
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def main() -> None:
    x = torch.empty(4 * 256 + 4, dtype=torch.bfloat16, device="meta")
    whole, shifted = x[: 4 * 256].view(4, 256), x[4:].view(4, 256)
    variants = recorded("sm_80", whole, whole.clone(), shifted, whole.float())
    found: dict[str, Any] = {
        "aligned": [aligned(variant) for variant in variants],
        "early launch": [variant.constants for variant in recorded("sm_90", whole)] != [variants[0].constants],
        "first": outcomes(variants),
        "again": outcomes(variants, num_processes=8),
    }

    found["name"], found["named after another"] = (named(*functions) for functions in (["_hopper_decode"], HOPPERS))
    kernels = [each.kernel for each in compile_in_processes(variants, GPU, 2) if each.kernel is not None]
    found["whole"] = [is_whole(kernel) for kernel in kernels]
    found["damaged"], found["mended"] = [], []
    for pattern in ("*.cubin", f"{variants[0].name}.json", "__grp__*"):
        damage(kernels[0], pattern)
        found["damaged"].append(sum(not is_whole(kernel) for kernel in kernels))
        found["mended"].append([each["error"] for each in outcomes(variants)])
    found["whole again"] = [is_whole(kernel) for kernel in kernels]
    forget(kernels[1].key)
    found["keys"] = {kernel.key for kernel in kernels} == {key_of(variant, target_of(GPU)) for variant in variants}
    found["forgotten"] = [is_whole(kernel) for kernel in kernels]
    outcomes(variants)

    def compile_or_fail(variant: KernelVariant, target: Any) -> Any:
        if variant == variants[0]:
            os._exit(3)
        if variant == variants[1]:
            raise ValueError("one line\nand another")
        return compiled(variant, target)

    with mock.patch.object(compile_pool, "compiled", compile_or_fail):
        found["broken"] = outcomes(variants, num_processes=1)
    running = compile_in_processes(variants, GPU, 2)
    next(running)
    running.close()
    found["left"] = len(multiprocessing.active_children())
    with mock.patch.object(torch.cuda, "is_initialized", lambda: True):
        try:
            next(compile_in_processes(variants, GPU, 1))
        except RuntimeError as error:
            found["refused"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
