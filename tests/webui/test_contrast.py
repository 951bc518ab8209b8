"""All that is written, in either theme, on the page and on its canvases, has the contrast that WCAG AA asks for.

What is dimmed on purpose does not count: steps to come, and what does not belong to what is pointed at.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from teachllm_webui.presets import PRESETS
from teachllm_webui.session import LiveSession
from tests.thorough import only_thorough
from tests.webui.conftest import DRAWN, mount_live
from tests.webui.contrast import INSTRUMENT, failing

pytestmark = pytest.mark.slow

SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])
FORMS = ("preset", "submit", "fork", "what_if")
WORSE = ".teachllm { --muted: light-dark(#8d949c, #6d7580); --edge: light-dark(#b9bec6, #4a5361); --wait: var(--back) }"


def look(page: Any, root: str = "document.body", view: str = "view") -> list[str]:
    """Return what has too little contrast on the page and on its canvases, where all was drawn since the last look."""
    page.evaluate(DRAWN)
    found = page.evaluate(f"[contrast.take(), contrast.domTexts({root}), contrast.controls({root})]")
    return failing([*(each for part in found for each in part), *page.evaluate(f"contrast.graphics({view})")])


def redraw(page: Any, view: str = "view") -> None:
    page.evaluate(f"{view}.theme.colors = {{}}; document.body.classList.toggle('other')")
    page.evaluate(f"{view}.settle(); dispatchEvent(new Event('beforeprint'))")


@SCHEMES
def test_an_exported_page_can_be_read_and_the_test_sees_a_color_that_is_worse(
    open_exported: Callable[..., Any], trace: list[str], scheme: str
) -> None:
    page = open_exported(trace, color_scheme=scheme, before=INSTRUMENT)
    page.click(".tl-about summary")
    page.evaluate("view.push(['{}']), dispatchEvent(new Event('beforeprint'))")  # a banner, and all charts
    page.evaluate(DRAWN)
    written = page.evaluate("contrast.take()")
    assert failing(written) == [] and {"tl-view-pool", "tl-view-batch", "tl-view-metrics"} <= {
        each["what"].split()[0] for each in written
    }
    steps = [json.loads(line) for line in trace if '"event":"step"' in line]
    shown = [
        next(k for k, step in enumerate(steps) if step["preempted"]),
        next(k for k, step in enumerate(steps) if step["waiting"] and step["blocks"]["cached"]),
        max(range(len(steps)), key=lambda k: steps[k]["blocks"]["used"]),
    ]
    for k in shown:
        page.evaluate("(k) => { view.show(k); view.settle(); }", k)
        assert look(page) == []
        labels = page.evaluate("view.pool.cells.filter((cell) => cell._look.owners.length).map((c) => c._look.label)")
        assert labels and all(labels)  # a color is never alone
    for selector in ("[data-block][data-state=used]", "[data-view=queue] [data-request]"):
        page.locator(selector).first.hover()
        page.wait_for_selector("[data-card]:visible")
        assert failing(page.evaluate("contrast.domTexts(view.card.root)")) == []
        page.mouse.move(0, 0)
    page.evaluate(f"{DRAWN}.then(() => contrast.take())")
    page.add_style_tag(content=WORSE)
    redraw(page)
    found = look(page)
    for kind in ("4.5: tl-view-batch canvas", "4.5: tl-about p", "3: the edge of tl-transport", "3: lines of wait"):
        assert any(kind in each for each in found), kind


@SCHEMES
def test_the_live_page_and_its_forms_can_be_read(
    open_exported: Callable[..., Any], trace: list[str], scheme: str
) -> None:
    page = open_exported(trace, color_scheme=scheme, before=INSTRUMENT)
    words = {"title": "A title", "look_at": "Look at this.", "error": "It has failed.", "titles": ["one", "other"]}
    mount_live(page, [trace, trace], is_fork=True, since=10, **words)
    page.evaluate("livePage.views[0].show(14)")
    page.evaluate("void livePage._confirm('Replace it?')")
    assert look(page, view="livePage.views[0]") == []
    for name in FORMS:
        page.click(f"[data-open={name}]")
        page.evaluate("livePage.fork.say('It is refused.')")
        assert look(page, view="livePage.views[0]") == []
        page.keyboard.press("Escape")


@only_thorough
def test_all_presets_on_the_real_page_can_be_read(
    gradio: Any, open_watched: Callable[..., Any], session: LiveSession
) -> None:
    from teachllm_webui.page import launch

    up = launch(session)
    own = (up.url, up.url.replace("127.0.0.1", "localhost"))
    page = open_watched(up.url, own, ("log", "info", "debug", "warning"), before=INSTRUMENT)
    session.set_speed(None)
    for each in PRESETS:
        session.start_preset(each)
        page.wait_for_function(f"globalThis.livePage?.now.preset === '{each.name}' && livePage.now.is_done")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.evaluate(f"{DRAWN}.then(() => contrast.take())")
            for k in range(0, page.evaluate("livePage.views[0].timeline.last"), 7):
                page.evaluate("(k) => { livePage.views[0].show(k); livePage.views.forEach((v) => v.settle()); }", k)
                page.evaluate("dispatchEvent(new Event('beforeprint'))")
                for side in range(len(session.runs)):
                    assert look(page, view=f"livePage.views[{side}]") == [], (each.name, scheme, k)
            for name in FORMS:
                page.click(f"[data-open={name}]")
                assert look(page, view="livePage.views[0]") == [], (each.name, scheme, name)
                page.keyboard.press("Escape")
    page.goto("about:blank")
    up.close()
