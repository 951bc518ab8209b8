"""The live page in a browser, over real engines: what it shows is what the engine says, and its buttons drive it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from teachllm.config import EngineConfig
from teachllm.sampling_params import SamplingParams
from teachllm_webui import attach
from teachllm_webui.live import LiveRun
from teachllm_webui.plan import PlannedRequest
from teachllm_webui.presets import PRESETS, preset
from teachllm_webui.session import LiveSession
from teachllm_webui.timeline import Seen
from tests.thorough import THOROUGH, only_thorough
from tests.waiting import HANG_SECONDS, wait_for
from tests.webui.conftest import SIZE, Watched
from tests.webui.trace_server import Serve

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("gradio")]

CONFIG = EngineConfig(device="cpu", num_gpu_blocks_override=32, max_num_seqs=4, max_model_len=256)


@pytest.fixture(scope="module")
def live(gradio: Any) -> Iterator[tuple[LiveSession, str]]:
    from teachllm_webui.page import launch

    session = LiveSession()
    page = launch(session)
    yield session, page.url
    page.close()


@pytest.fixture
def session(live: tuple[LiveSession, str]) -> LiveSession:
    """Two requests and nothing computed yet."""
    found = live[0]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    before = found.generation
    found.start(CONFIG, [PlannedRequest(prompt=text, params=params) for text in ("What is a token?", "A GPU")], False)
    wait_for(lambda: found.generation > before)
    return found


def watched(browser: Any, url: str) -> Watched:
    """Open the page. Gradio may say something on the console, but no error and no warning."""
    tab = Watched(browser, (url, url.replace("127.0.0.1", "localhost")), ("log", "info", "debug"))
    tab.page.goto(url)
    tab.page.wait_for_selector("[data-live][data-generation]")
    return tab


@pytest.fixture(scope="module")
def first_tab(browser: Any, live: tuple[LiveSession, str]) -> Iterator[Watched]:
    tab = watched(browser, live[1])
    yield tab
    tab.close()


@pytest.fixture
def tab(first_tab: Watched, live: tuple[LiveSession, str]) -> Iterator[Any]:
    """The module's tab, which shows what the session has now."""
    first_tab.page.set_viewport_size(SIZE)
    first_tab.page.mouse.move(0, 0)
    first_tab.page.keyboard.press("Escape")
    first_tab.page.evaluate("document.activeElement.blur()")  # what the test before has clicked takes keys for itself
    first_tab.page.wait_for_selector(f"[data-generation='{live[0].generation}']")
    live[0]._tabs.clear()  # those of tests before, which are closed
    yield first_tab.page
    assert first_tab.complaints == []


def steps_of(run: LiveRun) -> int:
    return sum(line.startswith('{"event":"step"') for line in run.log.upto())


def is_at(page: Any, k: int, side: int = 0) -> None:
    page.wait_for_selector(f"[data-side='{side}'] [data-step-index='{k}']", state="attached")


def in_engine(run: LiveRun) -> dict[str, list[int]]:
    """Block tables, as the engine's own requests have them."""
    return run.inspect(lambda engine: {r.request_id: list(r.block_ids) for r in engine.core.scheduler.running})


def in_page(page: Any, side: int = 0) -> dict[str, list[int]]:
    page.evaluate(f"livePage.views[{side}].settle()")
    rows = page.eval_on_selector_all(
        f"[data-side='{side}'] [data-view=tables] [data-table]",
        "rows => rows.map((r) => [r.dataset.request, r.dataset.table])",
    )
    return {name: [int(block) for block in table.split()] for name, table in rows}


def test_a_preset_is_started_stepped_paused_scrubbed_back_and_asked_who_owns_a_block(
    live: tuple[LiveSession, str], tab: Any
) -> None:
    session, page = live[0], tab
    before = session.generation
    page.click("[data-open=preset]")
    page.click("[data-preset=preemption]")
    page.wait_for_selector(f"[data-generation='{before + 1}']")
    page.wait_for_function("livePage.views[0].k >= 2")
    assert page.locator("[data-title]").inner_text() == preset("preemption").title
    assert page.locator("[data-side]").count() == 1
    page.click("[data-action=play]")
    wait_for(lambda: not session.runs[0].is_playing)
    page.wait_for_selector("[data-action=play][data-playing=false]")
    in_engine(session.runs[0])  # which is then between two steps, and takes no more
    first = steps_of(session.runs[0])
    is_at(page, first - 1)
    for i in range(4):
        page.keyboard.press("ArrowRight")
        is_at(page, first + i)
    assert steps_of(session.runs[0]) == first + 4
    assert in_page(page) == in_engine(session.runs[0])

    cell = page.locator("[data-block][data-state=used]").nth(1)
    block = int(cell.get_attribute("data-block"))
    cell.hover()
    card = page.locator("[data-card=block]")
    card.wait_for()
    (owner,) = (name for name, table in in_engine(session.runs[0]).items() if block in table)
    assert f"= {owner}, its block" in card.inner_text()

    page.locator("[data-action=scrub]").fill("3")
    is_at(page, 3)
    session.step()
    wait_for(lambda: steps_of(session.runs[0]) == first + 5)
    page.select_option("[data-action=speed]", "30")
    wait_for(lambda: session.news(Seen())["now"]["speed"] == 30)
    page.wait_for_function(f"livePage.views[0].timeline.steps.length === {first + 5}")
    is_at(page, 3)
    session.set_speed(10)
    page.keyboard.press("End")
    is_at(page, first + 4)


def test_a_preset_of_two_views_can_be_started_from_the_list(live: tuple[LiveSession, str], tab: Any) -> None:
    page = tab
    for each in [each for each in PRESETS if THOROUGH or each.name == "paged"]:
        page.click("[data-open=preset]")
        page.click(f"[data-preset={each.name}]")
        page.wait_for_function(f"livePage.now.preset === '{each.name}' && livePage.views.every((v) => v.k >= 0)")
        assert page.locator("[data-title]").inner_text() == each.title
        assert page.locator(".tl-look").inner_text() == each.look_at
        assert page.locator("[data-side]").count() == len(each.variants)
    live[0].pause()


def test_a_fork_with_another_block_size_stands_beside_the_original_and_both_go_on(
    session: LiveSession, tab: Any
) -> None:
    page = tab
    for k in range(3):
        page.click("[data-action=forward]")
        is_at(page, k)
    page.locator("[data-action=scrub]").fill("1")
    page.click("[data-open=fork]")
    assert "After step 1" in page.locator("[data-form=fork]").inner_text()
    page.fill("[data-form=fork] [name=block_size]", "4")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-form=fork]", state="hidden")
    page.wait_for_selector("[data-side='1']")
    assert page.locator("[data-side='1'] h2").first.inner_text() == "fork at step 1: block size 4"
    original, fork = session.runs
    is_at(page, 1)
    is_at(page, -1, side=1)
    assert page.locator("[data-side='1'] [data-where]").inner_text().endswith(" · the fork")
    assert set(page.locator("[data-figure=ttft] dd").all_inner_texts()) == {"\u2013"}
    for n in range(1, 3):
        page.keyboard.press("ArrowRight")
        wait_for(lambda n=n: steps_of(original) == 3 + n and steps_of(fork) == n)
    is_at(page, 3)  # the fork's newest, though the original has one more
    is_at(page, 1, side=1)
    assert in_page(page, 1) == in_engine(fork)
    assert len(in_engine(fork)["0"]) > len(in_engine(original)["0"])
    session.set_speed(None)
    page.keyboard.press("Space")
    wait_for(lambda: original.is_done and fork.is_done)
    texts = "views => views.map((v) => [...v.querySelectorAll('.tl-text')].map((t) => t.textContent))"
    page.wait_for_function("livePage.views.every((v) => v.state.live.size === 0)")
    page.evaluate("livePage.views.forEach((v) => v.settle())")
    left, right = page.eval_on_selector_all("[data-view=tokens]", texts)
    assert left == right and all(left)
    waste = page.locator("[data-figure=waste][data-differs]")
    waste.wait_for()
    shown = "[...document.querySelectorAll('[data-figure=steps] dd')].map((dd) => dd.textContent)"
    assert page.evaluate(shown) == [f"{steps_of(original)} (0 to {steps_of(original) - 1})"] * 2
    page.locator("[data-action=scrub]").first.fill("4")
    assert page.evaluate(shown) == ["5 (0 to 4)"] * 2
    begin, work = page.evaluate("[livePage.views[1].timeline.spanOf(0)[0], livePage.views[0].timeline.work[1]]")
    assert begin == pytest.approx(work)  # one step has one time on both sides
    page.locator("[data-action=scrub]").first.fill("0")
    assert set(page.locator("[data-compare] [data-value=null]").all_inner_texts()) == {"\u2013"}
    assert page.locator("[data-side='1'] [data-where]").inner_text().startswith("not forked yet")
    page.click("[data-open=fork]")
    assert page.input_value("[data-form=fork] [name=block_size]") == ""
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Escape")
    page.click("[data-action=drop]")
    page.wait_for_selector("[data-sides='1']")
    session.set_speed(10)


def test_a_fork_is_made_where_its_form_says_though_the_engine_goes_on(session: LiveSession, tab: Any) -> None:
    page = tab
    page.click("[data-action=forward]")
    is_at(page, 0)
    page.click("[data-open=fork]")
    assert "After step 0" in page.locator("[data-form=fork]").inner_text()
    session.step()
    is_at(page, 1)
    page.fill("[data-form=fork] [name=max_num_seqs]", "2")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("[data-side='1']")
    assert page.locator("[data-side='1'] h2").first.inner_text() == "fork at step 0: requests at once 2"
    assert page.evaluate("Math.max(...livePage.views[1].views.at(-1).series.hitRate, 0)") <= 100


def test_keys_in_an_open_menu_step_no_engine(session: LiveSession, tab: Any) -> None:
    page = tab
    page.click("[data-open=preset]")
    focused = "document.activeElement.dataset.preset"
    first = page.evaluate(focused)
    for key in ("ArrowRight", "ArrowLeft", "End", "ArrowDown"):
        page.keyboard.press(key)
    assert page.evaluate(focused) not in (first, None)
    page.keyboard.press("ArrowUp")
    assert page.evaluate(focused) == first
    page.keyboard.press("Escape")
    in_engine(session.runs[0])
    assert steps_of(session.runs[0]) == 0


def test_what_another_tab_watches_is_replaced_only_if_that_is_wanted(
    session: LiveSession, tab: Any, browser: Any, live: tuple[LiveSession, str]
) -> None:
    other, generation = watched(browser, live[1]), session.generation
    wait_for(lambda: session.would_disturb("of no tab"))
    for choice in ("false", "true"):
        tab.click("[data-open=preset]")
        tab.click("[data-preset=prefix]")
        tab.click(f"[data-question] [data-choice={choice}]")
        if choice == "false":
            assert session.generation == generation
    tab.wait_for_function("livePage.now.preset === 'prefix'")
    session.pause()
    other.close()


def test_a_reload_of_a_run_that_has_ended_shows_where_most_was_in_use(
    session: LiveSession, browser: Any, live: tuple[LiveSession, str]
) -> None:
    session.set_speed(None)
    session.play()
    wait_for(lambda: session.status.is_done or session.news(Seen())["now"]["is_done"])
    session.set_speed(10)
    other = watched(browser, live[1])
    other.page.wait_for_function("livePage.views[0].timeline.last > 5 && livePage.views[0].k >= 0")
    assert other.page.locator("[data-status][role=status]").inner_text() == "all done"
    assert other.page.locator("[data-block][data-state=used]").count() > 0
    response = other.page.request.get(live[1], headers={"accept-encoding": "gzip"})
    assert response.headers["content-encoding"] == "gzip"
    other.close()


def test_a_submitted_prompt_shows_its_tokens_and_typing_it_presses_no_key_of_the_view(
    session: LiveSession, tab: Any
) -> None:
    page = tab
    page.click("[data-open=submit]")
    page.fill("[data-form=submit] [name=prompt]", "")
    page.locator("[data-form=submit] [name=prompt]").type("What is a GPU? ")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Home")
    assert not session.runs[0].is_playing and steps_of(session.runs[0]) == 0
    page.click("[data-submit=submit]")
    page.wait_for_selector("[data-form=submit]", state="hidden")
    session.set_speed(None)
    page.keyboard.press("Space")
    row = page.locator("[data-view=tokens] [data-request^=mine] .tl-text")
    page.wait_for_function(
        "document.querySelector('[data-view=tokens] [data-request^=mine] .tl-text')?.textContent.includes('processor')"
    )
    assert "A GPU is a processor" in row.text_content()
    session.pause()
    session.set_speed(10)


def test_what_is_refused_is_said_in_the_form_and_can_be_corrected(session: LiveSession, tab: Any) -> None:
    page = tab
    page.click("[data-open=submit]")
    page.fill("[data-form=submit] [name=prompt]", "word " * 400)
    page.click("[data-submit=submit]")
    error = page.locator("[data-form=submit] [role=alert]")
    error.wait_for()
    assert "max_model_len" in error.inner_text()
    page.fill("[data-form=submit] [name=prompt]", "What is a token?")
    page.click("[data-submit=submit]")
    page.wait_for_selector("[data-form=submit]", state="hidden")
    assert session.runs[0].knows("mine-1")


def test_a_request_is_aborted_by_its_button(session: LiveSession, tab: Any) -> None:
    page = tab
    page.click("[data-action=forward]")
    is_at(page, 0)
    page.click("[data-view=tokens] [data-abort='0']")
    wait_for(lambda: list(in_engine(session.runs[0])) == ["1"])


def test_an_engine_that_fails_is_shown_in_words_and_the_page_goes_on(session: LiveSession, tab: Any) -> None:
    page = tab
    executor = session.runs[0].inspect(lambda engine: engine.core.executor)
    execute = executor.execute

    def fail(plan: Any) -> Any:
        raise RuntimeError("<b>the device</b> is on fire")

    executor.execute = fail
    page.click("[data-action=forward]")
    page.wait_for_selector("[data-problem]:not([hidden])")
    assert "<b>the device</b> is on fire" in page.locator("[data-problem]").inner_text()
    executor.execute = execute
    page.click("[data-open=preset]")
    page.click("[data-preset=prefix]")
    page.wait_for_function("livePage.now.preset === 'prefix' && livePage.views[0].k >= 0")
    assert page.locator("[data-problem]").is_hidden()
    session.pause()


def test_an_engine_that_has_ended_is_said_to_have_and_not_that_all_is_done(session: LiveSession, tab: Any) -> None:
    page = tab
    page.click("[data-action=forward]")
    is_at(page, 0)
    # A trace that cannot be written ends it.
    session.runs[0].inspect(lambda engine: setattr(engine.core.recorder, "_sink", None))
    page.click("[data-action=forward]")
    page.wait_for_selector("[data-status]:has-text('the engine has ended')")
    assert page.locator("[data-problem]").inner_text().startswith("the engine has ended: TypeError")
    assert "all done" not in page.locator("body").inner_text()
    page.wait_for_selector("[data-action=abort]:visible", state="hidden")


def test_what_if_shows_a_simulation_of_the_form(live: tuple[LiveSession, str], tab: Any) -> None:
    page = tab
    page.click("[data-open=what_if]")
    page.fill("[data-form=what_if] [name=requests]", "40")
    page.fill("[data-form=what_if] [name=blocks]", "128")
    page.click("[data-submit=what_if]")
    page.wait_for_function("livePage.now.title.startsWith('what if') && livePage.views[0].timeline.last > 50")
    assert page.evaluate("livePage.views[0].timeline.rows.size") == 40
    assert page.locator("[data-block]").count() == 128
    page.click("[data-action=play]")
    page.wait_for_function("livePage.views[0].k >= 3")


def test_a_trace_plays_in_the_page_grows_with_its_file_and_says_where_it_breaks(
    live: tuple[LiveSession, str], tab: Any, trace: list[str], tmp_path: Path
) -> None:
    session, page = live[0], tab
    path = tmp_path / "run.jsonl"
    path.write_text("".join(line + "\n" for line in trace[:40]))
    session.replay(path)
    page.wait_for_selector(f"[data-generation='{session.generation}']")
    num_steps = sum('"event":"step"' in line for line in trace[:40])
    page.wait_for_function(f"livePage.views[0].timeline.steps.length === {num_steps}")
    is_at(page, 0)
    page.keyboard.press("Space")
    page.wait_for_function("livePage.views[0].k >= 3")
    page.keyboard.press("End")
    is_at(page, num_steps - 1)
    with path.open("a") as file:
        file.write("".join(line + "\n" for line in trace[40:60]) + '{"event":"step"}\n')
    num_steps += sum('"event":"step"' in line for line in trace[40:60])
    page.wait_for_function(f"livePage.views[0].timeline.steps.length === {num_steps}")
    banner = page.locator("[data-side='0'] [role=alert]")
    banner.wait_for()
    assert "line 61" in banner.inner_text()
    page.keyboard.press("End")
    is_at(page, num_steps - 1)


def test_two_tabs_show_the_same_step_and_either_one_drives(
    session: LiveSession, tab: Any, browser: Any, live: tuple[LiveSession, str]
) -> None:
    other = watched(browser, live[1])
    one, two = tab, other.page
    for k, tab in enumerate((one, two, one)):
        tab.click("[data-action=forward]")
        is_at(one, k)
        is_at(two, k)
    assert in_page(one) == in_page(two) == in_engine(session.runs[0])
    one.select_option("[data-action=speed]", "30")
    two.wait_for_function("document.querySelector('[data-action=speed]').value === '30'")
    session.set_speed(10)
    other.close()


def test_the_main_views_are_in_sight_at_1280_by_720_and_a_phone_needs_no_sideways_scrolling(
    session: LiveSession, tab: Any
) -> None:
    page = tab
    page.click("[data-action=forward]")
    is_at(page, 0)
    for name in ("pool", "batch", "step", "queue"):
        box = page.locator(f"[data-view={name}]").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 1280 and box["y"] + box["height"] <= 720
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("document.documentElement.scrollWidth <= 390")
    for name in ("preset", "submit", "fork", "what_if"):
        page.click(f"[data-open={name}]")
        box = page.locator(f"[data-form={name}]").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
        page.keyboard.press("Escape")


@only_thorough
def test_a_tab_says_that_the_server_is_gone_and_shows_what_the_next_one_has(
    browser: Any, trace: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradio.context import Context

    from teachllm_webui.page import launch

    context = browser.new_context(viewport=SIZE)
    context.set_default_timeout(1000 * HANG_SECONDS)
    tab, port = context.new_page(), 0
    for name, num_lines in (("before", 60), ("after", 30)):
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in trace[:num_lines]))
        session = LiveSession()
        session.replay(path)
        monkeypatch.setattr(Context, "id", 0)  # Gradio numbers components, and a server that starts again begins anew
        up = launch(session, port=port)
        if port == 0:
            port = int(up.url.strip("/").rpartition(":")[2])
            tab.goto(up.url)
        tab.wait_for_function(f"globalThis.livePage?.now.title === '{name}' && livePage.views[0].k >= 0")
        tab.wait_for_function(f"livePage.views[0].timeline.lines.length === {num_lines}")
        assert tab.evaluate("livePage.views[0].timeline.problem") is None
        assert tab.evaluate("livePage.state.textContent") == ""
        up.close()
        session.close()
        if name == "before":
            tab.wait_for_selector("[data-lost]")
            assert tab.evaluate("livePage.state.textContent") == "no connection to teachllm"
            tab.click("[data-open=preset]")
            tab.click("[data-preset=prefix]")
            tab.wait_for_selector("[data-problem]:not([hidden])")
            assert tab.locator("[data-problem]").inner_text() == "teachllm does not answer"
    context.close()


def test_an_attached_run_is_drawn_followed_and_begun_anew(
    live: tuple[LiveSession, str], tab: Any, serve: Serve, trace: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "WAITS_S", (0.01, 0.05))
    session, page = live[0], tab

    def num_steps(lines: list[str]) -> int:
        return sum('"event":"step"' in line for line in lines)

    server = serve(*trace[:40])
    session.attach(server.url)
    page.wait_for_selector(f"[data-generation='{session.generation}']")
    is_at(page, num_steps(trace[:40]) - 1)
    assert page.locator("[data-status][role=status]").inner_text() == "attached"
    assert page.locator("[data-block][data-state=used]").count() > 0
    server.push(*trace[40:50])
    is_at(page, num_steps(trace[:50]) - 1)
    page.keyboard.press("Space")
    page.wait_for_selector("[data-action=play][data-playing=false]")
    server.push(*trace[50:])
    page.wait_for_function(f"livePage.views[0].timeline.steps.length === {num_steps(trace)}")
    is_at(page, num_steps(trace[:50]) - 1)
    page.keyboard.press("End")
    is_at(page, num_steps(trace) - 1)
    server.close()
    page.wait_for_selector("[data-problem]:not([hidden]):has-text('does not answer')")  # first: it is gone

    header = trace[0].replace('"time":', '"time":1', 1)
    later = serve(header, *trace[1:], num_gone=30, port=server.port)
    page.wait_for_function(f"livePage.views[0].timeline.steps.length === {num_steps(trace[31:])}")
    is_at(page, num_steps(trace[31:]) - 1)
    assert page.evaluate("livePage.views[0].timeline.problem") is None
    assert "30 lines are gone" in page.locator("[data-problem]").inner_text()
    page.keyboard.press("Home")
    is_at(page, 0)
    later.push('{"event":"abort","time":0,"request_id":"of long ago","block_events":[]}')
    page.click("[data-open=fork]")
    assert "Without its beginning" in page.locator("[data-form=fork]").inner_text()
    page.keyboard.press("Escape")
