"""Compute what a load showed of a server, under the names of vLLM's serving benchmark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from teachllm.bench.serve.load import Load
from teachllm.bench.serve.record import Record

METRICS = {
    "ttft": "to the first token",
    "tpot": "a token after it",
    "itl": "between chunks",
    "e2el": "to the last token",
}
_OBJECTIVES = ("ttft", "tpot", "e2el")


def parse_objectives(given: Sequence[str]) -> dict[str, float]:
    """Parse texts like "ttft:200" to {metric: milliseconds}.

    Raises:
        ValueError: a text is something else, or an objective comes twice.
    """
    found: dict[str, float] = {}
    for text in given:
        name, _, number = text.partition(":")
        try:
            limit_ms = float(number)
        except ValueError:
            limit_ms = 0.0
        if name not in _OBJECTIVES or not limit_ms > 0 or name in found:
            one_of = ", ".join(_OBJECTIVES)
            raise ValueError(f"--goodput {text}: must be METRIC:MILLISECONDS, each metric of {one_of} at most once")
        found[name] = limit_ms
    return found


def parse_metrics(text: str) -> list[str]:
    """Parse names of `METRICS`, with commas between them.

    Raises:
        ValueError: one is unknown.
    """
    if unknown := [name for name in text.split(",") if name not in METRICS]:
        raise ValueError(f"--percentile-metrics {text}: no {unknown[0]!r} here; choose from {','.join(METRICS)}")
    return text.split(",")


def parse_percentiles(text: str) -> list[float]:
    """Parse numbers from 0 to 100, with commas between them.

    Raises:
        ValueError: one is something else.
    """
    try:
        found = [float(number) for number in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= number <= 100 for number in found):
        raise ValueError(f"--metric-percentiles {text}: must be numbers from 0 to 100, like 50,90,99")
    return found


def milliseconds(records: Sequence[Record], metric: str) -> list[float]:
    """Return times of finished requests; `itl` has one per chunk after the first, `tpot` none of single tokens."""
    if metric == "itl":
        return [1000 * gap for record in records for gap in record.itl_s]
    values = (getattr(record, f"{metric}_s") for record in records)
    return [1000 * value for value in values if value is not None]


def meets(record: Record, objectives: Mapping[str, float]) -> bool:
    """Return whether a finished request meets every objective, in milliseconds. A single token has no TPOT to miss."""
    return all(1000 * (getattr(record, f"{metric}_s") or 0.0) <= limit for metric, limit in objectives.items())


def figures(
    load: Load,
    objectives: Mapping[str, float] | None = None,
    metrics: Sequence[str] = tuple(METRICS),
    percentiles: Sequence[float] = (50, 90, 99),
) -> dict[str, Any]:
    """Return the first part of `--output-json`. Rates are of finished requests over the duration; no times are None.

    Args:
        objectives: as `parse_objectives` gives them; without any there is no goodput.
    """
    import numpy as np

    done, duration_s = load.finished, load.duration_s or float("inf")
    num_in, num_out = sum(r.num_prompt_tokens for r in done), sum(r.num_output_tokens for r in done)
    found: dict[str, Any] = {
        "duration": load.duration_s,
        "completed": len(done),
        "failed": len(load.failed),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(done) / duration_s,
        "request_goodput": sum(meets(r, objectives) for r in done) / duration_s if objectives else None,
        "output_throughput": num_out / duration_s,
        "total_token_throughput": (num_in + num_out) / duration_s,
        "max_concurrent_requests": most_at_once(load.records),
    }
    for metric in metrics:
        times_ms = np.asarray(milliseconds(done, metric))
        names = ["mean", "median", "std", *map(percentile_name, percentiles)]
        stats: list[float | None] = [None] * len(names)
        if times_ms.size:
            own = (np.mean(times_ms), np.median(times_ms), np.std(times_ms))
            stats = [float(value) for value in (*own, *np.percentile(times_ms, percentiles))]
        found |= {f"{name}_{metric}_ms": value for name, value in zip(names, stats, strict=True)}
    late_ms = np.asarray([1000 * record.late_s for record in load.records])
    found["client"] = {
        **{f"{percentile_name(p)}_late_ms": float(np.percentile(late_ms, p)) for p in (50, 99)},
        **{"max_late_ms": float(late_ms.max()), "busy": load.busy},
    }
    found["errors"] = dict(Counter(record.error for record in load.failed).most_common(20))
    return found


def details(load: Load) -> dict[str, Any]:
    """Return what `--save-detailed` adds: per request, in the order of arrival, seconds from the start of the load."""
    records = load.records
    return {
        "arrivals": [r.due_s for r in records],
        "start_times": [r.sent_s for r in records],
        "end_times": [r.end_s for r in records],
        "ttfts": [r.ttft_s if r.chunk_s else None for r in records],
        "itls": [r.itl_s for r in records],
        "input_lens": [r.num_prompt_tokens for r in records],
        "output_lens": [r.num_output_tokens for r in records],
        "request_errors": [r.error for r in records],
    }


def most_at_once(records: Sequence[Record]) -> int:
    """Return how many requests were sent and not ended at the same time."""
    events = sorted([(r.end_s, -1) for r in records] + [(r.sent_s, 1) for r in records])
    num_open = most = 0
    for _, change in events:
        num_open += change
        most = max(most, num_open)
    return most


def percentile_name(percentile: float) -> str:
    return f"p{percentile:g}"
