"""Compile variants of kernels in many processes, so that as many cores work as there are.

A compilation is to a good part Python, which threads of one process would have to take turns at. The processes are
forked, so that PyTorch and Triton are imported once for all of them; this must happen before CUDA is initialized,
because a forked process cannot use its parent's context. They write Triton's cache on disk, and nothing else comes back
but that they are done. Several pools may compile the same at once: a file of the cache is written under another name
first and then renamed.

A process that the compiler takes down (it is native code) costs the variant that it was at, and is replaced.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

import torch
from triton import knobs

from teachllm_kernels._triton import triton
from teachllm_kernels.gpu_type import GPUType
from teachllm_kernels.kernel_cache import CachedKernel, cached_kernel, forget, is_whole_code
from teachllm_kernels.variants import KernelVariant, compiled, key_of, target_of

__all__ = ["Compilation", "compile_in_processes"]


class Compilation(NamedTuple):
    """Tell how the compilation of a variant ended.

    Attributes:
        seconds: that it took.
        was_cached: it had been compiled before.
        error: why a launch will not find it in the cache, or will fail; None: it will find it.
        kernel: where it is in the cache; None: it is not.
    """

    variant: KernelVariant
    seconds: float
    was_cached: bool
    error: str | None
    kernel: CachedKernel | None


def compile_in_processes(variants: Sequence[KernelVariant], gpu: GPUType, num_processes: int) -> Iterator[Compilation]:
    """Compile variants, and yield the outcome of each as soon as it is known.

    Args:
        num_processes: at most so many at once.

    Raises:
        RuntimeError: this process has initialized CUDA.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError("compile in a process that has not initialized CUDA: forked processes could not use it")
    # Longer code tends to take longer, and at the end nothing should be waited for alone.
    waiting = sorted(range(len(variants)), key=lambda index: len(variants[index].function.src))
    at_work: dict[Connection, tuple[ForkProcess, int]] = {}
    try:
        while waiting or at_work:
            while waiting and len(at_work) < num_processes:
                process, connection = _begin(variants, gpu, list(at_work))
                at_work[connection] = process, waiting.pop()
                _sent(connection, at_work[connection][1])  # if it has ended already, reading from it says so
            for connection in [each for each in wait(list(at_work)) if isinstance(each, Connection)]:
                process, index = at_work[connection]
                try:
                    result = connection.recv()
                    has_ended = False
                except (EOFError, OSError):  # or was reset: it has not read what it was sent
                    process.join()
                    result = 0.0, False, f"its compiler's process ended with exit code {process.exitcode}", None
                    has_ended = True
                if waiting and not has_ended and _sent(connection, waiting[-1]):
                    at_work[connection] = process, waiting.pop()
                else:
                    del at_work[connection]
                    connection.close()
                    process.join()
                yield Compilation(variants[index], *result)
    finally:
        for connection, (process, _) in at_work.items():
            connection.close()
            process.kill()
            process.join()


def _sent(connection: Connection, index: int) -> bool:
    """Send a variant's index; return False if the process that should read it has ended."""
    try:
        connection.send(index)
    except OSError:
        return False
    return True


def _begin(
    variants: Sequence[KernelVariant], gpu: GPUType, others: Sequence[Connection]
) -> tuple[ForkProcess, Connection]:
    """Fork a process that compiles the variants whose indices it is sent.

    Args:
        others: this process's ends of the other connections. A forked process closes its copies of them, or it would
            keep the others from noticing that this one has closed its own, or has ended.
    """
    here, there = multiprocessing.Pipe()

    def serve() -> None:
        for inherited in (here, *others):
            inherited.close()
        _serve(there, variants, gpu)

    process = multiprocessing.get_context("fork").Process(target=serve, daemon=True)
    process.start()
    there.close()
    return process, here


def _serve(connection: Connection, variants: Sequence[KernelVariant], gpu: GPUType) -> None:
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    while True:
        try:
            index = connection.recv()
        except EOFError:  # nothing is left to do
            return
        began = time.perf_counter()
        error: str | None = None
        kernel: CachedKernel | None = None
        hits.clear()
        try:
            kernel = _compile(variants[index], gpu)
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised).strip().splitlines()[-1] if str(raised).strip() else ''}"
        connection.send((time.perf_counter() - began, all(hits) and bool(hits), error, kernel))


def _compile(variant: KernelVariant, gpu: GPUType) -> CachedKernel:
    """Compile a variant, and what launches it.

    Raises:
        Exception: whatever the compiler raises; or the GPU cannot run the kernel.
    """
    target = target_of(gpu)
    try:
        kernel = compiled(variant, target)
        is_whole = is_whole_code(kernel.kernel)
    except Exception:  # of the compiler, or of reading a damaged file: which, the second attempt shows
        is_whole = False
    if not is_whole:
        forget(key_of(variant, target))
        kernel = compiled(variant, target)
    if (needed := kernel.metadata.shared) > gpu.shared_memory:
        raise ValueError(f"it needs {needed} bytes of shared memory, of which there are {gpu.shared_memory}")
    _build_launcher(kernel, gpu)
    return cached_kernel(kernel)


def _build_launcher(kernel: Any, gpu: GPUType) -> None:
    """Build what calls the kernel, where there is a driver of such a GPU; up to Triton 3.6 a C compiler does it."""
    if torch.cuda.is_available() and gpu.is_amd == (torch.version.hip is not None):
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
