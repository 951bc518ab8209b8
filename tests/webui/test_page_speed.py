"""How fast the page is, measured in the browser. A machine that others use as well disturbs, so the best of some tries
counts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from teachllm.config import EngineConfig
from teachllm.simulator.shapes import model_shape
from teachllm.simulator.simulate import simulate
from teachllm.simulator.workload import Workload
from teachllm_webui.presets import PRESETS
from teachllm_webui.session import LiveSession
from tests.thorough import times

pytestmark = pytest.mark.slow

# Plays from step 20 at 60 steps a second for two seconds: [steps gone, pictures drawn of them, seconds].
PLAY = """() => new Promise((done) => {
    const seen = new Set();
    const { transport } = view;
    view.show(20);
    transport.setSpeed(60);
    transport.toggle();
    requestAnimationFrame((begin) => {
        const first = view.k;
        const look = (now) => {
            seen.add(view.k);
            if (now - begin < 2000) return requestAnimationFrame(look);
            transport.stop();
            done([view.k - first, seen.size, (now - begin) / 1000]);
        };
        requestAnimationFrame(look);
    });
})"""


# Median milliseconds until a step's pictures are drawn and laid out.
COST = """() => {
    const times = [];
    view.show(20);
    for (let k = 21; k < 81; k++) {
        const begin = performance.now();
        view.goTo(k);
        view.root.getBoundingClientRect();
        times.push(performance.now() - begin);
    }
    return times.sort((a, b) => a - b)[30];
}"""


@pytest.fixture(scope="module")
def crowd() -> list[str]:
    """64 requests at once in 512 blocks, more behind them, shared prefixes, preemptions."""
    workload = Workload(num_requests=120, prompt_len=(30, 120), output_len=(40, 120), shared_len=48)
    limits = {"num_gpu_blocks_override": 512, "max_num_seqs": 64, "max_model_len": 512, "max_num_batched_tokens": 512}
    result = simulate(EngineConfig(**limits), workload, model_shape("qwen3-8b"))
    assert result.figures.num_preemptions > 10
    return result.lines


def test_512_blocks_and_64_requests_are_replayed_at_60_steps_a_second(
    open_page: Callable[..., Any], crowd: Any
) -> None:
    page = open_page(crowd)
    assert page.locator("[data-block]").count() == 512
    assert max(len(step["scheduled"]) for step in map(json.loads, crowd) if step["event"] == "step") == 64
    best, pace, enough = 0.0, 0.0, times(24, 57)  # a browser without a GPU and beside other tests; 58 to 60 alone
    for _ in range(6):
        steps, pictures, seconds = page.evaluate(PLAY)
        best, pace = max(best, pictures / seconds), max(pace, steps / seconds)
        if best > enough:
            break
    assert pace == pytest.approx(60, abs=2)
    milliseconds = min(page.evaluate(COST) for _ in range(5))
    print(f"{best:.0f} of 60 steps a second were drawn; script and layout of one: {milliseconds:.1f} ms")
    assert best > 24
    assert milliseconds < 1000 / 60 / 2


def test_play_after_pause_does_not_play_twice_as_fast(open_page: Callable[..., Any], crowd: Any) -> None:
    page = open_page(crowd)
    page.evaluate("() => { view.show(0); begin = performance.now(); }")
    page.evaluate("for (let i = 0; i < 7; i++) view.transport.toggle();")
    page.wait_for_timeout(1000)
    steps, seconds = page.evaluate("(view.transport.toggle(), [view.k, (performance.now() - begin) / 1000])")
    assert 2 <= steps <= 10 * seconds + 1  # ten a second


def test_the_first_picture_comes_within_3_seconds_of_the_servers_start(browser: Any) -> None:
    pytest.importorskip("gradio", reason="no gradio: pip install 'teachllm[ui]'")
    from teachllm_webui.page import launch

    seconds = []
    for _ in range(8):
        context = browser.new_context(viewport={"width": 1280, "height": 720})
        tab, session, began = context.new_page(), LiveSession(), time.time()
        page = launch(session)
        session.start_preset(PRESETS[0])
        tab.goto(page.url)
        tab.wait_for_selector("[data-live] button")
        shown = tab.evaluate("new Promise((done) => requestAnimationFrame(() => done(Date.now())))")
        seconds.append(shown / 1000 - began)
        page.close()
        context.close()
        if seconds[-1] < 3:
            break
    print(f"the page is there after {min(seconds):.1f} s")
    assert min(seconds) < 3
