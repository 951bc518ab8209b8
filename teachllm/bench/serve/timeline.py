"""A load as a picture: a line for each request, and below them how many were out at a time.

A request is grey while `max_concurrency` holds it back, blue until its first token, and then coloured by how long its
chunks were apart. Stretches of the same colour are one line each, so that a thousand requests of a thousand tokens are
still a page that scrolls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from teachllm.bench.serve.record import Record
from teachllm.errors import counted

_COLORS = {"queue": "#9ca3af", "prefill": "#3b82f6", "failed": "#111827"}
_ITL_COLORS = ("#22c55e", "#f59e0b", "#ef4444")
Segment = tuple[str, float, float]  # kind, from, to


def parse_thresholds(text: str) -> tuple[float, float]:
    """Parse two rising numbers of milliseconds, with a comma between them.

    Raises:
        ValueError: the text is something else.
    """
    try:
        low, high = (float(number) for number in text.split(","))
        if 0 < low < high:
            return low, high
    except ValueError:
        pass
    raise ValueError(f"--timeline-itl-thresholds {text}: must be two rising numbers of ms, like 25,50")


def segments(record: Record, thresholds_ms: tuple[float, float]) -> Iterator[Segment]:
    """Yield a request's stretches of time, in order and without gaps, from its arrival to its end.

    Args:
        thresholds_ms: the limits that part the times between chunks into three kinds.
    """
    if record.sent_s > record.due_s:
        yield "queue", record.due_s, record.sent_s
    if not record.chunk_s:
        yield "failed", record.sent_s, record.end_s
        return
    yield "prefill", record.sent_s, record.chunk_s[0]
    names = itl_names(thresholds_ms)
    begin, kind, last_s = record.chunk_s[0], "", record.chunk_s[0]
    for at in record.chunk_s[1:]:
        new = names[sum(1000 * (at - last_s) > limit for limit in thresholds_ms)]
        if new != kind and last_s > begin:
            yield kind, begin, last_s
            begin = last_s
        kind, last_s = new, at
    if last_s > begin:
        yield kind, begin, last_s
    if record.end_s > last_s:
        yield ("failed" if record.error else names[0]), last_s, record.end_s


def itl_names(thresholds_ms: tuple[float, float]) -> tuple[str, str, str]:
    low, high = thresholds_ms
    return f"ITL to {low:g} ms", f"ITL {low:g} to {high:g} ms", f"ITL over {high:g} ms"


def open_requests(records: Sequence[Record]) -> tuple[list[float], list[int]]:
    """Return times, and how many requests were out from each of them on."""
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    times, counts, num_open = [0.0], [0], 0
    for at, change in changes:
        num_open += change
        times.append(at)
        counts.append(num_open)
    return times, counts


def write_timeline(
    records: Sequence[Record], path: Path, title: str, thresholds_ms: tuple[float, float] = (25.0, 50.0)
) -> None:
    """Write a page that needs no network.

    Raises:
        ImportError: plotly is not installed.
        OSError: the file cannot be written.
    """
    graph, make_subplots = _plotly()
    colors = _COLORS | dict(zip(itl_names(thresholds_ms), _ITL_COLORS, strict=True))
    times: dict[str, list[float | None]] = {kind: [] for kind in colors}
    rows: dict[str, list[int | None]] = {kind: [] for kind in colors}
    texts: dict[str, list[str]] = {kind: [] for kind in colors}
    for row, record in enumerate(records):
        text = _hover(row, record)
        for kind, begin, end in segments(record, thresholds_ms):
            times[kind] += [begin, end, None]
            rows[kind] += [row, row, None]
            texts[kind] += [text, text, ""]
    page = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.8, 0.2], vertical_spacing=0.04)
    width = max(1.0, min(12.0, 500 / max(len(records), 1)))
    for kind, color in colors.items():
        if times[kind]:
            line = {"color": color, "width": width}
            hover = f"{kind}: %{{x:.3f}} s<br>%{{text}}<extra></extra>"
            page.add_trace(
                graph.Scattergl(
                    x=times[kind],
                    y=rows[kind],
                    text=texts[kind],
                    name=kind,
                    line=line,
                    mode="lines",
                    hovertemplate=hover,
                ),
                row=1,
                col=1,
            )
    at, counts = open_requests(records)
    out = {"color": "#6366f1", "shape": "hv", "width": 1.5}
    page.add_trace(graph.Scatter(x=at, y=counts, line=out, mode="lines", name="requests out"), row=2, col=1)
    page.update_yaxes(title_text="request", autorange="reversed", row=1, col=1)
    page.update_yaxes(title_text="out at a time", rangemode="tozero", row=2, col=1)
    page.update_xaxes(title_text="seconds", row=2, col=1)
    page.update_layout(title_text=title.replace("<", "&lt;"), template="plotly_white", height=800)
    page.write_html(path, include_plotlyjs=True, full_html=True)


def check_plotly() -> None:
    """Check for plotly, before a long load whose picture could not be drawn.

    Raises:
        ImportError: plotly is not installed.
    """
    _plotly()


def _plotly():  # type: ignore[no-untyped-def]
    try:
        from plotly import graph_objects
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise ImportError("the timeline is drawn with plotly: pip install 'teachllm[ui]'") from error
    return graph_objects, make_subplots


def _hover(row: int, record: Record) -> str:
    lengths = f"{counted(record.num_prompt_tokens, 'token')} in, {record.num_output_tokens} out"
    if record.error:
        return f"request {row}: failed"
    return f"request {row}: {lengths}<br>TTFT {1000 * record.ttft_s:.1f} ms, E2EL {1000 * record.e2el_s:.0f} ms"
