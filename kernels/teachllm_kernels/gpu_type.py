"""Describe a GPU by what decides which kernels run on it and how they are compiled, whether or not one is here."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GPU_TYPES", "GPUType"]


class GPUType(NamedTuple):
    """Describe one type of GPU.

    Attributes:
        target: the instruction set that kernels are compiled to: "sm_90" is Hopper's, "gfx942" AMD's CDNA 3.
        capability: the compute capability, (major, minor); (0, 0) for AMD, whose numbers would be read as NVIDIA's.
        num_multiprocessors: how many programs run side by side, one on each; AMD calls them compute units.
        shared_memory: bytes that one program may have; AMD calls it LDS.
    """

    target: str
    capability: tuple[int, int]
    num_multiprocessors: int
    shared_memory: int

    @property
    def is_amd(self) -> bool:
        """Return whether AMD's compiler compiles for it, which knows neither NVIDIA's options nor PTX."""
        return self.target.startswith("gfx")


# A common GPU of each target, to compile for without having it.
# Sources: NVIDIA's "CUDA C++ Programming Guide", "Compute Capabilities"; AMD's "CDNA 3 Architecture" white paper.
GPU_TYPES = {
    each.target: each
    for each in (
        GPUType("sm_80", (8, 0), 108, 163 << 10),  # A100
        GPUType("sm_86", (8, 6), 84, 99 << 10),  # A40, RTX 3090
        GPUType("sm_89", (8, 9), 142, 99 << 10),  # L40S, RTX 4090
        GPUType("sm_90", (9, 0), 132, 227 << 10),  # H100, H200
        GPUType("sm_100", (10, 0), 148, 227 << 10),  # B200
        GPUType("sm_120", (12, 0), 170, 99 << 10),  # RTX 5090
        GPUType("gfx942", (0, 0), 304, 64 << 10),  # MI300X
    )
}
