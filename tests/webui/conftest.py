"""What the tests of the page share: a trace of a real run, a browser, and a page that may not complain or call out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
SHARED = "You are a patient teacher. Answer in short and simple sentences, and give one example. "
HOSTILE = "<script>window.hacked = 1</script> <img src=x onerror='window.hacked = 1'>"


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


def find_chromium() -> str | None:
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


def install_chromium() -> str | None:
    """On Debian, as root: what a fresh container of a continuous check is. One process does it, the others wait."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return None
    with FileLock(Path(tempfile.gettempdir()) / "teachllm-chromium.lock"):
        for command in (["apt-get", "update"], ["apt-get", "install", "--yes", "--no-install-recommends", "chromium"]):
            if find_chromium() is None:
                subprocess.run(command, capture_output=True, timeout=300, check=False)
        return find_chromium()


@pytest.fixture(scope="module")  # not longer: while it is there, this thread has an event loop, and others want theirs
def browser() -> Iterator[Any]:
    path = find_chromium() or install_chromium()
    if path is None:
        assert os.environ.get("CI") != "true", "CI must have a Chromium: apt-get install chromium"
        pytest.skip("no Chromium: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'teachllm[dev]'")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_watched(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address in a tab of its own. At the end: no complaint on the console, no request to anywhere else."""
    complaints: list[str] = []
    contexts = []

    def open_(url: str, own: tuple[str, ...], quiet: tuple[str, ...] = (), **options: Any) -> Any:
        """`own` begins what the page may ask for; `quiet` are kinds of console messages that are no complaint."""
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 720}} | options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: m.type in quiet or complaints.append(f"console: {m.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: (
                request.url.startswith((*own, "data:", "blob:")) or complaints.append(f"request: {request.url}")
            ),
        )
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def open_page(open_watched: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Opens lines as an exported page from disk."""
    from teachllm_webui.export import html_page

    def open_(lines: list[str], **options: Any) -> Any:
        path = tmp_path / f"page-{len(list(tmp_path.iterdir()))}.html"
        path.write_text(html_page(lines, "a trace"), encoding="utf-8")
        page = open_watched(path.as_uri(), ("file:",), **options)
        page.wait_for_selector("[data-teachllm][data-step-index]", state="attached")
        return page

    return open_


@pytest.fixture
def page(open_page: Callable[..., Any], trace: list[str]) -> Any:
    return open_page(trace)
