"""What the tests of the page share: a trace of a real run, a browser, and a page that may not complain or call out."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.waiting import HANG_SECONDS
from tests.webui.trace_server import serve  # noqa: F401

SIZE = {"width": 1280, "height": 720}
# Two frames later all that is in sight is known to be, and drawn.
DRAWN = "new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
SHARED = "You are a patient teacher. Answer in short and simple sentences, and give one example. "
HOSTILE = "<script>window.hacked = 1</script> <img src=x onerror='window.hacked = 1'>"


@pytest.fixture(scope="session")
def gradio() -> Any:
    """Import it where a test needs it, without the stubs that it would write beside each of its components."""
    with mock.patch.object(inspect, "getfile", side_effect=OSError):
        return pytest.importorskip("gradio", reason="no gradio: pip install 'teachllm[ui]'")


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """Make runs of an engine that begin paused; close them at the end."""
    from teachllm_webui.live import LiveRun
    from teachllm_webui.plan import PlannedRequest, engine_plan
    from tests.webui.runs import CONFIG

    runs = []

    def make_(*planned: PlannedRequest) -> LiveRun:
        runs.append(LiveRun(engine_plan(CONFIG, planned)))
        return runs[-1]

    yield make_
    for run in runs:
        run.close()


@pytest.fixture
def session() -> Iterator[Any]:
    from teachllm_webui.session import LiveSession

    found = LiveSession()
    yield found
    found.close()


@pytest.fixture(scope="session")
def trace() -> list[str]:
    """Of a small pool: requests that share a prefix, three completions of one, preemptions, an abort, hostile text."""
    from teachllm.config import EngineConfig
    from teachllm.engine.llm_engine import Engine
    from teachllm.sampling_params import SamplingParams

    lines: list[str] = []
    limits = {"num_gpu_blocks_override": 14, "max_num_seqs": 5, "max_num_batched_tokens": 40, "max_model_len": 128}
    config = EngineConfig(model="teachlm", device="cpu", async_scheduling=False, **limits)
    engine = Engine(config, trace_sink=lines.append)
    for i, question in enumerate(["What is a KV cache?", "What is a token?", "What is preemption?", "What is a GPU?"]):
        params = SamplingParams(max_tokens=24 + 6 * i, n=3 if i == 1 else 1, seed=i, ignore_eos=True)
        engine.add_request(f"request-{i}", SHARED + question, params)
    engine.add_request("hostile", HOSTILE, SamplingParams(max_tokens=8, ignore_eos=True, seed=5))
    engine.add_request("aborted", "What is attention?", SamplingParams(max_tokens=60, ignore_eos=True, seed=6))
    while engine.has_unfinished_requests:
        engine.step()
        if len(lines) == 60:
            engine.abort_request("aborted")
    events = [json.loads(line) for line in lines]
    assert any(e.get("preempted") for e in events), "the pool is too large for what these tests are about"
    assert any(b[0] == "hit" for e in events for b in e.get("block_events", ()))
    return lines


class Watched:
    """A tab that may neither complain nor ask for anything elsewhere.

    Attributes:
        complaints: Messages on its console, errors, and requests to anywhere else.
    """

    def __init__(
        self, browser: Any, own: tuple[str, ...], quiet: tuple[str, ...] = (), before: str = "", **options: Any
    ) -> None:
        """Open it.

        Args:
            own: begins what the page may ask for.
            quiet: kinds of console messages that are no complaint.
            before: a script that runs before the page's own.
        """
        self.complaints: list[str] = []
        self.context = browser.new_context(**{"viewport": SIZE} | options)
        self.context.set_default_timeout(1000 * HANG_SECONDS)
        self.context.add_init_script(before)
        self.page = self.context.new_page()
        self.page.on("console", lambda m: m.type in quiet or self.complaints.append(f"console: {m.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on(
            "request",
            lambda request: (
                request.url.startswith((*own, "data:", "blob:")) or self.complaints.append(f"request: {request.url}")
            ),
        )

    def close(self) -> None:
        self.context.close()
        assert self.complaints == []


@pytest.fixture
def open_watched(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address in a tab of its own. At the end: no complaint on the console, no request to anywhere else."""
    opened: list[Watched] = []

    def open_(url: str, own: tuple[str, ...], quiet: tuple[str, ...] = (), **options: Any) -> Any:
        opened.append(Watched(browser, own, quiet, **options))
        opened[-1].page.goto(url)
        return opened[-1].page

    yield open_
    for tab in opened:
        tab.close()


def export(lines: list[str], path: Path, title: str = "a trace") -> str:
    """Write lines as an exported page; return its address."""
    from teachllm_webui.export import html_page

    path.write_text(html_page(lines, title), encoding="utf-8")
    return path.as_uri()


def boxes(page: Any, selector: str) -> list[dict[str, float]]:
    """Return the bounding boxes of all matches at one moment, so that no relayout falls between two of them."""
    found: list[dict[str, float]] = page.eval_on_selector_all(
        selector, "nodes => nodes.map((node) => node.getBoundingClientRect().toJSON())"
    )
    return found


def mount_live(page: Any, sides: list[list[str]], **status: Any) -> None:
    """Show traces in the place of an exported page's view as the live page does, with a server that has no more."""
    from teachllm_webui.page import LIVE_SCRIPTS, LIVE_VIEW
    from teachllm_webui.presets import PRESETS
    from teachllm_webui.timeline import Status
    from teachllm_webui.what_if import WhatIf

    presets = [{"name": p.name, "title": p.title, "look_at": p.look_at} for p in PRESETS]
    told = {"home": "a run", "presets": presets, "what_if": {"defaults": asdict(WhatIf()), "models": ["one"]}}
    now = {"is_done": True, "is_live": True, "can_fork": True, "sides_done": [True] * len(sides)} | status
    page.add_style_tag(content=(LIVE_VIEW / "live.css").read_text())
    for name in LIVE_SCRIPTS:
        page.add_script_tag(content=(LIVE_VIEW / name).read_text())
    page.evaluate(
        """([lines, told, now]) => {
            view.destroy();
            const answer = { generation: 1, status: 1, lines, now };
            const news = async ({ generation }) => generation === 1 ? new Promise(() => {}) : answer;
            window.orders = [];
            const drive = async ({ action }) => (orders.push(action), window.answer ?? {});
            teachllm.mountLive(document.getElementById("view"), { news, drive }, told);
        }""",
        [sides, told, asdict(Status(**now))],
    )
    page.wait_for_function("livePage.views.length && livePage.views.every((view) => view.k > 0)")


@pytest.fixture
def open_exported(open_watched: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Opens lines as an exported page from disk, in a tab of its own."""

    def open_(lines: list[str], title: str = "a trace", **options: Any) -> Any:
        address = export(lines, tmp_path / f"page-{len(list(tmp_path.iterdir()))}.html", title)
        page = open_watched(address, ("file:",), **options)
        page.wait_for_selector("[data-teachllm][data-step-index]", state="attached")
        return page

    return open_


@pytest.fixture(scope="module")
def tab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """One tab with an exported page, in which the tests of a module show one trace after the other."""
    tab = Watched(browser, ("file:",))
    tab.page.goto(export([], tmp_path_factory.mktemp("tab") / "page.html"))
    yield tab
    tab.close()


@pytest.fixture
def open_page(tab: Watched) -> Iterator[Callable[..., Any]]:
    """Shows lines in the module's tab, as they are shown by an exported page that was just opened."""

    def open_(lines: list[str]) -> Any:
        tab.page.set_viewport_size(SIZE)
        tab.page.mouse.move(0, 0)
        tab.page.evaluate(
            """(lines) => {
                for (const name of ["view", "live", "other"]) window[name]?.destroy();
                delete window.live, delete window.other;
                document.body.innerHTML = '<main id="view"></main>';
                scrollTo(0, 0);
                window.view = teachllm.mount(document.getElementById("view"), { lines });
            }""",
            lines,
        )
        tab.page.wait_for_selector("[data-teachllm][data-step-index]", state="attached")
        tab.page.evaluate(DRAWN)
        return tab.page

    yield open_
    assert tab.complaints == []


@pytest.fixture
def page(open_page: Callable[..., Any], trace: list[str]) -> Any:
    return open_page(trace)
