"""Lesson 12: pictures of what each rank holds, does and gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from teachllm.trace.ranks import BETWEEN_STAGES, rank_figures, spans_of
from teachllm.trace.replay import Line
from teachllm_lessons.palette import BAD, INK, LINE, PALE, color, ink_on, series_color
from teachllm_lessons.picture import Picture, axes, rectangle


def draw_split() -> Picture:
    """An MLP over two ranks: the first matrix by columns, the second by rows."""
    figure, ax = axes(9.5, 3.4)

    def box(x: float, y: float, width: float, height: float, text: str, filled: Any, edge: str = LINE) -> None:
        rectangle(ax, x, y, width, height, filled, edge=edge, linewidth=1)
        ink = ink_on(filled) if isinstance(filled, tuple) and len(filled) == 3 else INK
        ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9, color=ink)

    def arrow(start: tuple[float, float], end: tuple[float, float]) -> None:
        ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK})

    box(0.0, 1.25, 1.1, 0.9, "x\n[tokens, 256]", PALE, INK)
    for rank, y in ((0, 2.1), (1, 0.3)):
        filled, first = color(rank), 384 * rank
        box(2.0, y, 1.5, 1.0, f"gate, up: columns\n{first} to {first + 383}", filled)
        box(4.1, y, 1.5, 1.0, "silu(gate) * up\n[tokens, 384]", (*filled, 0.3))
        box(6.2, y, 1.5, 1.0, f"down: rows\n{first} to {first + 383}", filled)
        ax.text(4.85, y + 1.12, f"rank {rank}", ha="center", fontsize=9, color=INK)
        arrow((1.15, 1.7), (1.95, y + 0.5))
        arrow((3.55, y + 0.5), (4.05, y + 0.5))
        arrow((5.65, y + 0.5), (6.15, y + 0.5))
        arrow((7.75, y + 0.5), (8.45, 1.7))
    box(8.5, 1.25, 1.3, 0.9, "all-reduce:\nevery rank\ngets the sum", "none", BAD)
    ax.set_xlim(-0.1, 10)
    ax.set_ylim(0.1, 3.5)
    ax.axis("off")
    says = "rank 0 has columns 0 to 383 of gate and up and the same rows of down, rank 1 has 384 to 767"
    return Picture(figure, f"{says}; nothing is exchanged up to one all-reduce at the end, which gives both the sum")


def draw_ranks(steps: Sequence[Line]) -> Picture:
    """Draw what each rank did: computing in the colour of its step, exchanges pale, the rest of the time hatched."""
    begin = min(told["begin"] for step in steps for told in step["ranks"])
    end = max(told["end"] for step in steps for told in step["ranks"])
    num_ranks = len(steps[0]["ranks"])
    figure, ax = axes(9.5, 1.1 + 0.5 * num_ranks)
    kinds = set[bool]()  # of exchanges: whether they are between stages
    for rank in range(num_ranks):
        rectangle(ax, 0, 0.1 - rank, 1000 * (end - begin), 0.8, "none", hatch="////")
    for step in steps:
        filled = color(step["step"])
        for rank, told in enumerate(step["ranks"]):
            at, width = 1000 * (told["begin"] - begin), 1000 * (told["end"] - told["begin"])
            rectangle(ax, at, 0.1 - rank, width, 0.8, filled)
            for operation, since, until in spans_of(told):
                left, wide = 1000 * (since - begin), 1000 * (until - since)
                waits = operation in BETWEEN_STAGES
                kinds.add(waits)
                rectangle(ax, left, 0.1 - rank, wide, 0.8, PALE, hatch="////" if waits else None)
            if rank == 0:
                ax.text(at, 0.93, f"step {step['step']}", va="bottom", fontsize=7, color=INK)
    ax.set_xlim(0, 1000 * (end - begin))
    ax.set_ylim(1 - num_ranks - 0.05, 1.25)
    stages = [told["stage"] for told in steps[0]["ranks"]]
    named = [f"rank {rank}" if max(stages) == 0 else f"stage {stage}" for rank, stage in enumerate(stages)]
    ax.set_yticks([0.5 - rank for rank in range(num_ranks)], named)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("ms")
    _name_parts(figure, color(steps[0]["step"]), kinds)
    shares = [f"{name}: {each.computes:.0%} computes" for name, each in zip(named, rank_figures(steps), strict=True)]
    return Picture(figure, f"what each rank did in {len(steps)} steps: {', '.join(shares)} of the time")


def _name_parts(figure: Any, computes: Any, kinds: set[bool]) -> None:
    """Write above a picture of ranks what its parts mean."""
    from matplotlib.patches import Patch

    look: dict[str, Any] = {"edgecolor": LINE, "linewidth": 0.6}
    exchange = Patch(facecolor=PALE, label="exchanges within the step", **look)
    waits = Patch(facecolor=PALE, hatch="////", label="sends to a stage or waits for one", **look)
    idle = Patch(facecolor="none", hatch="////", label="nothing to compute", **look)
    handles = [Patch(facecolor=computes, label="computes (each step in its color)", **look)]
    handles += [each for is_between, each in ((False, exchange), (True, waits)) if is_between in kinds] + [idle]
    figure.legend(handles=handles, frameon=False, labelcolor=INK, fontsize=8, ncols=4, loc="outside upper left")


def draw_experts(load: Sequence[Sequence[int]], num_ranks: int = 2) -> Picture:
    """Draw how much each expert does: a row per layer, a column per expert, a line between ranks."""
    figure, ax = axes(9, 0.9 + 0.36 * len(load))
    values = torch.tensor(load).float()
    largest, count = float(values.max()), values.shape[1]
    for layer, row in enumerate(load):
        for expert, tokens in enumerate(row):
            rank = expert * num_ranks // count
            share = 0.1 + 0.4 * tokens / largest
            rectangle(ax, expert + 0.04, 0.06 - layer, 0.92, 0.88, (*color(rank), share))
            ax.text(expert + 0.5, 0.5 - layer, str(tokens), ha="center", va="center", fontsize=8, color=INK)
    ax.axvline(count / num_ranks, color=INK, linewidth=1.5)
    ax.set_xlim(0, count)
    ax.set_ylim(1 - len(load) - 0.05, 1.05)
    ax.set_xticks([0.5 + expert for expert in range(count)], [f"expert {expert}" for expert in range(count)])
    ax.set_yticks([0.5 - layer for layer in range(len(load))], [f"layer {layer}" for layer in range(len(load))])
    ax.tick_params(length=0)
    of_ranks = values.unflatten(1, (num_ranks, -1)).sum(dim=2)
    worst = float((of_ranks.amax(dim=1) / of_ranks.sum(dim=1)).max())
    says = f"tokens of each expert; the line is between two ranks, of which the busier has up to {worst:.0%} of a layer"
    ax.set_title(says, fontsize=9, color=INK, loc="left")
    return Picture(figure, says)


_WORK = {
    "one request, a token": ("single", "tpot_ms", -1),
    "64 requests, a step": ("batch64", "step_ms", -1),
    "their prompts": ("batch64", "prefill_tok_s", 1),
    "a prompt of 16,384": ("prefill16k", "ttft_ms", -1),
    "256 mixed requests": ("mixed", "tok_s", 1),
}


_WAYS = {"tp2": "tensor parallel 2", "pp2": "pipeline parallel 2", "dp2": "data parallel 2"}


def draw_gains(ways: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Picture:
    """Draw how many times as good as one GPU two of them are."""
    figure, ax = axes(9.5, 3.6)
    told = []
    for index, (way, name) in enumerate(_WAYS.items()):
        for place, (workload, figure_name, direction) in enumerate(_WORK.values()):
            if workload not in ways[way]:
                continue
            gain = (ways[way][workload][figure_name] / ways["one"][workload][figure_name]) ** direction
            at = place + 0.27 * (index - 1)
            ax.bar(at, gain, 0.25, color=series_color(index), label=name if place == 1 else None)
            ax.text(at, gain + 0.03, f"{gain:.2f}", ha="center", fontsize=8, color=INK)
            told.append(f"{name}, {list(_WORK)[place]}: {gain:.2f}")
    ax.axhline(1, color=INK, linewidth=0.8)
    ax.axhline(2, color=INK, linewidth=0.8, linestyle="--")
    ax.set_xticks(range(len(_WORK)), list(_WORK))
    ax.set_ylabel("times one GPU")
    ax.set_ylim(0, 2.6)
    ax.legend(frameon=False, labelcolor=INK, fontsize=9, ncols=3, loc="upper left")
    return Picture(figure, "; ".join(told))
