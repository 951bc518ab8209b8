"""Lesson 08: pictures of tiles of scores and of the roofline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from teachllm_lessons.palette import BAD, INK, LINE, color
from teachllm_lessons.picture import Picture, axes

if TYPE_CHECKING:
    pass


def draw_tiles(scores: torch.Tensor, tile: int, blocks: Sequence[int]) -> Picture:
    """Scores of one query and head, tile by tile, with the largest so far and the sum of weights relative to it.

    Args:
        scores: [num_keys], base e.
        blocks: physical blocks of 16 keys each, in logical order.
    """
    figure, both = axes(10, 4.2, nrows=2, sharex=True)
    largest, total, told = -math.inf, 0.0, []
    for number, part in enumerate(scores.split(tile)):
        first, count = number * tile, len(part)
        both[0].bar(range(first, first + count), part.tolist(), width=0.8, color=color(number % 2))
        higher = max(largest, float(part.max()))
        total = total * math.exp(largest - higher) + float((part - higher).exp().sum())
        is_higher, largest = higher > largest, higher
        told.append(f"tile {number}: largest {largest:.2f}, total {total:.2f}")
        both[0].plot([first - 0.5, first + count - 0.5], [largest] * 2, color=BAD, linewidth=2)
        both[1].bar(first + count / 2 - 0.5, total, width=count * 0.9, color=color(number % 2), alpha=0.8)
        said = f"{total:.2f}" + (f"\nlargest {largest:.2f}" if is_higher else "")
        both[1].text(first + count / 2 - 0.5, total, said, ha="center", va="bottom", fontsize=8, color=INK)
    for place, block in enumerate(blocks):
        at, below = min(16 * place + 7.5, len(scores)), both[0].get_xaxis_transform()
        both[0].text(at, -0.03, str(block), ha="center", va="top", fontsize=7, color=INK, transform=below)
    both[0].set_ylabel("score (base e)")
    both[0].set_title("red: the largest so far; below: physical blocks", fontsize=9, color=INK, loc="left")
    both[1].set_ylabel("total, relative to\nthe largest")
    both[1].set_xlabel("key")
    both[1].margins(y=0.35)
    return Picture(figure, "; ".join(told))


def draw_roofline(
    ceilings: Mapping[str, Any], flops: str, points: Sequence[tuple[str, float, float]], title: str
) -> Picture:
    """Points under the roof: what a card does at most for so many FLOPs a byte.

    Args:
        ceilings: as a result in benchmarks/results has them.
        flops: which of them is the flat part.
        points: (name, FLOPs a byte, FLOPs a second).
    """
    figure, ax = axes(8, 3.6)
    bandwidth, peak = ceilings["read_bandwidth"], ceilings[flops]
    xs = [0.5, peak / bandwidth, 20000]
    ax.plot(xs, [min(x * bandwidth, peak) / 1e12 for x in xs], color=INK, linewidth=2)
    for index, (name, intensity, reached) in enumerate(points):
        ax.plot(intensity, reached / 1e12, marker="o", color=color(index), linestyle="", label=name)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("FLOPs for each byte that must be moved")
    ax.set_ylabel("TFLOP/s")
    ax.grid(color=LINE, linewidth=0.5)
    ax.legend(frameon=False, labelcolor=INK, fontsize=8, loc="lower right")
    ax.set_title(title, fontsize=9, color=INK, loc="left")
    said = ", ".join(f"{name}: {reached / 1e12:,.3g} TFLOP/s" for name, _, reached in points)
    return Picture(figure, f"{title}: {said}")
