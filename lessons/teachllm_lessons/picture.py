"""A picture in a notebook: an SVG on a paper of its own, which follows the reader's light or dark theme."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Literal

from teachllm_lessons.palette import BAR, DARK, INK, LINE, OTHER_BAR, PAPER, series_color

_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "teachllm", "font.family": "sans-serif"}
_NAMES = {color: f"--teachllm-{index}" for index, color in enumerate(DARK)}
_FOLLOWS_THE_THEME = (
    "<style>@media (prefers-color-scheme: dark) { .teachllm-picture { "
    + "; ".join(f"{name}: {DARK[color]}" for color, name in _NAMES.items())
    + " } }</style>"
)


class Picture:
    """A figure that shows itself as SVG.

    Args:
        figure: a figure of matplotlib.
        says: what the picture shows, with its numbers, for readers who cannot see it and where only text is shown.
    """

    def __init__(self, figure: Any, says: str) -> None:
        self.figure, self.says = figure, says

    def _repr_svg_(self) -> str:
        import matplotlib

        out = io.StringIO()
        with matplotlib.rc_context(_STYLE):
            self.figure.savefig(out, format="svg", facecolor=PAPER, metadata={"Date": None, "Title": self.says})
        drawn = re.sub("|".join(_NAMES), lambda found: f"var({_NAMES[found[0]]}, {found[0]})", out.getvalue())
        look = 'class="teachllm-picture" role="img" style="max-width: 100%; height: auto; border-radius: 6px"'
        said = escape(self.says, quote=True)
        return re.sub(
            r"<svg ([^>]*)>",
            lambda found: f'<svg {look} aria-label="{said}" {found[1]}>{_FOLLOWS_THE_THEME}',
            drawn,
            count=1,
        )

    def __repr__(self) -> str:
        return f"[picture: {self.says}]"


def axes(width: float, height: float, **more: Any) -> tuple[Any, Any]:
    """Return a figure of so many inches, and its axes in the theme's ink."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    ax = figure.subplots(**more)
    for each in ax.flat if hasattr(ax, "flat") else [ax]:
        each.patch.set_alpha(0)
        each.tick_params(which="both", color=LINE, labelcolor=INK, labelsize=9)
        each.spines[:].set_color(LINE)
        each.spines[["top", "right"]].set_visible(False)
        for label in (each.xaxis.label, each.yaxis.label, each.title):
            label.set_color(INK)
    return figure, ax


def rectangle(
    ax: Any, x: float, y: float, width: float, height: float, filled: Any, *, edge: str = LINE, **look: Any
) -> None:
    """Draw a rectangle with an edge, which is seen on the paper whatever fills it.

    Args:
        filled: a color, (red, green, blue[, opacity]) from 0 to 1, or "none".
        look: as matplotlib's `Rectangle` takes it: `linestyle`, `linewidth`, `hatch`.
    """
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x, y), width, height, **{"facecolor": filled, "edgecolor": edge, "linewidth": 0.6} | look))


def log_axis(
    ax: Any, which: Literal["x", "y"], values: Sequence[float] = (), *, multiples: Sequence[int] = (1, 2, 5)
) -> None:
    """Make an axis logarithmic, with plain numbers as its labels.

    Args:
        values: where its ticks are; without any, at `multiples` of the powers of ten.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(FixedLocator(list(values)) if values else LogLocator(subs=multiples, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def short(value: float) -> str:
    """Return a label: three digits, or a whole number with separators between its thousands."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def bars(values: Mapping[str, float], label: str, *, best: str | None = None) -> Picture:
    """Draw one bar per name, from zero, with its number.

    Args:
        label: what is measured, and its unit.
        best: the bar that is to stand out; None: all look alike.
    """
    figure, ax = axes(8, 0.6 + 0.34 * len(values))
    colors = [BAR if best in (None, name) else OTHER_BAR for name in values]
    drawn = ax.barh(list(values), list(values.values()), color=colors)
    ax.bar_label(drawn, [short(value) for value in values.values()], padding=4, color=INK, fontsize=9)
    ax.set_xlabel(label)
    ax.margins(x=0.15)
    ax.invert_yaxis()
    said = ", ".join(f"{name} {short(value)}" for name, value in values.items())
    return Picture(figure, f"{label}: {said}")


def lines(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str, *, log: str = "") -> Picture:
    """Draw one line per name, of (x values, y values).

    Args:
        x, y: what is measured, and its unit.
        log: which axes are logarithmic: "", "x", "y" or "xy".
    """
    figure, ax = axes(8, 3.2)
    for index, (name, (xs, ys)) in enumerate(series.items()):
        ax.plot(xs, ys, marker="os^Dv*"[index % 6], markersize=5, color=series_color(index), label=name)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    places = {value for xs, _ in series.values() for value in xs}
    if "x" in log:
        log_axis(ax, "x", sorted(places) if len(places) <= 12 else ())
    if "y" in log:
        log_axis(ax, "y")
    ax.grid(color=LINE, linewidth=0.5, alpha=0.5)
    if len(series) > 1:
        ax.legend(frameon=False, labelcolor=INK, fontsize=9)
    return Picture(figure, f"{y} over {x}: " + "; ".join(_ends(name, *each) for name, each in series.items()))


def _ends(name: str, xs: Sequence[float], ys: Sequence[float]) -> str:
    return f"{name} {short(ys[0])} at {short(xs[0])} to {short(ys[-1])} at {short(xs[-1])}"
