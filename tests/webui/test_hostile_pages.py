"""Odd traces on a page: markup in every text, ten thousand requests, and missing fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from teachllm.config import EngineConfig
from teachllm.engine.llm_engine import Engine
from teachllm.sampling_params import SamplingParams
from teachllm.trace.reader import TraceError, parse_trace
from teachllm.trace.recorder import TRACE_VERSION
from tests.thorough import THOROUGH

pytestmark = pytest.mark.slow

MARKUP = "</script></style></title><img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script><!-- <b>"
ARABIC, FAMILY = "\u202eמה زد\u202c", "\U0001f469\U0001f3fd\u200d\U0001f680"
TEXTS = (MARKUP, ARABIC, FAMILY, "${window.hacked = 1} `{{x}}` \\u0041 &lt; %s \u2028 \0")


# -- texts


def test_no_text_of_a_trace_runs_and_each_is_shown_as_it_is(open_exported: Callable[..., Any]) -> None:
    lines: list[str] = []
    config = EngineConfig(device="cpu", async_scheduling=False, max_model_len=256, num_gpu_blocks_override=64)
    engine = Engine(config, trace_sink=lines.append)
    for text in TEXTS:
        engine.add_request(text, text, SamplingParams(max_tokens=4, ignore_eos=True, temperature=0))
    while engine.has_unfinished_requests:
        engine.step()
    header = json.loads(lines[0])
    header["config"]["model"] = header["model"]["architecture"] = MARKUP
    failed = {"event": "error", "time": 1e9, "message": MARKUP, "block_events": []}
    page = open_exported([json.dumps(header), *lines[1:], json.dumps(failed)], title=MARKUP)
    assert page.title() == MARKUP and page.locator(".tl-about h1").text_content() == MARKUP
    assert MARKUP in page.locator("[data-about]").text_content()
    assert page.locator(".tl-banner").text_content() == f"A step failed: {MARKUP}"
    page.evaluate("view.show(1), view.settle()")
    rows = page.locator("[data-view=tokens] article")
    assert rows.evaluate_all("rows => rows.map((row) => row.dataset.request)") == list(TEXTS)
    assert rows.locator(".tl-id").all_text_contents() == list(TEXTS)
    for text, shown in zip(TEXTS, rows.locator(".tl-text").all_text_contents(), strict=True):
        assert shown.startswith(text)
    for k in range(rows.count()):
        rows.nth(k).locator(".tl-id").hover()
        card = page.locator("[data-card=request]")
        card.wait_for()
        assert TEXTS[k] in card.locator("strong").text_content()
        page.mouse.move(0, 0)
    page.evaluate("view.show(view.timeline.last), view.settle()")
    assert page.locator("img, main script, b:not(.tl-chip, figcaption b)").count() == 0
    assert page.evaluate("window.hacked") is None


# -- sizes


def crowd(num_requests: int, num_steps: int) -> list[str]:
    """A trace in which all arrive at once, and eight of them are served by two steps each."""
    config = {"block_size": 16, "max_num_batched_tokens": 128, "scheduling_policy": "fcfs"}
    header = {"event": "header", "version": TRACE_VERSION, "time": 0.0, "config": config, "model": {}}
    lines = [header | {"num_blocks": 64}]
    names = [f"request-{i}" for i in range(num_requests)]
    for name in names:
        more = {"child_index": 0, "max_len": 64, "priority": 0, "params": {}}
        lines.append({"event": "arrival", "time": 0.0, "request_id": name, "num_prompt_tokens": 16} | more)
    times = {"schedule": 0.1, "execute": 0.8, "wait": 0.0, "update": 0.1}
    for k in range(num_steps):
        some = names[8 * (k // 2) :][:8]
        is_first, blocks = k % 2 == 0, [(8 * (k // 2) + i) % 64 for i in range(8)]
        share = {"start": 0, "num_tokens": 16, "phase": "prefill", "num_sampled": 1 - is_first}
        events = [["allocate" if is_first else "free", *pair] for pair in zip(blocks, some, strict=True)]
        waiting = {name: ["sequence_limit", "the limit is 8"] for name in names[8 * (k // 2 + 1) :]}
        line = {"event": "step", "step": k, "time": float(k), "end": k + 1.0, "preempted": [], "waiting": waiting}
        line |= {"scheduled": [share | {"request_id": name} for name in some], "block_events": events}
        line |= {"finished": {} if is_first else dict.fromkeys(some, "length")}
        lines.append(line | times | {"blocks": {"used": 8 * is_first, "cached": 0, "free": 64 - 8 * is_first}})
    return [json.dumps(line) for line in lines]


def test_a_crowd_of_requests_is_no_crowd_of_nodes(open_exported: Callable[..., Any]) -> None:
    num_requests = 10_000 if THOROUGH else 1_000
    lines = crowd(num_requests, 12)
    assert parse_trace(line + "\n" for line in lines).problem is None
    page = open_exported(lines)
    for k in range(6):
        page.keyboard.press("ArrowRight")
        assert page.evaluate("view.k") == k + 1
    page.evaluate("view.settle()")
    assert page.locator("[data-summary=queue]").inner_text() == f"{num_requests - 32} waiting"
    assert page.locator("[data-view=queue] [data-request]").count() == 100
    assert page.locator("[data-more]").inner_text() == f"and {num_requests - 132} requests after these"
    assert page.locator("main *").count() < 3_000
    page.locator("[data-view=queue] [data-request]").nth(3).click()
    page.evaluate("view.show(2), view.settle(), view.show(view.timeline.last), view.settle()")
    page.locator(".tl-scroller").evaluate("(it) => { it.scrollTop = 1e9; }")
    page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    assert page.evaluate("view.batch.rows.length") == num_requests
    assert page.locator("main *").count() < 3_000


# -- fields


def without(lines: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Of each kind of event, its first line without one of its fields: [event, field, lines]."""
    known = set()
    for i, line in enumerate(lines):
        event = json.loads(line)
        paths: list[tuple[Any, ...]] = [(name,) for name in event]
        paths += [(part, name) for part in ("config", "blocks") for name in event.get(part, ())]
        paths += [("scheduled", 0, name) for each in event.get("scheduled", ())[:1] for name in each]
        for *way, name in paths:
            if (event["event"], *way, name) in known:
                continue
            known.add((event["event"], *way, name))
            changed = json.loads(line)
            part = changed
            for step in way:
                part = part[step]
            del part[name]
            yield event["event"], name, [*lines[:i], json.dumps(changed), *lines[i + 1 :]]


def refusal(lines: list[str]) -> str | None:
    """Return what is wrong with a trace for Python."""
    try:
        return parse_trace(line + "\n" for line in lines).problem
    except TraceError as error:
        return str(error)


def test_without_a_field_a_trace_is_shown_or_refused_in_a_line_that_names_it(page: Any, trace: list[str]) -> None:
    cases = list(without(trace[:62]))
    assert {event for event, _, _ in cases} == {"header", "arrival", "step", "abort"} and len(cases) > 90
    told = page.evaluate("(all) => all.map((l) => new teachllm.Timeline(l).problem)", [lines for *_, lines in cases])
    for (event, name, lines), in_page in zip(cases, told, strict=True):
        in_python = refusal(lines)
        for words in (in_python, in_page):
            if words is not None:
                assert name in words and "\n" not in words and "undefined" not in words, (event, name, words)
        assert in_page is None or in_python is not None, (event, name)
        assert in_python is None or in_page is not None or name in NOT_SHOWN, (event, name)


NOT_SHOWN = {"params"}


SHOW = """async (lines) => {
    window.view.destroy();
    document.body.innerHTML = '<main id="view"></main>';
    window.view = teachllm.mount(document.getElementById("view"), { lines, title: "a title" });
    const { timeline } = view;
    const texts = [];
    for (let k = -1; timeline.header && k < timeline.last; k += 9) {
        view.show(k), view.settle();
        const frame = view._frame();
        const cards = timeline.header.num_blocks ? [teachllm.blockCard(0, frame), teachllm.blockCard(3, frame)] : [];
        for (const [id, row] of timeline.rows) {
            cards.push(teachllm.requestCard(id, frame));
            if (row.at(k)) cards.push(teachllm.cellCard(row, row.at(k), k, timeline));
        }
        texts.push(JSON.stringify(cards), document.body.innerText);
    }
    dispatchEvent(new Event("beforeprint"));
    await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
    return texts.join();
}"""


def test_without_a_field_nothing_on_the_page_is_undefined(page: Any, trace: list[str]) -> None:
    usual = {"max_num_batched_tokens", "scheduling_policy", "max_len", "child_index", "text", "group", "roofline"}
    shown = 0
    for event, name, lines in without(trace[:62]):
        if not THOROUGH and name not in usual:
            continue
        text = page.evaluate(SHOW, lines)
        assert "undefined" not in text and "NaN" not in text and "null" not in text, (event, name)
        shown += 1
    assert shown >= len(usual)
