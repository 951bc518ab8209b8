"""What is shown of a text is what `generate` returns, in any script; a byte of no character is shown as ⟨f0⟩."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from teachllm.config import EngineConfig
from teachllm.engine.llm_engine import Engine
from teachllm.engine.overrides import EngineOverrides
from teachllm.sampling.sampler import Sampler, SamplerOutput
from teachllm.sampling_params import SamplingParams
from teachllm_webui.live import LiveRun
from teachllm_webui.plan import Plan, PlannedRequest
from teachllm_webui.session import LiveSession
from teachllm_webui.timeline import Status, Timeline
from tests.engine.text.test_detokenizer import byte_symbols
from tests.thorough import THOROUGH, only_thorough
from tests.webui.runs import finish

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """A prompt, the bytes that the model is made to answer, and what its last token adds to the text shown."""

    name: str
    prompt: str
    output: bytes
    last: str = "."


def case(name: str, prompt: str, output: str) -> Case:
    return Case(name, prompt, f"{output}.".encode())


JOINER, SELECTOR = "\u200d", "\ufe0f"
FAMILY = JOINER.join("\U0001f468\U0001f469\U0001f467\U0001f466")
PILOT, PIRATES = f"\U0001f469\U0001f3fd{JOINER}\U0001f680", f"\U0001f3f4{JOINER}\u2620{SELECTOR}"
FLAGS = f"\U0001f1ef\U0001f1f5\U0001f1e7\U0001f1f7{PIRATES}"
CASES = (
    case("emoji", f"Who is {FAMILY}?", f"A family {FAMILY}, and {PILOT} flies"),
    case(
        "flags",
        f"Say {FLAGS}{FLAGS}",
        f"{FLAGS} \u2764{SELECTOR}{JOINER}\U0001f525 1{SELECTOR}\u20e3 \U0001f44b\U0001f3ff",
    ),
    case("cjk", "什么是缓存\uff1f", "缓存是保存数据的地方。\n日本語、한국어"),
    case("rare cjk", "𠮷野家\u3000で", "𩸽と葛\U000e0100城、ｱｲｳ「かっこ」"),
    case("arabic", "ما هو الرمز المميز؟", "الرَّمزُ جزءٌ من النصّ (token) رقم ١٢٣"),
    case("mixed directions", "שלום, world \u202babc\u202c!", "עברית and English، \u200fثم عربي\u200e"),
    case("combining", "कृपया बताएँ: क्षत्रिय", "नमस्ते दुनिया, Tie\u0302\u0301ng Vie\u0323\u0302t"),
    case(
        "stacked marks",
        "Z\u0351\u036b\u0343\u0302a\u0322\u0321lgo",
        "T\u0321\u0353\u031e\u0345e\u0349\u0354x\u0333t ก็ไม่ได้ e\u0301",
    ),
    Case("broken", "Half: é", b"a \xf0\x9f\x98 b \xff\xfe c \xe6\xa8\xf0\x9f\x98\x80 \xc3.", "⟨c3⟩."),
    Case("broken end", "End: 漢", "漢".encode() + b"\x80 and \xf0\x9f\x98", "⟨f0⟩⟨9f⟩⟨98⟩"),
)
USUAL = ("emoji", "broken end")
PARAMS = [pytest.param(each, id=each.name) for each in CASES if THOROUGH or each.name in USUAL]


def engine_of(case: Case, sink: Callable[[str], None]) -> Engine:
    """Make an engine whose model answers these bytes, each of which is a token at most."""
    answer: Iterator[int] = iter(())

    class Scripted(Sampler):
        def sample(self, logits: torch.Tensor, rows: list[int], *more: Any) -> SamplerOutput:
            return SamplerOutput(torch.tensor([next(answer) for _ in rows]))

    config = EngineConfig(device="cpu", async_scheduling=False, max_model_len=512, num_gpu_blocks_override=40)
    engine = Engine(config, trace_sink=sink, overrides=EngineOverrides(make_sampler=Scripted))
    answer = iter(ids_of(engine, case.output))
    return engine


def ids_of(engine: Engine, data: bytes) -> list[int]:
    """Return a token for each byte; the tokenizer has one for each, whether or not it is a character."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    names = {token_id: tokenizer.token_name(token_id) for token_id in range(tokenizer.vocab_size)}
    spelled = {name: token_id for token_id, name in names.items()}
    symbols = byte_symbols()
    return [spelled[symbols[byte]] for byte in data]


def params_of(case: Case) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=len(case.output), ignore_eos=True)


def generate(case: Case) -> tuple[list[str], str, str]:
    """Return the trace, the prompt, and the generated text."""
    lines: list[str] = []
    engine = engine_of(case, lines.append)
    engine.add_request("a", case.prompt, params_of(case))
    while engine.has_unfinished_requests:
        outputs = engine.step()
    [output] = outputs
    assert output.finished and output.prompt is not None
    return lines, output.prompt, output.outputs[0].text


def as_generated(shown: str) -> str:
    """Return the text that is shown as `generate` has it: ⟨f0⟩ is a byte again, and what is no character U+FFFD."""
    parts = re.split("⟨([0-9a-f]{2})⟩", shown)
    data = b"".join(bytes.fromhex(part) if i % 2 else part.encode() for i, part in enumerate(parts))
    return data.decode(errors="replace")


def one_line(text: str) -> str:
    return text.replace("\n", "↵").replace("\t", "⇥")


def pieces(page: Any, part: str) -> str:
    found = page.locator(f"[data-view=tokens] [data-request] .tl-text [data-part={part}]").all_text_contents()
    return "".join(found)


def token_texts(lines: list[str]) -> list[str]:
    """Return the text of each token in a trace of one request."""
    events = [json.loads(line) for line in lines]
    [arrival] = (event for event in events if event["event"] == "arrival")
    scheduled = [each for event in events for each in event.get("scheduled", ())]
    return [*arrival["prompt_text"], *(text for each in scheduled for text in each.get("text", ()))]


@pytest.mark.parametrize("case", PARAMS)
def test_panel_tables_and_cards_of_an_exported_page_show_what_generate_returns(
    open_exported: Callable[..., Any], case: Case
) -> None:
    lines, prompt, text = generate(case)
    assert text == case.output.decode(errors="replace")
    page = open_exported(lines)
    page.evaluate("view.show(view.timeline.last), view.settle()")
    assert pieces(page, "prompt") == prompt == case.prompt
    shown = pieces(page, "output")
    assert as_generated(shown) == text and shown.endswith(case.last)
    assert ("\ufffd" in text) == ("⟨" in shown) and "\ufffd" not in shown

    page.evaluate("view.show(view.timeline.last - 1), view.settle()")  # it still has its blocks
    tokens = token_texts(lines)
    assert "".join(tokens) == prompt + shown
    table = page.locator("[data-view=tables] [data-table]").get_attribute("data-table").split()
    expected = one_line("".join(tokens[:-1][: 16 * len(table)]))  # the newest may have no block yet
    tables = page.locator("[data-view=tables] [data-table] li > span").all_text_contents()
    assert "".join(tables) == expected
    assert hovered(page, "[data-view=tokens] .tl-text [data-block-ref]", "data-block-ref") == expected
    assert hovered(page, "[data-view=pool] [data-state=used]", "data-block") == expected
    assert sampled(page) == one_line(shown)


def hovered(page: Any, selector: str, block: str) -> str:
    """Return the text of the blocks of the only request, in its order, as their cards have it."""
    texts: dict[str, str] = {}
    for node in page.locator(selector).all():
        if not node.is_visible():  # a part of a character, of which nothing is shown yet
            continue
        node.scroll_into_view_if_needed()
        node.hover()
        card = page.locator("[data-card=block]")
        card.wait_for()
        assert card.get_attribute("data-card-id") == node.get_attribute(block)
        texts[node.get_attribute(block)] = "".join(
            card.locator("div:has(> dt:text-is('text')) > dd").all_text_contents()
        )
        page.mouse.move(0, 0)
        card.wait_for(state="hidden")
    table = page.locator("[data-view=tables] [data-table]").get_attribute("data-table").split()
    assert set(texts) <= set(table)
    return "".join(texts.get(each, "") for each in table)


def sampled(page: Any) -> str:
    """Return the text of all samples, as the cards of the timeline's cells have it; one is pointed at."""
    cards = page.evaluate(
        """() => {
            const { timeline } = view;
            const [row] = timeline.rows.values();
            const facts = (k) => teachllm.cellCard(row, row.at(k), k, timeline).facts;
            return timeline.steps.map((_, k) => Object.fromEntries(facts(k)));
        }"""
    )
    k = len(cards) - 2
    at = page.evaluate("(k) => { const [x, w] = view.batch.span(k); return x + w / 2 - view.batch._scroll.left; }", k)
    page.hover(".tl-scroller", position={"x": 84 + at, "y": 24})
    card = page.locator("[data-card=cell]")
    card.wait_for()
    facts = dict(zip(card.locator("dt").all_text_contents(), card.locator("dd").all_text_contents(), strict=True))
    assert facts == cards[k]
    page.mouse.move(0, 0)
    samples = [each["samples"] for each in cards if "samples" in each]
    assert "" not in samples
    return "".join(each for each in samples if each != "part of a character")


@only_thorough
def test_the_live_page_shows_what_generate_returns(
    gradio: Any, open_watched: Callable[..., Any], session: LiveSession
) -> None:
    from teachllm_webui.page import launch

    up = launch(session)
    page = open_watched(up.url, (up.url, up.url.replace("127.0.0.1", "localhost")), ("log", "info", "debug"))
    for case in CASES:
        _, prompt, text = generate(case)
        planned = PlannedRequest(prompt=case.prompt, params=params_of(case))
        plan = Plan(make_engine=partial(engine_of, case), requests=[planned])
        run = LiveRun(plan, session.changed)
        session._install(([Timeline("", run.log, run)], Status(title=case.name)))
        lines = finish(run)
        page.wait_for_selector(f"[data-generation='{session.generation}']")
        page.wait_for_function(f"livePage.views[0].timeline.lines.length === {len(lines)}")
        page.evaluate("livePage.views[0].show(livePage.views[0].timeline.last), livePage.views[0].settle()")
        assert pieces(page, "prompt") == prompt and as_generated(pieces(page, "output")) == text
        assert pieces(page, "prompt") + pieces(page, "output") == "".join(token_texts(lines))
    page.goto("about:blank")
    up.close()
