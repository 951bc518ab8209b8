"""The ladder as a picture: what each rung gains, and what the one before it wasted.

Logarithmic axes have dots: they have no zero, so the length of a bar would mean nothing.

python -m teachllm.bench.ladder_plot benchmarks/results/...-ladder-....json docs/ladder.svg
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from teachllm.bench.ladder import RUNGS

_INK, _BAR, _PALE = "#7f8791", "#3b82f6", "#94a3b8"  # readable on white and on black


def draw(rungs: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Draw a matplotlib figure.

    Args:
        rungs: as `ladder.as_json` gives them.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullFormatter
    except ModuleNotFoundError as error:
        raise ImportError("the ladder's picture needs matplotlib: pip install 'teachllm[lessons]'") from error

    ran = {rung["name"]: rung["figures"] for rung in rungs if rung["figures"] is not None}
    is_lossless = {rung.name: rung.is_lossless for rung in RUNGS}
    waste = [math.nan if found["waste"] is None else 100 * found["waste"] for found in ran.values()]
    rates = [found["output_tokens_per_s"] for found in ran.values()]
    shares = [f"{short(rate)} ({found['of_ceiling']:.1%})" for rate, found in zip(rates, ran.values(), strict=True)]
    first = [1000 * found["ttft"]["mean"] for found in ran.values()]
    gaps = [1000 * found["itl"]["p99"] for found in ran.values()]
    panels = (
        ("output tokens/s (of the ceiling)", rates, shares, True),
        ("time to first token, ms", first, [short(value) for value in first], True),
        ("p99 of gaps between tokens, ms", gaps, [short(value) for value in gaps], False),
        ("KV slots reserved and empty, %", waste, [short(value) for value in waste], False),
    )
    figure = Figure(figsize=(13, 0.9 + 0.42 * len(ran)), layout="constrained")
    figure.patch.set_alpha(0)
    all_axes = figure.subplots(1, len(panels), sharey=True, width_ratios=(1.35, 1, 1, 1))
    for axes, (label, values, labels, is_log) in zip(all_axes, panels, strict=True):
        colors = [_BAR if is_lossless[name] else _PALE for name in ran]
        if is_log:
            axes.set_xscale("log")
            axes.scatter(values, list(ran), s=36, color=colors, zorder=3)
            for name, value, text in zip(ran, values, labels, strict=True):
                at = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
                axes.annotate(text, (value, name), **at, color=_INK, fontsize=8)
            axes.grid(axis="y", color=_INK, linewidth=0.4, alpha=0.35)
            axes.xaxis.set_major_formatter(lambda value, _: short(value))
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            bars = axes.barh(list(ran), values, color=colors)
            axes.bar_label(bars, labels, padding=3, color=_INK, fontsize=8)
        axes.set_xlabel(label + (", log axis" if is_log else ""), color=_INK, fontsize=9)
        axes.margins(x=0.4 if labels is shares else 0.25)
        axes.patch.set_alpha(0)
        axes.tick_params(which="both", colors=_INK, labelsize=9)
        axes.spines[:].set_color(_INK)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].invert_yaxis()
    figure.suptitle(title, color=_INK, fontsize=11)
    return figure


def short(value: float) -> str:
    """Format a number with three digits, or with all digits before the point."""
    if math.isnan(value):
        return "n/a"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write(rungs: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write the figure; the file's ending decides the format."""
    draw(rungs, title).savefig(
        path, transparent=True, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {}
    )


def main(result: Path, path: Path) -> None:
    """Draw the first model of a result of `benchmarks/ladder.py`."""
    found = json.loads(result.read_text(encoding="utf-8"))
    name, climbed = next(iter(found["models"].items()))
    where = f"{found['device']}, commit {found['commit'][:9]}"
    title = f"{name}, {climbed['size']['num_requests']} requests, {where}: {climbed['ratio']:.0f} times in all"
    write(climbed["rungs"], title, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
