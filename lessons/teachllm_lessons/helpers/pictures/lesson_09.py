"""Lesson 09: a picture of launches, one by one and as a graph."""

from __future__ import annotations

from collections.abc import Mapping

from teachllm_lessons.palette import BAR, INK, OTHER_BAR
from teachllm_lessons.picture import Picture, axes

_LAUNCH, _DEVICE = OTHER_BAR, BAR


def draw_launches(num_kernels: int, kernel: float, launches: Mapping[str, float]) -> Picture:
    """Kernels one after the other, each launched by the host before, and as one graph.

    Args:
        kernel: microseconds that each takes on the device.
        launches: {how: microseconds of the host for a launch}; a graph's is for all kernels together.
    """
    figure, ax = axes(10, 0.9 + 0.75 * len(launches))
    told, names = [], []
    for row, (how, launch) in enumerate(launches.items()):
        idle_from = 0.0
        for number in range(num_kernels):
            launched = launch * (1 if how == "graph" else number + 1)
            if how != "graph" or number == 0:
                ax.barh(-2.4 * row, launch * 0.94, left=launched - launch, color=_LAUNCH, height=0.8)
            begin = max(idle_from, launched)
            ax.barh(-2.4 * row - 1, kernel * 0.94, left=begin, color=_DEVICE, height=0.8)
            idle_from = begin + kernel
        told.append(f"{how}: {num_kernels} kernels in {idle_from:.0f} us")
        ax.text(idle_from + 1, -2.4 * row - 1, f"{idle_from:.0f} us", va="center", fontsize=9, color=INK)
        names += [(-2.4 * row, f"{how}: host"), (-2.4 * row - 1, "device")]
    ax.set_yticks([at for at, _ in names], [name for _, name in names])
    ax.set_xlabel("microseconds")
    ax.margins(x=0.08)
    return Picture(figure, "; ".join(told))
