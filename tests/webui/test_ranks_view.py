"""The view of ranks in a browser: there only for several, and what it says of a trace written by hand, counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from teachllm.trace.ranks import rank_figures
from tests.trace import staged
from tests.trace.staged import STEPS, rank, step

pytestmark = pytest.mark.slow
LATER = step(3, 30.0, 31.0, [rank(0, 30, 31, {}), rank(1, 30, 31, {})])  # so that all is known of those before
SHARES = ("computes", "exchanges", "bubble")


def shares(page: Any) -> list[dict[str, float]]:
    """Of each rank, as the page says."""
    rows = page.locator("[data-view=ranks] [data-rank]").all()
    attribute = "(node, name) => Number(node.querySelector(`[data-${name}]`).getAttribute(`data-${name}`))"
    return [{name: row.evaluate(attribute, name) for name in SHARES} for row in rows]


def show(page: Any, k: int) -> None:
    page.evaluate("(k) => { view.show(k); view.settle(); }", k)


def test_a_trace_of_one_rank_has_no_such_view(page: Any) -> None:
    assert page.locator("[data-view=ranks]").count() == 0
    assert page.get_attribute("[data-teachllm]", "data-ranks") is None


def test_shares_of_time_are_those_counted_by_hand_and_those_of_the_summary(open_page: Callable[..., Any]) -> None:
    page = open_page(staged.lines([*STEPS, LATER]))
    show(page, 2)
    first, second = shares(page)
    assert first == {"computes": 10 / 20, "exchanges": 0, "bubble": 10 / 20}
    assert second == {"computes": 10.5 / 20, "exchanges": 0.5 / 20, "bubble": 9 / 20}
    for told, figures in zip((first, second), rank_figures(STEPS), strict=True):
        assert told == {name: pytest.approx(getattr(figures, name)) for name in SHARES}
    stages = [node.get_attribute("data-stage") for node in page.locator("[data-rank]").all()]
    assert stages == ["0", "1"]
    assert "2 ranks in 2 stages" in page.locator("[data-summary=ranks]").inner_text()
    assert "bubbles 48 %" in page.locator("[data-summary=ranks]").inner_text()


def test_time_of_which_a_rank_has_not_told_yet_counts_for_nothing(open_page: Callable[..., Any]) -> None:
    """Rank 0's third step may have begun at 12, and would not be in the trace."""
    page = open_page(staged.lines(STEPS[:2]))
    show(page, 1)
    first, second = shares(page)
    assert (first["computes"], first["bubble"]) == (pytest.approx(8 / 12, abs=1e-4), pytest.approx(4 / 12, abs=1e-4))
    assert (second["computes"], second["bubble"]) == (pytest.approx(4.5 / 12), pytest.approx(7 / 12, abs=1e-4))
    page = open_page(staged.lines())  # where it is known
    show(page, 1)
    assert [each["bubble"] for each in shares(page)] == [8 / 16, 7 / 16]


def test_what_was_sent_stands_beside_what_was_expected(open_page: Callable[..., Any]) -> None:
    more = rank(0, 30, 31, {"send": [1, 1500], "broadcast": [2, 8]}) | {"expected": {"send": [1, 1000]}}
    page = open_page(staged.lines([*STEPS, step(3, 30.0, 31.0, [more, STEPS[2]["ranks"][1]])]))
    show(page, 0)
    told = {
        node.get_attribute("data-operation"): [node.get_attribute("data-bytes"), node.get_attribute("data-expected")]
        for node in page.locator("[data-view=ranks] [data-operation]").all()
    }
    assert told == {"send": ["1000", "1000"], "all_gather": ["50", "50"]}
    assert page.locator("[data-traffic]").inner_text() == "1.05 kB, as the model's shape predicts"
    assert page.locator("[data-operation=send]").inner_text().split("\n")[-1] == "1 kB · 1 call · 1 s"
    show(page, 3)
    assert page.locator("[data-traffic]").inner_text() == "1.55 kB: 500 B more than the model's shape predicts"
    assert page.get_attribute("[data-operation=broadcast]", "data-expected") is None


def test_the_load_of_experts_is_shown_where_there_are_any(open_page: Callable[..., Any]) -> None:
    page = open_page(staged.lines([STEPS[0], STEPS[1] | {"expert_load": [[4, 0, 2, 2], [1, 1, 2, 4]]}]))
    show(page, 1)
    assert page.locator("[data-load]").inner_text() == "4 in each of 2 layers; the busiest has 2.0 \u00d7 the mean"
    show(page, 0)
    assert not page.locator("[data-load]").is_visible()


def test_a_plan_tells_what_it_took_and_leads_to_its_step(open_page: Callable[..., Any]) -> None:
    page = open_page(staged.lines())
    show(page, 2)
    canvas = page.locator(".tl-rank-picture canvas")
    x = page.evaluate("view.ranks.painter._x(7)")
    canvas.hover(position={"x": x, "y": 10})
    card = page.locator("[data-card=rank]")
    assert "rank 0 in step 1" in card.inner_text()
    facts = dict(zip(card.locator("dt").all_inner_texts(), card.locator("dd").all_inner_texts(), strict=True))
    assert facts == {
        "stage": "0",
        "took": "7 s",
        "computed": "4 s",
        "send": "1 call, 1 kB, 3 s",
        "tokens": "0 of 0 requests",
    }
    canvas.click(position={"x": x, "y": 10})
    assert page.evaluate("view.k") == 1
    page.mouse.move(0, 0)
    assert not page.locator("[data-card=rank]").is_visible()


def test_a_pause_in_which_nobody_computes_is_cut(open_page: Callable[..., Any]) -> None:
    def later(line: dict[str, Any]) -> dict[str, Any]:
        ranks = [{**each, "begin": each["begin"] + 1e4, "end": each["end"] + 1e4} for each in line["ranks"]]
        return line | {"time": line["time"] + 1e4, "end": line["end"] + 1e4, "ranks": ranks}

    page = open_page(staged.lines([*STEPS[:2], later(STEPS[2]), later(LATER)]))
    show(page, 2)
    end, begin, width = page.evaluate("[16, 10020, 10024].map((time) => view.ranks.painter._x(time))")
    assert 0 < begin - end < 0.05 * width
    assert [each["bubble"] for each in shares(page)] == [10 / 20, 9 / 20]


def test_it_appears_when_a_growing_trace_first_tells_of_ranks(open_page: Callable[..., Any]) -> None:
    alone = {name: value for name, value in STEPS[0].items() if name != "ranks"}
    page = open_page(staged.lines([alone]))
    assert page.locator("[data-view=ranks]").count() == 0
    page.evaluate("(lines) => view.push(lines)", [json.dumps(STEPS[1])])
    assert page.locator("[data-view=ranks]").count() == 1
    show(page, 1)
    assert len(shares(page)) == 2


def test_a_rank_that_is_odd_is_named_and_what_came_before_is_shown(open_page: Callable[..., Any]) -> None:
    [first, second] = STEPS[1]["ranks"]
    page = open_page(staged.lines([STEPS[0], STEPS[1] | {"ranks": [first, second | {"begin": None}]}]))
    said = "line 3 of the trace: a rank without 'stage', 'begin', 'end' or 'sent'"
    assert page.locator(".tl-banner").inner_text() == said
    show(page, 0)
    assert len(shares(page)) == 2


def test_main_views_stay_in_sight_and_a_phone_needs_no_sideways_scrolling(open_page: Callable[..., Any]) -> None:
    page = open_page(staged.lines())
    for name in ("ranks", "pool", "batch", "step"):
        box = page.locator(f"[data-view={name}]").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 1280 and box["y"] + 100 <= 720
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
