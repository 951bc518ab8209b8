"""Triton, if it is installed. A machine without it, a Mac say, imports every kernel's file and interprets some of them.

Programmatic dependent launch (PDL) lets a kernel start while the previous one drains: it loads its weights, which no
kernel writes, and only then waits (`gdc_wait`) for what the previous kernel computed. A kernel launched this way must
wait before it reads or writes anything that another kernel writes or reads. One of its programs must wait even if none
has work; otherwise it could end before the previous kernel, and the next kernel would not wait for that one. A kernel
may read another kernel's result before the wait only if a kernel that is launched the ordinary way lies between the
two. This holds for what a step prepares for all of its layers (lengths, slots, block tables, plans, cos and sin),
because the embedding lookup comes after it. Hopper and newer cards have PDL; elsewhere, and in Triton's interpreter,
the kernels' `PDL` switch is off.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from typing import Any

import torch

from teachllm_kernels.dry_run import compute_capability, gpu_type, per_device


class _Absent:
    """A stand-in for Gluon or for its kernel. It raises when it is used, not when the kernel's file is imported."""

    def __init__(self, message: str) -> None:
        self._message = message

    def jit(self, function: Any = None, **options: Any) -> Any:
        return self if function else lambda function: self

    def constexpr(self, value: Any) -> Any:
        return value

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(self._message)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(self._message)


try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    from teachllm_kernels.torch_interpreter import tl, triton  # type: ignore[assignment]

    gdc_launch_dependents = gdc_wait = None

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        raise ImportError("an early Gluon, with fewer operations")
    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name before Triton 3.7
    HAS_GLUON = True
except ImportError:
    barrier = None
    gluon = gl = hopper = TensorDescriptor = _Absent("this needs Gluon, which comes with Triton 3.6 and newer")
    HAS_GLUON = False

try:
    from triton.runtime.jit import DependenciesFinder
except ImportError:
    DependenciesFinder = None


def _hash_callees_first() -> None:
    """Have Triton name a kernel alike in every process.

    The name by which a kernel is found in the cache is a hash of its source and of the functions that it calls, with
    the constants that these use. As Triton computes it, a function's constants are left out unless the function has
    been hashed before, for another kernel that calls it: the name depends on which kernels have been launched.
    """
    update_hash = getattr(DependenciesFinder, "_update_hash", None)
    if update_hash is None or hasattr(update_hash, "has_callees_first"):
        return

    def hash_and_update(self: Any, function: Any) -> None:
        function.cache_key  # noqa: B018 - hashes it
        update_hash(self, function)

    hash_and_update.has_callees_first = True  # type: ignore[attr-defined]
    DependenciesFinder._update_hash = hash_and_update


_hash_callees_first()

PLACES = 132  # multiprocessors of an H200 and of the larger H100; the kernels divide products for that many

__all__ = [
    "HAS_GLUON",
    "PLACES",
    "TensorDescriptor",
    "barrier",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "hopper",
    "is_amd",
    "launch_options",
    "shared_memory",
    "tl",
    "triton",
]


def launch_options(device: torch.device, maxnreg: int | None = None) -> dict[str, bool | int]:
    """Return keyword arguments for every launch on this device: the `PDL` switch, and options that its compiler knows.

    Args:
        maxnreg: registers per thread at most; AMD's compiler has no such option, and decides for itself.
    """
    options: dict[str, bool | int] = {"PDL": True, "launch_pdl": True} if _has_pdl(device) else {"PDL": False}
    if maxnreg is not None and not is_amd(device):
        options["maxnreg"] = maxnreg
    return options


@per_device
def is_amd(device: torch.device) -> bool:
    """Return whether AMD's compiler compiles for the device: kernels then have no PTX."""
    return gpu_type(device).is_amd


@per_device
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory per program; for a CPU, those of the smallest Ampere."""
    return gpu_type(device).shared_memory


@per_device
def _has_pdl(device: torch.device) -> bool:
    return compute_capability(device) >= (9, 0)
