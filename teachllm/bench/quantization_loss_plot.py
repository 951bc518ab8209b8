"""A picture of what `quantization_loss` found: loss against size, and against speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from teachllm.bench.quantization_loss import Compared

_COLORS = ("#2563eb", "#0d9488", "#94a3b8", "#d97706", "#dc2626", "#7c3aed", "#db2777", "#65a30d")
_LEAST = 1e-6  # nats; the original itself has no place on a logarithmic axis


def write_plot(found: Sequence[Compared], path: Path, title: str) -> None:
    """Write a page that needs no network.

    Raises:
        ImportError: plotly is not installed.
        OSError: the file cannot be written.
    """
    graph, make_subplots = _plotly()
    page = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.04)
    original, others = found[0], found[1:]
    for column, (of_one, unit) in enumerate(
        ((lambda each: each.num_bytes / 1e6, "size, MB"), (lambda each: each.tokens_per_s, "tokens/s")), start=1
    ):
        for index, each in enumerate(others):
            increase = each.perplexity / original.perplexity - 1
            page.add_trace(
                graph.Scatter(
                    x=[of_one(each)],
                    y=[max(each.kl_divergence, _LEAST)],
                    name=each.name,
                    mode="markers",
                    marker={"size": 14, "color": _COLORS[index % len(_COLORS)], "symbol": index % 5},
                    legendgroup=each.name,
                    showlegend=column == 1,
                    hovertemplate=f"{each.name}<br>{unit}: %{{x:,.4g}}<br>KL: %{{y:.3g}}<br>"
                    f"perplexity: {increase:+.2%}<extra></extra>",
                ),
                row=1,
                col=column,
            )
        page.add_vline(x=of_one(original), line_dash="dot", annotation_text="original", row=1, col=column)
        page.update_xaxes(title_text=unit, rangemode="tozero", row=1, col=column)
    page.update_yaxes(type="log", tickformat="~g")  # of both: else their points do not stand at one height
    page.update_yaxes(title_text="KL divergence from the original, nats per token", row=1, col=1)
    page.update_layout(title_text=title.replace("<", "&lt;"), template="plotly_white", height=560)
    page.write_html(path, include_plotlyjs=True, full_html=True)


def check_plotly() -> None:
    """Check for plotly, before long work whose picture could not be drawn.

    Raises:
        ImportError: plotly is not installed.
    """
    _plotly()


def _plotly():  # type: ignore[no-untyped-def]
    try:
        from plotly import graph_objects
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise ImportError("the plot is drawn with plotly: pip install 'teachllm[ui]', or leave --plot out") from error
    return graph_objects, make_subplots
