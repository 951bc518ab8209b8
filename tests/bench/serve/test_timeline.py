"""The picture of a load."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from teachllm.bench.serve.record import Record
from teachllm.bench.serve.timeline import open_requests, parse_thresholds, segments, write_timeline

RECORD = Record(0.5, 5, 1.0, 1.0, [2.0, 2.01, 2.02, 2.05, 2.15, 2.16], 2.16, 3, 5, True)
LIMITS = (25.0, 50.0)


def test_a_request_is_coloured_by_what_it_waited_for_without_gaps() -> None:
    found = list(segments(RECORD, LIMITS))
    assert [kind for kind, _, _ in found] == [
        *("queue", "prefill"),
        *("ITL to 25 ms", "ITL 25 to 50 ms", "ITL over 50 ms", "ITL to 25 ms"),
    ]
    assert [begin for _, begin, _ in found] == [0.5, 1.0, 2.0, 2.02, 2.05, 2.15]
    assert [end for _, _, end in found] == [1.0, 2.0, 2.02, 2.05, 2.15, 2.16]


def test_a_failed_request_shows_how_far_it_came() -> None:
    assert list(segments(Record(0.0, 5, end_s=3.0, error="gone"), LIMITS)) == [("failed", 0.0, 3.0)]
    broken = Record(0.0, 5, chunk_s=[1.0], end_s=3.0, error="gone")
    assert list(segments(broken, LIMITS)) == [("prefill", 0.0, 1.0), ("failed", 1.0, 3.0)]


def test_the_line_below_counts_requests_that_are_out() -> None:
    records = [Record(0.0, 1, sent_s=1.0, end_s=4.0), Record(0.0, 1, sent_s=2.0, end_s=3.0)]
    assert open_requests(records) == ([0.0, 1.0, 2.0, 3.0, 4.0], [0, 1, 2, 1, 0])


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    path = tmp_path / "load.html"
    write_timeline([RECORD], path, "<b>a model</b>", LIMITS)
    page = path.read_text(encoding="utf-8")
    assert "ITL over 50 ms" in page and "requests out" in page and "<b>a model" not in page
    assert "<script src=" not in page and len(page) > 1_000_000


def test_thresholds_rise() -> None:
    assert parse_thresholds("10,20.5") == (10.0, 20.5)
    for wrong in ("10", "20,10", "0,10", "a,b", "1,2,3"):
        with pytest.raises(ValueError, match="must be two rising numbers of ms"):
            parse_thresholds(wrong)


def test_without_plotly_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ImportError, match=r"pip install 'teachllm\[ui\]'"):
        write_timeline([RECORD], tmp_path / "load.html", "a model")
