"""Pictures, sources and predictions say what they show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from teachllm.core.prefix_cache import PrefixCache
from teachllm_lessons import palette
from teachllm_lessons.faults import ROOT
from teachllm_lessons.picture import bars, lines
from teachllm_lessons.predict import Prediction
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch


@pytest.fixture
def watch() -> Watch:
    watch = Watch(num_gpu_blocks_override=24, max_model_len=128, enable_prefix_caching=True, max_num_seqs=2)
    question = "Explain what a KV cache keeps for every token, and why that saves so much of the work. "
    for name in "ABC":
        watch.add(name, question + name, 6)
    watch.run(2)
    return watch


def test_pictures_say_in_words_what_they_show_and_have_no_background(watch: Watch) -> None:
    for picture in (
        watch.pool(),
        watch.tables(),
        watch.timeline(),
        bars({"a": 1.0}, "s"),
        lines({"a": ([1], [2])}, "x", "y"),
    ):
        drawn = picture._repr_svg_()
        assert drawn.startswith("<?xml") and picture.says in drawn.replace("&#x27;", "'")
        assert not re.search(r'id="patch_1">\s*<path [^>]*fill: #fff', drawn)
    assert "24 blocks of 16 tokens" in watch.pool().says
    assert re.search(r"A: \[0, .*B: \[0, ", watch.tables().says)
    assert "3 requests in 2 steps" in watch.timeline().says


def test_a_picture_is_the_same_each_time() -> None:
    assert bars({"a": 1.0}, "s")._repr_svg_() == bars({"a": 1.0}, "s")._repr_svg_()


def test_a_step_is_told_in_words(watch: Watch) -> None:
    step = watch.step()
    assert set(step.scheduled) == {"A", "B"}
    text = step._repr_markdown_()
    assert "| A | decode: computes token" in text
    assert "| C | waits | 2 of 2 requests run already |" in text
    watch.run()
    assert len(watch.tokens("C")) == 6 and watch.figures.num_requests == 3


def test_source_is_shown_live_with_what_to_look_at() -> None:
    shown = show(PrefixCache.find, {"next(iter(": "any of them"}, doc=False)
    assert shown.where.startswith("teachllm/core/prefix_cache.py:")
    assert '"""' not in repr(shown) and "# <- 1" in repr(shown) and "1. any of them" in shown._repr_markdown_()
    with pytest.raises(ValueError, match=r"prefix_cache.py:\d+: 'gone' does not stand there any more"):
        show(PrefixCache.find, {"gone": ""})


BLOCKS = Prediction(
    asks="Blocks",
    answer=7,
    because="It is so for {reason}.",
    traps={4: "That counts full blocks alone."},
    unit=" blocks",
)


def test_a_prediction_is_held_against_the_engine_and_a_trap_is_named() -> None:
    right = BLOCKS.compare(7, 7, reason="a reason")
    assert (right.verdict, repr(right)) == (
        "right",
        "✓ Blocks: 7 blocks. The engine computes 7 blocks. It is so for a reason.",
    )
    trapped = BLOCKS.compare(4, 7, reason="a reason")
    assert trapped.verdict == "wrong" and "That counts full blocks alone. The engine computes 7 blocks." in repr(
        trapped
    )
    astray = BLOCKS.compare(9, 7, reason="a reason")
    assert astray.verdict == "wrong" and "full blocks" not in repr(astray)
    assert "full blocks" not in repr(BLOCKS.compare(5, 7, reason="a reason"))  # exact: a trap is its own number alone
    rounded = Prediction(asks="Mean", answer=3.36, because="", within=0.05, traps={3.2: "A trap."})
    assert [rounded.compare(each, 3.4).verdict for each in (3.4, 3.26, 3.2, 3.1)] == [
        "right",
        "right",
        "wrong",
        "wrong",
    ]
    assert "A trap." in repr(rounded.compare(3.2, 3.4)) and "A trap." in repr(rounded.compare(3.15, 3.4))
    speed = Prediction(asks="Speed", answer=100.0, because="", unit=" tok/s", within=0.1)
    assert speed.compare(90, 103.0).verdict == "wrong" and speed.compare(95, 103.0).verdict == "right"


def test_a_prediction_gives_nothing_away_before_there_is_a_number() -> None:
    left = BLOCKS.compare(None, 7, reason="a reason")
    assert left.verdict == "open" and not re.search(r"7|reason|full", repr(left))
    shown = left._repr_mimebundle_()
    assert not any(re.search(r"7|reason|full", str(each)) for each in shown.values())


def test_a_prediction_whose_answer_is_out_of_date_is_an_error() -> None:
    with pytest.raises(ValueError, match="Blocks: the engine computes 8, and this lesson expects 7"):
        BLOCKS.compare(None, 8, reason="a reason")


def test_colours_are_the_visualizers() -> None:
    text = Path(ROOT / "webui/teachllm_webui/view/palette.js").read_text(encoding="utf-8")
    array = re.search(r"const BASE = (\[.*?\]);", text, re.DOTALL)
    assert array
    assert json.loads(re.sub(r",\s*\]", "]", array[1])) == [list(rgb) for rgb in palette.BASE]
    assert palette.ink_on(palette.color(6)) == "#000000" and palette.ink_on(palette.color(4)) == "#ffffff"
