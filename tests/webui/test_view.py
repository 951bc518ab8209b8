"""The exported page in a browser, opened from disk: what it shows is what the trace says, and it can be driven."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from teachllm.sampling_params import SamplingParams
from tests.spec_decode.drafters import speculation
from tests.trace.traced import traced_engine
from tests.worker.engines import drain, random_ids

pytestmark = pytest.mark.slow


def steps_of(trace: list[str]) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, trace) if line["event"] == "step"]


def step_index(page: Any) -> int:
    return int(page.get_attribute("[data-teachllm]", "data-step-index"))


def show(page: Any, k: int) -> None:
    page.evaluate("(k) => { view.show(k); view.settle(); }", k)


def read_at(page: Any, steps: Iterable[int], read: str) -> list[Any]:
    """What a function reads from the page at each of these steps, in one visit."""
    return page.evaluate(
        f"(steps) => steps.map((k) => {{ view.show(k); view.settle(); return ({read})(); }})", [*steps]
    )


def dom(page: Any) -> Any:
    """Every element with its attributes and its text, in whatever order the attributes were set."""
    return page.evaluate(
        """() => {
            const attributes = (node) => node.getAttributeNames().sort().map((name) => [name, node.getAttribute(name)]);
            const element = (node) => [node.tagName, attributes(node), [...node.childNodes].map(read)];
            const read = (node) => (node.nodeType === 3 ? node.data : element(node));
            return [...document.querySelectorAll("[data-view]:not([data-view=metrics])")].map(read);
        }"""
    )


def test_scrubbing_back_and_forth_gives_the_same_dom(page: Any, trace: list[str]) -> None:
    show(page, 20)
    before = dom(page)
    for k in (len(steps_of(trace)) - 1, 3, 55, 0, 20):
        show(page, k)
    assert dom(page) == before


def test_every_block_shows_its_users_and_the_pool_adds_up(page: Any, trace: list[str]) -> None:
    steps = steps_of(trace)
    read = """() => {
        const cells = [...document.querySelectorAll("[data-block]")].map((cell) => cell.dataset);
        const known = view.state.blocks.map((block) => [...new Set(block.users)].join(" "));
        const outside = [...view.timeline.endedOutside(view.k)].flat();
        return [cells.map((cell) => cell.users), known, cells.map((cell) => cell.state), outside];
    }"""
    for step, (users, known, counts, outside) in zip(
        steps[::7], read_at(page, range(0, len(steps), 7), read), strict=True
    ):
        assert users == known
        if "aborted" not in outside:  # else a line has ended it, and not the step
            assert sum(c in ("used", "shared") for c in counts) == step["blocks"]["used"]
            assert counts.count("cached") == step["blocks"]["cached"]


def test_hovering_a_block_shows_its_owner_and_lights_it_up_everywhere(page: Any) -> None:
    show(page, 12)
    cell = page.locator("[data-block][data-state=used]").first
    cell.hover()
    owner = cell.get_attribute("data-users")
    card = page.locator("[data-card=block]")
    card.wait_for()
    assert card.get_attribute("data-card-id") == cell.get_attribute("data-block")
    assert f"= {owner}, its block" in card.inner_text()
    assert page.get_attribute("[data-teachllm]", "data-lit") == owner
    assert page.locator("[data-view=tokens] .tl-lit").get_attribute("data-request") == owner
    lit = page.eval_on_selector_all("[data-block][data-lit]", "cells => cells.map((c) => c.dataset.users)")
    assert lit and all(owner in users.split() for users in lit)


def test_a_shared_block_names_all_of_its_owners(page: Any) -> None:
    show(page, 12)
    cell = page.locator("[data-block][data-state=shared]").first
    cell.hover()
    text = page.locator("[data-card=block]").inner_text()
    owners = (cell.get_attribute("data-users") or "").split()
    assert len(owners) > 1 and all(owner in text for owner in owners)


def test_a_clicked_block_is_followed_from_step_to_step_until_escape(page: Any) -> None:
    show(page, 5)
    page.locator("[data-block='2']").click()
    page.mouse.move(640, 5)
    for k in (6, 30, 60):
        show(page, k)
        assert page.get_attribute("[data-block='2']", "aria-pressed") == "true"
        assert page.locator("[data-card=block]").get_attribute("data-card-id") == "2"
    page.keyboard.press("Escape")
    assert page.locator("[data-card]").is_hidden()


def test_a_request_clicked_in_the_queue_stays_lit_when_the_pointer_leaves(page: Any, trace: list[str]) -> None:
    show(page, next(k for k, step in enumerate(steps_of(trace)) if step["waiting"]))
    row = page.locator("[data-view=queue] [data-request]").first
    row.click()
    page.mouse.move(640, 5)
    assert page.get_attribute("[data-teachllm]", "data-pinned") == row.get_attribute("data-request")
    assert page.get_attribute("[data-teachllm]", "data-lit") == row.get_attribute("data-request")
    page.keyboard.press("Escape")
    assert page.get_attribute("[data-teachllm]", "data-lit") is None


def test_the_queue_gives_each_waiting_request_its_reason_in_words(page: Any, trace: list[str]) -> None:
    seen, steps = set(), steps_of(trace)
    read = """() => [...document.querySelectorAll("[data-view=queue] [data-request]")].map(
        (row) => [row.dataset.request, row.dataset.reason, row.querySelector(".tl-words").textContent])"""
    for step, rows in zip(steps, read_at(page, range(len(steps)), read), strict=True):
        told = {name: [reason, words] for name, reason, words in rows}
        assert told == {name: wait for name, wait in step["waiting"].items() if name in told}
        assert set(step["waiting"]) - set(told) <= {"aborted"}
        seen |= {reason for _, reason, _ in rows}
    assert len(seen) >= 2


def test_the_step_and_the_timeline_tell_who_got_how_many_tokens(page: Any, trace: list[str]) -> None:
    steps = steps_of(trace)
    read = """() => {
        const told = (within) => Object.fromEntries([...document.querySelectorAll(within)].map(
            (node) => [node.dataset.request, [node.dataset.numTokens, node.dataset.phase]]));
        const [step, budget] = [document.querySelector(".tl-sr"), document.querySelector("[data-budget]")];
        const numbers = [step.dataset.timelineStep, budget.dataset.budget];
        return [told(".tl-budget [data-request]"), told(".tl-sr [data-num-tokens]"), numbers];
    }"""
    for step, (bar, timeline, numbers) in zip(steps[::9], read_at(page, range(0, len(steps), 9), read), strict=True):
        shares = {share["request_id"]: [str(share["num_tokens"]), share["phase"]] for share in step["scheduled"]}
        assert bar == timeline == shares
        assert numbers == [str(step["step"]), "40"]


def test_tables_and_tokens_hold_the_tables_and_the_text_of_the_trace(page: Any, trace: list[str]) -> None:
    k = 40
    show(page, k)
    steps = steps_of(trace)[: k + 1]
    arrivals = [line for line in map(json.loads, trace) if line["event"] == "arrival"]
    for arrival in arrivals:
        name = arrival["request_id"]
        row = page.locator(f"[data-view=tokens] [data-request='{name}'] .tl-text")
        shares = [share for step in steps for share in step["scheduled"] if share["request_id"] == name]
        sampled = [text for share in shares for text in share.get("text", ())]
        assert row.text_content() == "".join(arrival["prompt_text"] + sampled)
    tables = "rows => Object.fromEntries(rows.map((r) => [r.dataset.request, r.dataset.table.split(' ').map(Number)]))"
    shown = page.eval_on_selector_all("[data-view=tables] [data-table]", tables)
    assert shown == json.loads(page.evaluate("view.state.canonical()"))["tables"]


def test_text_with_markup_is_shown_as_text(page: Any, trace: list[str]) -> None:
    show(page, 70)
    text = page.locator("[data-view=tokens] [data-request=hostile] .tl-text").text_content()
    assert text.startswith("<script>window.hacked = 1</script> <img")
    assert page.evaluate("window.hacked") is None
    assert page.locator("#view script, #view img").count() == 0


def test_keys_step_play_and_jump_but_not_while_somebody_types(page: Any, trace: list[str]) -> None:
    last = len(steps_of(trace)) - 1
    page.keyboard.press("End")
    assert step_index(page) == last
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert step_index(page) == 1
    page.evaluate("document.body.prepend(document.createElement('input'))")
    page.locator("body > input").click()
    page.keyboard.press("ArrowRight")
    page.keyboard.type(" ")
    assert step_index(page) == 1
    assert page.get_attribute("[data-action=play]", "data-playing") == "false"
    page.locator("body > input").evaluate("node => node.remove()")
    page.keyboard.press("Space")
    page.wait_for_function("view.k >= 4")
    page.keyboard.press("Space")
    assert page.get_attribute("[data-action=play]", "data-playing") == "false"


def test_it_plays_at_its_speed_until_it_is_paused_however_often_play_was_pressed(
    open_exported: Callable[..., Any], trace: list[str]
) -> None:
    page = open_exported(trace)
    page.clock.install(time=0)
    page.clock.pause_at(1000)  # from here on time passes when it is told to
    page.evaluate("view.show(0)")
    page.evaluate("for (let i = 0; i < 7; i++) view.transport.toggle();")
    page.clock.run_for(1000)
    assert 9 <= step_index(page) <= 10  # ten a second
    page.keyboard.press("Space")
    k = step_index(page)
    page.clock.run_for(1000)
    assert step_index(page) == k


def test_space_plays_after_a_button_was_clicked_and_presses_one_that_the_keyboard_reached(page: Any) -> None:
    page.click("[data-action=forward]")
    page.keyboard.press("Space")
    assert page.get_attribute("[data-action=play]", "data-playing") == "true"
    page.keyboard.press("Space")
    k = page.evaluate("view.k")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.evaluate("view.k") == k + 1
    assert page.get_attribute("[data-action=play]", "data-playing") == "false"


def test_blocks_can_be_walked_through_and_followed_by_keyboard(page: Any) -> None:
    page.evaluate("view.show(20)")
    page.evaluate("view.pool.cells[0].focus({ focusVisible: true })")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.block") == "2"
    assert page.locator("[data-card=block]").get_attribute("data-card-id") == "2"
    page.keyboard.press("Enter")
    assert page.get_attribute("[data-block='2']", "aria-pressed") == "true"
    assert page.evaluate("view.k") == 20
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("view.k") == 21


def test_a_click_on_a_column_of_the_timeline_goes_to_its_step_on_both_axes(page: Any) -> None:
    for axis in ("ms", "steps"):
        show(page, 0)
        page.click(f"[data-axis={axis}]")
        left, width = page.evaluate("view.batch.span(9)")
        # Into sight, however long the steps before it took.
        scrolled = (
            "(x) => { const it = document.querySelector('.tl-scroller'); it.scrollLeft = x; return it.scrollLeft; }"
        )
        left -= page.evaluate(scrolled, max(left - 40, 0))
        page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        page.click(".tl-scroller", position={"x": 84 + left + min(width / 2, 20), "y": 60})
        assert step_index(page) == 9


def test_the_scrub_bar_goes_to_any_step(page: Any) -> None:
    page.locator("[data-action=scrub]").fill("33")
    assert step_index(page) == 33


def test_a_page_from_disk_runs_no_text_of_its_trace_follows_the_systems_colors_and_draws_metrics_once_they_are_seen(
    open_exported: Callable[..., Any], trace: list[str]
) -> None:
    page = open_exported(trace, color_scheme="dark")
    assert page.evaluate("window.hacked") is None
    back = "getComputedStyle(document.querySelector('.teachllm')).backgroundColor"
    dark = page.evaluate(back)
    page.evaluate("document.documentElement.dataset.theme = 'light'")
    assert page.evaluate(back) != dark
    page.locator("[data-view=metrics]").scroll_into_view_if_needed()
    page.wait_for_selector("[data-view=metrics] [data-drawn]")
    plots = page.locator("[data-view=metrics] [data-plot]:visible canvas")
    assert plots.count() == 5
    assert plots.first.bounding_box()["width"] > 100
    colors = """(canvas) => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const seen = new Set();
        for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200) seen.add(`${data.slice(i, i + 3)}`);
        return seen.size;
    }"""
    assert all(plot.evaluate(colors) > 2 for plot in plots.all())


def test_main_views_are_in_sight_at_1280_by_720_and_a_phone_needs_no_sideways_scrolling(page: Any) -> None:
    for name in ("pool", "batch", "step", "queue"):
        box = page.locator(f"[data-view={name}]").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 1280 and box["y"] + box["height"] <= 720
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    lefts = page.eval_on_selector_all("[data-view]", "views => views.map((v) => v.getBoundingClientRect().left)")
    assert len(set(lefts)) == 1


def test_live_buttons_call_the_engine_and_the_view_follows_until_it_is_scrubbed_back(
    page: Any, trace: list[str]
) -> None:
    page.evaluate(
        """(lines) => {
            view.destroy();
            window.calls = [];
            const call = (name) => async (...given) => void calls.push([name, ...given]);
            const live = { playing: false };
            for (const name of ["play", "pause", "step", "abort", "setSpeed"]) live[name] = call(name);
            window.live = teachllm.mount(document.getElementById("view"), { lines, live });
        }""",
        trace[:40],
    )
    page.click("[data-action=play]")
    page.evaluate("live.setLive({ playing: true })")
    page.click("[data-action=play]")
    page.keyboard.press("ArrowRight")
    abort = page.locator("[data-view=tokens] [data-abort]:visible").first
    name = abort.get_attribute("data-abort")
    abort.click()
    assert page.evaluate("calls") == [["play"], ["pause"], ["step"], ["abort", name]]
    page.evaluate("(lines) => live.push(lines)", trace[40:45])
    assert page.evaluate("live.k === live.timeline.last")
    page.locator("[data-action=scrub]").fill("3")
    page.evaluate("(lines) => live.push(lines)", trace[45:50])
    assert page.evaluate("live.k") == 3
    page.keyboard.press("End")
    page.evaluate("(lines) => live.push(lines)", trace[50:55])
    assert page.evaluate("live.k === live.timeline.last")


def test_two_views_in_one_page_do_not_disturb_each_other(page: Any, trace: list[str]) -> None:
    page.evaluate(
        """(lines) => {
            const second = document.createElement("div");
            document.body.append(second);
            window.other = teachllm.mount(second, { lines });
            view.show(10);
            other.show(20);
        }""",
        trace,
    )
    assert page.evaluate("[view.k, other.k]") == [10, 20]
    page.evaluate("other.root.dispatchEvent(new PointerEvent('pointerdown'))")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("[view.k, other.k]") == [10, 21]


def test_a_trace_that_breaks_off_shows_what_came_before_and_names_the_line(
    open_page: Callable[..., Any], trace: list[str]
) -> None:
    page = open_page([*trace[:30], trace[30][:50]])
    assert "line 31 of the trace" in page.locator(".tl-banner").inner_text()
    assert page.evaluate("view.timeline.lines.length") == 30
    assert page.locator("[data-block]").count() == 14


def test_a_trace_without_text_shows_its_structure(open_page: Callable[..., Any], trace: list[str]) -> None:
    bare = []
    for line in map(json.loads, trace):
        for entry in (line, *line.get("scheduled", ())):
            for name in ("prompt_token_ids", "prompt_text", "token_ids", "text"):
                entry.pop(name, None)
        bare.append(json.dumps(line))
    page = open_page(bare)
    show(page, 20)
    assert page.locator("[data-view=tables] [data-table]").count() > 0
    assert "·" in page.locator("[data-view=tokens] .tl-text").first.text_content()


def test_a_share_with_drafts_says_how_many_held_how_many_come_next_and_why(open_page: Callable[..., Any]) -> None:
    engine, lines = traced_engine(speculative_config=speculation("medusa", "qwen3", adaptive=False))
    engine.add_request("a", random_ids(5), SamplingParams(max_tokens=20, ignore_eos=True))
    drain(engine)
    with_drafts = next(i for i, line in enumerate(lines) if "num_draft" in line)
    lines[with_drafts] = lines[with_drafts].replace('"num_accepted":', '"num_proposed":2,"num_accepted":')
    page = open_page(lines)
    num_with_drafts = 0
    for k, step in enumerate(steps_of(lines)):
        (share,) = step["scheduled"]
        row = "const [row] = view.timeline.rows.values();"  # the batch has some once it was seen
        ask = f"(k) => {{ {row} return teachllm.cellCard(row, row.at(k), k, view.timeline); }}"
        facts = dict(page.evaluate(ask, k)["facts"])
        assert facts["drafts next"] == "{}: {}".format(*share["next_draft"])
        if "num_draft" in share:
            num_proposed = share.get("num_proposed", share["num_draft"])
            assert facts["drafts"] == f"{share['num_accepted']} of {num_proposed} accepted"
            num_with_drafts += 1
    assert num_with_drafts > 2
