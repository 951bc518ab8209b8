"""A picture in a notebook: drawn by matplotlib, without a background, so that it is read in light and in dark."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from teachllm_lessons.palette import BAR, INK, LINE, OTHER_BAR, color

_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "teachllm", "font.family": "sans-serif"}


class Picture:
    """A figure that shows itself as SVG.

    Args:
        says: what is to be seen, for those who cannot see it and where only text is shown.
    """

    def __init__(self, figure: Any, says: str) -> None:
        self.figure, self.says = figure, says

    def _repr_svg_(self) -> str:
        import matplotlib

        out = io.StringIO()
        with matplotlib.rc_context(_STYLE):
            self.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Title": self.says})
        return out.getvalue().replace("<svg ", '<svg style="max-width: 100%; height: auto" ', 1)

    def __repr__(self) -> str:
        return f"[picture: {self.says}]"


def axes(width: float, height: float, **more: Any) -> tuple[Any, Any]:
    """A figure of so many inches, and its axes with lines and text in grey."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    ax = figure.subplots(**more)
    for each in ax.flat if hasattr(ax, "flat") else [ax]:
        each.patch.set_alpha(0)
        each.tick_params(colors=INK, labelsize=9)
        each.spines[:].set_color(LINE)
        each.spines[["top", "right"]].set_visible(False)
        for label in (each.xaxis.label, each.yaxis.label, each.title):
            label.set_color(INK)
    return figure, ax


def short(value: float) -> str:
    """For a label: three digits, or a whole number with its thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def bars(values: Mapping[str, float], label: str, *, log: bool = False, best: str | None = None) -> Picture:
    """One bar for each name, with its number.

    Args:
        label: what is measured, and its unit.
        best: the bar that is to stand out; None: all look alike.
    """
    figure, ax = axes(8, 0.6 + 0.34 * len(values))
    colors = [BAR if best in (None, name) else OTHER_BAR for name in values]
    drawn = ax.barh(list(values), list(values.values()), color=colors)
    ax.bar_label(drawn, [short(value) for value in values.values()], padding=4, color=INK, fontsize=9)
    ax.set_xlabel(label)
    ax.set_xscale("log" if log else "linear")
    ax.margins(x=0.15)
    ax.invert_yaxis()
    said = ", ".join(f"{name} {short(value)}" for name, value in values.items())
    return Picture(figure, f"{label}: {said}")


def lines(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str, *, log: str = "") -> Picture:
    """One line for each name, of (x values, y values).

    Args:
        x, y: what is measured, and its unit.
        log: which axes are logarithmic: "", "x", "y" or "xy".
    """
    figure, ax = axes(8, 3.2)
    for index, (name, (xs, ys)) in enumerate(series.items()):
        ax.plot(xs, ys, marker="o", markersize=4, color=color(index), label=name)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.set_xscale("log" if "x" in log else "linear")
    ax.set_yscale("log" if "y" in log else "linear")
    ax.grid(color=LINE, linewidth=0.5)
    if len(series) > 1:
        ax.legend(frameon=False, labelcolor=INK, fontsize=9)
    return Picture(figure, f"{y} over {x}, for {', '.join(series)}")
