"""Make docs/viz/*.png: a step of each preset of `teachllm viz` that shows its point, light and dark.

.venv/bin/python docs/make_viz_pictures.py [NAME ...]

Without names, all presets and the fork. It needs a Chromium.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from teachllm_webui.page import launch
from teachllm_webui.presets import PRESETS, preset
from teachllm_webui.session import LiveSession

FOLDER = Path(__file__).with_name("viz")
FORKED, FORK_AT, FORK = "priorities", 20, {"max_num_seqs": 8}  # the picture called "fork"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    session = LiveSession()
    page = launch(session)
    try:
        with tabs(page.url) as pages:
            for name in sys.argv[1:] or [*(each.name for each in PRESETS), "fork"]:
                run(session, name)
                for scheme, tab in pages.items():
                    shoot(tab, session, name, FOLDER / f"{name}-{scheme}.png")
    finally:
        page.close()


@contextmanager
def tabs(url: str) -> Iterator[dict[str, Any]]:
    """One tab in light colours and one in dark."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        pages = {}
        for scheme in ("light", "dark"):
            pages[scheme] = browser.new_page(viewport={"width": 1280, "height": 720}, color_scheme=scheme)
            pages[scheme].goto(url)
        yield pages
        browser.close()


def run(session: LiveSession, name: str) -> None:
    """To its end, so that a picture can be of any step."""
    session.set_speed(None)
    replace(session, lambda: session.start_preset(preset(FORKED if name == "fork" else name)))
    wait_for(lambda: all(run.is_done for run in session.runs))
    if name == "fork":
        replace(session, lambda: session.fork(FORK_AT, FORK))
        session.play()
        wait_for(lambda: all(run.is_done for run in session.runs))


def replace(session: LiveSession, order: Callable[[], None]) -> None:
    before = session.generation
    order()
    wait_for(lambda: session.generation > before)


def shoot(tab: Any, session: LiveSession, name: str, target: Path) -> None:
    counts = [sum(line.startswith('{"event":"step"') for line in side.log.upto()) for side in session.sides]
    shown = "([generation, counts]) => livePage.generation === generation && livePage.now.is_done"
    shown += " && counts.every((n, i) => livePage.views[i]?.timeline.steps.length === n)"
    tab.wait_for_function(shown, arg=[session.generation, counts])
    tab.mouse.move(0, 0)
    step = FORK_AT + 12 if name == "fork" else preset(name).show_at
    tab.evaluate("(k) => { livePage.views[0].goTo(k); livePage.views.forEach((view) => view.settle()); }", step)
    tab.wait_for_timeout(900)  # the figures that compare two sides come a moment later
    tab.screenshot(path=target)
    print(f"wrote {target}")


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("a preset does not end")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
