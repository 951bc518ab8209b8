"""The ladder as a picture: what each rung gains, and what the one before it wasted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from teachllm.bench.ladder import Result

_INK, _BAR, _PALE = "#7f8791", "#3b82f6", "#94a3b8"  # readable on white and on black


def draw(results: Sequence[Result], title: str) -> Any:
    """A matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError("the ladder's picture needs matplotlib: pip install 'teachllm[lessons]'") from error

    ran = [(result.rung, result.run.figures) for result in results if result.run is not None]
    names = [rung.name for rung, _ in ran]
    panels = (
        ("output tokens/s", [found.output_tokens_per_s for _, found in ran], True),
        ("time to first token, s", [found.ttft.mean for _, found in ran], True),
        ("p99 of gaps between tokens, s", [found.itl.p99 for _, found in ran], True),
        (
            "KV slots reserved and empty, %",
            [math.nan if found.waste is None else 100 * found.waste for _, found in ran],
            False,
        ),
    )
    figure = Figure(figsize=(13, 0.9 + 0.42 * len(ran)), layout="constrained")
    figure.patch.set_alpha(0)
    all_axes = figure.subplots(1, len(panels), sharey=True)
    for axes, (label, values, is_log) in zip(all_axes, panels, strict=True):
        bars = axes.barh(names, values, color=[_BAR if rung.is_lossless else _PALE for rung, _ in ran])
        labels = ["n/a" if math.isnan(value) else f"{value:,.3g}" for value in values]
        axes.bar_label(bars, labels, padding=3, color=_INK, fontsize=8)
        axes.set_xlabel(label, color=_INK, fontsize=9)
        axes.set_xscale("log" if is_log else "linear")
        axes.margins(x=0.25)
        axes.patch.set_alpha(0)
        axes.tick_params(colors=_INK, labelsize=9)
        axes.spines[:].set_color(_INK)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].invert_yaxis()
    figure.suptitle(title, color=_INK, fontsize=11)
    return figure


def write(results: Sequence[Result], title: str, path: Path) -> None:
    """Writes it; the file's ending says in which format."""
    draw(results, title).savefig(path, transparent=True, dpi=150)


def _percent(share: float | None) -> float:
    return math.nan if share is None else 100 * share
