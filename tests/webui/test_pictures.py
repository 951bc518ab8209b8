"""What the page shows is true, and what it offers works: each of these was wrong once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.webui.conftest import DRAWN, boxes, export

Lines = list[str]


def changed(trace: Lines, event: str, change: Callable[[dict[str, Any]], None], last: bool = True) -> Lines:
    """The trace with one line, or all lines, of a kind changed."""
    lines = [json.loads(line) for line in trace]
    found = [line for line in lines if line["event"] == event]
    for line in found[-1:] if last else found:
        change(line)
    return [json.dumps(line) for line in lines]


def mount(page: Any, lines: Lines, options: str = "{}") -> None:
    page.evaluate(
        f"""(lines) => {{
            for (const name of ["view", "live", "other"]) window[name]?.destroy();
            delete window.live, delete window.other;
            document.body.innerHTML = '<main id="view"></main>';
            window.calls = [];
            const call = (name) => async (...given) => void calls.push([name, ...given]);
            const buttons = Object.fromEntries(["play", "pause", "step", "abort", "setSpeed"].map((n) => [n, call(n)]));
            window.view = teachllm.mount(document.getElementById("view"), {{ lines, ...{options} }});
        }}""",
        lines,
    )
    page.evaluate(DRAWN)


LIVE = "{ live: { playing: false, done: %s, ...buttons } }"


def with_roofline(trace: Lines) -> Lines:
    """The trace of a machine with ceilings, whose last step was faster than they allow."""

    def beat(step: dict[str, Any]) -> None:
        step["roofline"] = {"num_bytes": 9e9, "num_flops": 1e9, "seconds": 0.5, "floor": 0.9, "bound": "bandwidth"}

    def machine(header: dict[str, Any]) -> None:
        header["machine"] = {"device": "x", "ceilings": {"read_bandwidth": 1e10, "gemm_flops": 1e12}}

    return changed(changed(trace, "step", beat), "header", machine)


def test_no_step_is_faster_than_its_ceilings(page: Any, trace: Lines) -> None:
    mount(page, with_roofline(trace))
    page.evaluate("view.show(view.timeline.last), view.settle()")
    text = page.locator(".tl-roofline").inner_text()
    assert "floor 100 %" in text and "900" not in text
    shares = page.eval_on_selector_all(".tl-roofline i", "bars => bars.map((bar) => bar._set['--share'])")
    assert max(shares) == 1 and shares[2] == 1


def test_equal_memory_has_equal_areas_in_pools_that_are_compared(page: Any) -> None:
    def header(num_blocks: int, block_size: int) -> str:
        config = {"block_size": block_size, "max_num_batched_tokens": 64, "scheduling_policy": "fcfs"}
        line = {"event": "header", "version": 1, "time": 0, "num_blocks": num_blocks, "model": {}, "config": config}
        return json.dumps(line)

    areas = page.evaluate(
        """(sides) => {
            window.view?.destroy();
            const main = (id) => `<main id="${id}" style="width: 600px"></main>`;
            document.body.innerHTML = main("view") + main("b");
            const scale = new teachllm.PoolScale();
            window.view = teachllm.mount(document.getElementById("view"), { lines: [sides[0]] });
            window.other = teachllm.mount(document.getElementById("b"), { lines: [sides[1]] });
            for (const each of [view, other]) scale.add(each.pool);
            for (const each of [view, other]) each.redraw(each.pool), each.pool.fit();
            return [view, other].map(({ pool }) => pool.cells.length * pool._size ** 2);
        }""",
        [header(3, 128), header(24, 16)],
    )
    assert areas[0] == pytest.approx(areas[1]) and areas[0] > 10_000


def test_an_enlarged_panel_is_filled_and_closed_by_the_mouse(page: Any) -> None:
    before = page.evaluate("view.pool._size")
    page.click("[data-view=pool] [data-action=grow]")
    page.wait_for_function(f"view.pool._size > {before}")
    panel = page.locator("[data-view=pool]")
    box, cells = panel.bounding_box(), page.evaluate("view.pool.cells.length * view.pool._size ** 2")
    assert box["width"] > 1200 and cells > 0.5 * box["width"] * box["height"]
    page.locator("[data-block='0']").hover()
    page.wait_for_selector("[data-card=block]:visible")
    assert page.evaluate("view.card.root.closest('.tl-grown') !== null")
    page.click("[data-view=pool] [data-action=grow]")
    page.wait_for_function(f"view.pool._size === {before}")
    assert "tl-grown" not in (panel.get_attribute("class") or "")
    page.click("[data-view=tokens] [data-action=grow]")
    inside = "document.activeElement === document.body || document.activeElement.closest('.tl-grown') !== null"
    for _ in range(30):  # more than the toolbar and the heads of the other panels have
        page.keyboard.press("Tab")
        assert page.evaluate(inside)
    page.keyboard.press("Escape")
    assert page.locator(".tl-grown").count() == page.locator("[inert]").count() == 0


def test_a_run_that_has_ended_is_played_again_and_opens_where_most_is_in_use(page: Any, trace: Lines) -> None:
    mount(page, trace, LIVE.replace("} }", "}, opensAt: 'best' }") % "true")
    used = page.evaluate("view.timeline.steps.map((step) => step.blocks.used)")
    assert used[page.evaluate("view.k")] == max(used) > 0
    page.evaluate("view.transport.setSpeed(60)")
    page.evaluate("view.show(view.timeline.last)")
    page.evaluate("calls.length = 0")
    page.click("[data-action=play]")
    page.wait_for_function("view.k > 2 && view.k < view.timeline.last")
    page.click("[data-action=play]")
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("[view.k === view.timeline.last, calls.length]") == [True, 0]
    page.evaluate("view.show(2)")
    page.evaluate("view.setLive({ done: false, playing: true })")  # a prompt was sent
    assert page.evaluate("[view.k === view.timeline.last, view.following]") == [True, True]


def test_requests_that_have_ended_cannot_be_aborted(page: Any, trace: Lines) -> None:
    mount(page, trace[:40], LIVE % "false")
    page.wait_for_selector("[data-action=abort]:visible")
    mount(page, trace, LIVE % "true")
    page.evaluate("view.show(10)")
    page.evaluate("view.settle()")
    assert page.locator("[data-action=abort]:visible").count() == 0


def test_a_running_request_that_got_nothing_has_a_reason(page: Any, trace: Lines) -> None:
    steps = [json.loads(line) for line in trace if '"event":"step"' in line]
    names = [each["request_id"] for each in steps[-1]["scheduled"]]

    def hold(step: dict[str, Any]) -> None:
        step["scheduled"] = []
        step["held"] = {name: ["token_budget", "needs 1 token of the step's budget, 0 left"] for name in names}
        step["finished"] = {}

    mount(page, changed(trace, "step", hold))
    cell = page.evaluate(
        "(id) => { const row = view.timeline.rows.get(id); return row.at(view.timeline.last); }", names[0]
    )
    assert (cell["kind"], cell["reason"]) == ("running", "token_budget") and "0 left" in cell["words"]
    card = page.evaluate(
        """(id) => {
            const { timeline } = view;
            const row = timeline.rows.get(id);
            return teachllm.cellCard(row, row.at(timeline.last), timeline.last, timeline).facts;
        }""",
        names[0],
    )
    assert card[1] == ["got nothing", "needs 1 token of the step's budget, 0 left"]


def test_a_card_goes_with_a_step_by_key_and_a_pointer_at_rest_opens_none(page: Any, trace: Lines) -> None:
    page.evaluate("view.show(20)")
    box = page.locator("[data-block='0']").bounding_box()
    at = (round(box["x"] + box["width"] / 2), round(box["y"] + box["height"] / 2))
    page.mouse.move(*at)
    page.wait_for_selector("[data-card=block]:visible")
    page.keyboard.press("ArrowRight")
    assert page.locator("[data-card]:visible").count() == 0
    # As browsers do when something else has come under a pointer that has not moved.
    over = """(at) => {
        const event = new PointerEvent("pointerover", { clientX: at[0], clientY: at[1], bubbles: true });
        view.pool.cells[0].dispatchEvent(event);
        return view.hoveredBlock;
    }"""
    assert page.evaluate(over, at) is None
    assert page.evaluate(over, (at[0] + 3, at[1] + 3)) == 0
    mount(page, trace)  # another run in its place, under a pointer that has not moved
    page.evaluate("view.show(20)")
    assert page.evaluate(over, at) is None and page.locator("[data-card]:visible").count() == 0


def test_a_block_tells_who_wrote_it_and_when_it_was_last_read(page: Any) -> None:
    facts = page.evaluate(
        """() => {
            const frame = (k) => { view.show(k); return view._frame(); };
            const of = (id, k) => Object.fromEntries(teachllm.blockCard(id, frame(k)).facts);
            const last = view.timeline.last;
            const { blocks } = frame(last).state;
            const written = blocks.findIndex((block) => block.writer && !block.users.length);
            const used = frame(25).state.blocks.findIndex((block) => block.users.length);
            return [of(written, last), of(used, 25), view.timeline.steps[25].step];
        }"""
    )
    written, used, number = facts
    assert " = " in written["written by"]
    assert used["last use"] == f"step {number}"


def test_a_pool_that_is_hardly_used_is_no_wall_of_dots(page: Any, trace: Lines) -> None:
    mount(page, changed(trace, "header", lambda header: header.update(num_blocks=5461, is_partial=True)))
    page.evaluate("view.show(10)")
    assert page.locator("[data-block]").count() == 64
    assert "5397 further blocks not shown" in page.locator("[data-free-list].tl-next").inner_text()
    assert page.evaluate("view.pool._size") > 20


def test_a_step_is_told_to_those_who_listen(page: Any) -> None:
    page.evaluate("view.show(20)")
    page.evaluate("view.settle()")
    number = page.evaluate("view.timeline.steps[20].step")
    told = page.locator("[data-told]")
    assert told.get_attribute("aria-live") == "polite"
    assert told.inner_text().startswith(f"Step {number}: ") and "blocks in use" in told.inner_text()


def test_the_wheel_goes_on_scrolling_the_page_over_a_panel(page: Any) -> None:
    page.set_viewport_size({"width": 800, "height": 600})
    wheel = """() => {
        const panel = document.querySelector("[data-view=tokens] .tl-scroll");
        const event = new WheelEvent("wheel", { deltaY: 90, bubbles: true, cancelable: true });
        panel.dispatchEvent(event);
        return event.defaultPrevented;
    }"""
    page.wait_for_timeout(500)
    assert page.evaluate(wheel) is False  # it scrolls the panel
    page.evaluate("new Promise((done) => { addEventListener('scroll', done, { once: true }); scrollBy(0, 40); })")
    assert page.evaluate(wheel) is True


def test_forced_colours_leave_the_pictures_theirs(open_exported: Callable[..., Any], trace: Lines) -> None:
    page = open_exported(trace, forced_colors="active")
    colors = page.evaluate("view.theme.colors")
    assert len({colors[name] for name in ("panel", "ink", "wait", "alarm", "accent")}) == 5


def test_forced_colours_leave_what_they_mean_to_bars_and_show_what_is_pressed(
    open_exported: Callable[..., Any], trace: Lines
) -> None:
    page = open_exported(with_roofline(trace), forced_colors="active")
    page.evaluate("view.show(view.timeline.last), view.settle()")
    color = "(node) => getComputedStyle(node).backgroundColor"
    grounds = {page.locator(".tl-panel").first.evaluate(color), "rgba(0, 0, 0, 0)"}
    page.wait_for_selector(".tl-plot-cursor", state="attached")
    for kept in (".tl-roofline i", ".tl-parts i", ".tl-times span", ".tl-plot-cursor", "[data-axis=steps]"):
        nodes = page.locator(kept)
        assert nodes.count() and not grounds & set(nodes.evaluate_all(f"all => all.map({color})")), kept
    pressed, other = (page.locator(f"[data-axis={name}]").evaluate(color) for name in ("steps", "ms"))
    assert pressed != other


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_printed_has_all_panels(open_exported: Callable[..., Any], trace: Lines, scheme: str) -> None:
    page = open_exported(trace, color_scheme=scheme)
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    inked = """(canvas) => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return new Set(Array.from({ length: data.length / 4 }, (_, i) => data.slice(4 * i, 4 * i + 3).join())).size;
    }"""
    page.wait_for_function("document.querySelectorAll('[data-plot] canvas').length === 5")
    page.evaluate(DRAWN)
    for canvas in page.locator("[data-plot] canvas, [data-view=batch] canvas, [data-view=pool] canvas").all():
        assert canvas.evaluate(inked) > 2


def test_what_is_printed_is_whole_and_in_its_colours(open_exported: Callable[..., Any], trace: Lines) -> None:
    page = open_exported(trace, viewport={"width": 1600, "height": 900})
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 720, "height": 1000})
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    for hidden in (".tl-veil", ".tl-cursor", ".tl-buttons", ".tl-switch"):
        assert page.locator(hidden).first.is_hidden()
    for name in ("pool", "batch"):
        panel, picture, *_ = boxes(page, f"[data-view={name}], [data-view={name}] canvas")
        assert picture["right"] <= panel["right"] <= 720 and picture["bottom"] <= panel["bottom"]
        assert picture["height"] > 50
    ways = ".tl-chip, .tl-swatch, .tl-text span, .tl-times span"
    exact = page.eval_on_selector_all(ways, "all => all.map((one) => getComputedStyle(one).printColorAdjust)")
    assert set(exact) == {"exact"}
    labels = """() => {
        const { plot, gutter, GUTTER } = view.batch.painter;
        const of = (context) => [...context.getImageData(0, 0, GUTTER, 60).data].join();
        return of(plot) === of(gutter);
    }"""
    assert page.evaluate(labels)


def test_a_picture_of_the_whole_page_has_its_block_tables(page: Any) -> None:
    page.evaluate("view.show(12), view.settle()")
    rows = page.locator("[data-view=tables] .tl-table")
    assert rows.count() > 2 and rows.first.bounding_box()["y"] >= 720  # out of sight
    drawn = "rows => rows.every((row) => row.lastChild.lastChild.checkVisibility({ contentVisibilityAuto: true }))"
    assert rows.evaluate_all(drawn)


def test_an_exported_page_says_what_it_is_of_and_is_small(open_exported: Callable[..., Any], trace: Lines) -> None:
    page = open_exported(trace, title="Two <b>runs</b>")
    about = page.locator(".tl-about")
    assert about.locator("h1").inner_text() == "Two <b>runs</b>"
    text = about.locator("[data-about]").inner_text()
    for words in ("teachlm", "14 blocks of 16 tokens", "token budget 40", "at most 5 requests at once", "policy fcfs"):
        assert words in text
    about.locator("summary").click()
    assert "max_num_batched_tokens" in about.locator("dl").inner_text()


def test_the_exported_page_of_a_trace_is_under_600_kilobytes(trace: Lines, tmp_path: Any) -> None:
    export(trace, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 600_000


def test_priorities_are_shown_where_they_count_zero_too(page: Any, trace: Lines) -> None:
    facts = """() => {
        view.show(6), view.settle();
        const [id] = view.state.live;
        const card = Object.fromEntries(teachllm.requestCard(id, view._frame()).facts);
        const words = [...view.root.querySelectorAll(".tl-words")].map((node) => node.textContent);
        return [card.priority ?? null, ...words];
    }"""
    priority, *waits = page.evaluate(facts)
    assert priority is None and waits and not any("priority" in text for text in waits)
    with_policy = changed(trace, "header", lambda header: header["config"].update(scheduling_policy="priority"))
    mount(page, with_policy)
    priority, *waits = page.evaluate(facts)
    assert priority == "0" and all(text.endswith("(priority 0)") for text in waits)


def test_legends_name_all_marks_and_a_card_says_positions(page: Any, trace: Lines) -> None:
    def speculate(header: dict[str, Any]) -> None:
        header["config"]["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 4}

    drafts = page.locator("text=2/4: accepted of drafted")
    assert drafts.is_hidden()
    mount(page, changed(trace, "header", speculate))
    assert drafts.is_visible()
    legends = page.locator(".tl-legend").all_inner_texts()
    for words in ("just taken", "just found in the cache"):
        assert any(words in legend for legend in legends)
    told = page.evaluate(
        """() => {
            const { timeline } = view;
            const [row] = timeline.rows.values();
            const of = (scheduled) => teachllm.cellCard(row, { scheduled }, 5, timeline).facts[1][1];
            return [1, 3].map((n) => of({ phase: "decode", start: 361, num_tokens: n }));
        }"""
    )
    assert told == ["1 token, at position 361", "3 tokens, at positions 361 to 363"]


def test_drafts_and_the_first_time_can_be_read(open_exported: Callable[..., Any], trace: Lines) -> None:
    """Numbers of drafts lie on a ground of their own, and no time of the axis under the labels of the rows."""

    def draft(step: dict[str, Any]) -> None:
        step["scheduled"][0] |= {"num_draft": 4, "num_accepted": 2, "num_tokens": 5}

    page = open_exported(trace)
    page.evaluate(
        """() => {
            window.drawn = [];
            const { fillText, fillRect } = CanvasRenderingContext2D.prototype;
            CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
                drawn.push({ text, x, y, canvas: this.canvas, fill: this.fillStyle });
                return fillText.apply(this, arguments);
            };
            CanvasRenderingContext2D.prototype.fillRect = function (x, y, w, h) {
                drawn.push({ x, y, w, h, canvas: this.canvas, fill: this.fillStyle });
                return fillRect.apply(this, arguments);
            };
        }"""
    )
    mount(page, changed(trace, "step", draft))
    page.evaluate("view.show(view.timeline.last), view.batch.scale.set({ cellWidth: 40 })")
    page.wait_for_function("drawn.some(({ text }) => text === '+2/4')")
    under = page.evaluate(
        """() => {
            const at = drawn.findIndex(({ text }) => text === "+2/4");
            const { w, fill } = drawn[at - 1];
            return [w > 20, fill, drawn[at].fill];
        }"""
    )
    assert under[0] and under[1] != under[2]
    page.evaluate("drawn.length = 0, view.batch.scale.set({ axis: 'ms' }), view.show(30)")
    page.wait_for_function("drawn.some(({ text }) => text?.endsWith('s'))")
    begins = page.evaluate("drawn.filter(({ text, y }) => text?.endsWith('s') && y === 8).map(({ x }) => x)")
    assert min(begins) >= 84
