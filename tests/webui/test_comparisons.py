"""Two timelines side by side: what is compared, and that all of it can be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from teachllm_webui.presets import PRESETS, preset
from tests.webui.conftest import DRAWN, boxes, mount_live

pytestmark = pytest.mark.slow


def slower(trace: list[str], factor: float) -> list[str]:
    """The trace with steps that take so many times as long."""
    events = [json.loads(line) for line in trace]
    begin = events[0]["time"]
    for event in events:
        for name in ("time", "end"):
            if name in event:
                event[name] = begin + factor * (event[name] - begin)
    return [json.dumps(event) for event in events]


def figure(page: Any, name: str) -> list[str]:
    return page.locator(f"[data-figure={name}] dd").all_inner_texts()


def test_the_longest_pause_of_either_side_and_means_that_can_only_grow_are_told(
    open_exported: Callable[..., Any], trace: list[str]
) -> None:
    page = open_exported(trace)
    chunked = preset("chunked")
    titles = [variant.title for variant in chunked.variants]
    texts = {"title": chunked.title, "look_at": chunked.look_at}
    mount_live(page, [slower(trace, 1000), trace], axis=chunked.axis, titles=titles, **texts)
    for side in page.locator("[data-side]").all():
        assert side.locator("[data-axis=ms]").get_attribute("aria-pressed") == "true"
    steps = [json.loads(line) for line in trace if '"event":"step"' in line]
    page.evaluate("(k) => livePage.views[0].show(k)", len(steps) - 1)
    times: dict[str, list[float]] = {}
    for step in steps:
        for each in step["scheduled"]:
            if each.get("num_sampled"):
                times.setdefault(each["request_id"], []).append(step["end"])
    longest = max(later - earlier for each in times.values() for earlier, later in pairwise(each))
    left, right = page.locator("[data-figure=longest] dd").evaluate_all("dds => dds.map((dd) => dd.dataset.value)")
    assert (float(left), float(right)) == (pytest.approx(1000 * longest), pytest.approx(longest))
    assert page.get_attribute("[data-figure=longest]", "data-differs") == ""
    assert not any("\u2265" in text for text in figure(page, "ttft"))
    early = next(k for k, step in enumerate(steps) if step["waiting"] and k > 0)
    page.evaluate("(k) => livePage.views[0].show(k)", early)
    assert all(text.startswith("\u2265 ") for text in figure(page, "ttft"))  # some have waited, and wait on


@pytest.mark.parametrize("width", [1280, 1600])
def test_sides_are_equally_wide_and_nothing_of_them_is_cut(
    open_exported: Callable[..., Any], trace: list[str], width: int
) -> None:
    page = open_exported(trace, viewport={"width": width, "height": 900})
    longest = max(PRESETS, key=lambda each: len(each.look_at))
    mount_live(page, [trace, slower(trace, 2)], titles=["one", "the other"], look_at=longest.look_at)
    page.evaluate("livePage.views[0].show(3)")
    widths = page.locator(".tl-scrub").evaluate_all("bars => bars.map((bar) => bar.getBoundingClientRect().width)")
    assert len(widths) == 2 and abs(widths[0] - widths[1]) <= 1 and widths[0] > 300
    page.click("[data-open=preset]")
    texts = page.locator("[data-preset] span, [data-preset] b, .tl-look, .tl-next[data-free-list]")
    assert texts.count() == 2 * len(PRESETS) + 1 + 2
    cut = "nodes => nodes.filter((n) => n.scrollWidth > n.clientWidth + 1 && getComputedStyle(n).display !== 'inline')"
    assert texts.evaluate_all(f"{cut}.map((n) => n.textContent)") == []
    for side in (0, 1):
        panel, line = boxes(page, f"[data-side='{side}'] :is([data-view=pool], [data-free-list])")
        assert panel["left"] <= line["left"] and line["right"] <= panel["right"]
    assert all(text.startswith("next free: ") for text in page.locator(".tl-next[data-free-list]").all_inner_texts())


def test_both_sides_have_the_same_rows_at_every_step(open_exported: Callable[..., Any], trace: list[str]) -> None:
    page = open_exported(trace, viewport={"width": 900, "height": 900})
    mount_live(page, [trace, slower(trace, 40)], axis="ms", titles=["one", "the other"])
    found = page.evaluate(
        """() => {
            const { views } = livePage;
            return [...Array(views[0].timeline.last + 1).keys()].map((k) => {
                views[0].show(k);
                for (const view of views) view.settle();
                const rows = views.map((view) => view.batch.rows.map((row) => row.id).join());
                const own = views.map((view) => view.batch.rows.filter((row) => view.batch.covers(row.id)).length);
                return { same: rows[0] === rows[1], apart: own[0] !== own[1] };
            });
        }"""
    )
    assert all(each["same"] for each in found)
    assert any(each["apart"] for each in found)  # a side alone would leave rows out, or show rows that the other lacks


def test_one_of_a_kind_is_told_in_the_singular(open_exported: Callable[..., Any], trace: list[str]) -> None:
    page = open_exported(trace)
    told = page.evaluate('[1, 2, 0, 5461, 1.0001, 13.52].map((n) => teachllm.format.count(n, "step"))')
    assert told == ["1 step", "2 steps", "0 steps", "5461 steps", "1 step", "13.5 steps"]
    assert page.locator("option").first.inner_text() == "1 step/s"
    mount_live(page, [trace, slower(trace, 2)], titles=["one", "the other"])
    page.evaluate("livePage.views[0].show(0)")
    assert not any("1 steps" in text for text in figure(page, "ttft"))


def steps_in(lines: list[str]) -> int:
    return sum('"event":"step"' in line for line in lines)


def test_two_sides_are_played_and_stepped_to_the_end_of_the_longer_one(
    open_exported: Callable[..., Any], trace: list[str]
) -> None:
    page = open_exported(trace)
    short = trace[:-20]
    mount_live(page, [short, trace], titles=["one", "the other"])
    last = [steps_in(short) - 1, steps_in(trace) - 1]
    assert last[0] < last[1] - 3
    shown = "livePage.views.map((view) => view.k)"
    page.evaluate(f"livePage.views[0].goTo({last[0]})")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(shown) == [last[0], last[0] + 2]
    assert page.locator("[data-side='0'] [data-where]").inner_text().endswith("ended")
    page.evaluate(f"livePage.views[0].transport.setSpeed(60), livePage.views[0].goTo({last[0] - 2})")
    page.keyboard.press("Space")
    page.wait_for_function(f"livePage.views[1].k === {last[1]} && !livePage.views[0].transport.playing")
    assert page.evaluate(shown) == last
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(shown) == [last[0], last[1] - 1]


def test_the_buttons_of_a_recorded_trace_drive_its_fork(open_exported: Callable[..., Any], trace: list[str]) -> None:
    page = open_exported(trace)
    fork = {"is_fork": True, "since": 4, "is_done": False, "sides_done": [True, False], "playing": True}
    mount_live(page, [trace, trace], titles=["original", "fork"], **fork)
    for button in ("play", "end", "forward"):
        page.click(f"[data-side='0'] [data-action={button}]")
    assert page.evaluate("orders") == ["pause", "step"]
    assert page.locator("[data-side='0'] [data-action=play]").get_attribute("data-playing") == "true"
    page.evaluate("livePage.views[0].setLive({ done: true, playing: false }), livePage.views[0].goTo(2)")
    page.click("[data-side='0'] [data-action=play]")
    assert page.evaluate("orders.length") == 2  # now it plays what there is


def test_both_sides_have_the_same_scale_of_time_and_the_same_axes(
    open_exported: Callable[..., Any], trace: list[str]
) -> None:
    page = open_exported(trace)
    mount_live(page, [trace, slower(trace, 3)], axis="ms", titles=["one", "the other"])
    widths = page.evaluate("livePage.views.map(({ batch }) => batch.span(5)[1])")
    assert widths[1] == pytest.approx(3 * widths[0])
    page.locator("[data-side='1'] [aria-label=wider]").click()
    page.locator("[data-side='0'] [data-axis=steps]").click()
    assert page.evaluate("livePage.views.map(({ batch }) => batch.span(5)[1])") == [pytest.approx(22 * 1.4)] * 2
    page.evaluate("livePage.views.forEach((view) => { view.show(9); view.settle(); })")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    ends = "livePage.views.map((v) => v.metrics.charts.map(({ chart }) => [chart.seconds, chart.top]).join())"
    page.wait_for_function(f"new Set({ends}).size === 1")


def test_a_banner_can_be_closed_and_escape_answers_no(open_exported: Callable[..., Any], trace: list[str]) -> None:
    page = open_exported(trace)
    mount_live(page, [trace], error="It has failed.")
    banner = page.locator("[data-problem]")
    for close in (lambda: banner.locator("button").click(), lambda: page.keyboard.press("Escape")):
        page.evaluate("livePage._say('It has failed.')")
        assert banner.inner_text() == "It has failed."
        close()
        assert banner.is_hidden()
        page.evaluate("livePage._show(7, livePage.now)")  # the server tells it with every answer
        assert banner.is_hidden()
    page.evaluate("void livePage._confirm('Replace it?').then((choice) => (window.choice = choice))")
    page.keyboard.press("Escape")
    page.wait_for_function("window.choice === false")
    assert page.locator("[data-question]").is_hidden()


def test_what_is_wrong_with_a_fork_is_said_in_its_form_which_keeps_what_was_typed(
    open_exported: Callable[..., Any], trace: list[str]
) -> None:
    page = open_exported(trace)
    mount_live(page, [trace])
    page.evaluate("window.answer = { error: 'too few blocks' }")
    page.click("[data-open=fork]")
    page.fill("[data-form=fork] [name=block_size]", "4")
    page.click("[data-submit=fork]")
    error = page.locator("[data-form=fork] [role=alert]")
    error.wait_for()
    assert error.inner_text() == "too few blocks" and page.locator("[data-problem]").is_hidden()
    assert page.input_value("[data-form=fork] [name=block_size]") == "4"
    page.keyboard.press("Escape")
    page.evaluate("livePage._show(7, { ...livePage.now, can_fork: false, is_simulation: true })")
    page.click("[data-open=fork]")
    note = page.locator("[data-form=fork]").inner_text()
    assert "A simulation has no tokens, so it cannot be forked." in note


def test_a_form_has_room_for_its_texts_and_a_narrow_window_has_no_left_and_right(
    open_exported: Callable[..., Any], trace: list[str]
) -> None:
    page = open_exported(trace)
    mount_live(page, [trace, slower(trace, 2)], titles=["one", "the other"], look_at="Left, this; right, that.")
    page.click("[data-open=what_if]")
    cut = """(select) => {
        const paper = document.createElement("canvas").getContext("2d");
        const style = getComputedStyle(select);
        paper.font = style.font;
        const width = Math.max(...[...select.options].map(({ text }) => paper.measureText(text).width));
        return width + parseFloat(style.paddingLeft) + parseFloat(style.paddingRight) + 18 - select.clientWidth;
    }"""
    assert page.locator("[data-form=what_if] [name=policy]").evaluate(cut) <= 0  # 18 is the arrow's
    page.keyboard.press("Escape")
    assert page.locator(".tl-look").inner_text() == "Left, this; right, that."
    assert page.locator("[data-figure=titles] dd").all_inner_texts() == ["one", "the other"]
    page.set_viewport_size({"width": 600, "height": 900})
    page.wait_for_selector(".tl-look:has-text('Above, this; below, that.')")
    assert page.evaluate("document.documentElement.scrollWidth") <= 600


def test_a_run_that_has_ended_opens_on_both_sides_at_the_step_that_shows_its_point(
    open_exported: Callable[..., Any], trace: list[str]
) -> None:
    page = open_exported(trace)
    mount_live(page, [trace, slower(trace, 2)], titles=["one", "the other"], show_at=12)
    assert page.evaluate("livePage.views.map((view) => view.k)") == [12, 12]
    assert all(each.show_at for each in PRESETS)


def test_two_sides_are_printed_below_each_other_with_all_panels(
    open_exported: Callable[..., Any], trace: list[str]
) -> None:
    page = open_exported(trace)
    mount_live(page, [trace, trace], titles=["one", "the other"], is_fork=True, since=3)
    page.emulate_media(media="print")
    page.evaluate(DRAWN)
    first, second = boxes(page, "[data-side]")
    assert second["top"] >= first["bottom"] and second["width"] == first["width"] > 1200
    for side in (0, 1):
        panels = boxes(page, f"[data-side='{side}'] .tl-panel")
        assert len(panels) == 7 and all(panel["height"] > 40 for panel in panels)
        assert all(later["top"] >= panel["bottom"] for panel, later in pairwise(panels))
    assert not any(button.is_visible() for button in page.locator("[data-live] button").all())
