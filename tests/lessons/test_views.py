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
from teachllm_lessons.predict import predict
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
    assert "| C | waits | would be running request 3, the limit is 2 |" in text
    watch.run()
    assert len(watch.tokens("C")) == 6 and watch.figures.num_requests == 3


def test_source_is_shown_live_with_what_to_look_at() -> None:
    shown = show(PrefixCache.find, {"next(iter(": "any of them"}, doc=False)
    assert shown.where.startswith("teachllm/core/prefix_cache.py:")
    assert '"""' not in repr(shown) and "# <- 1" in repr(shown) and "1. any of them" in shown._repr_markdown_()
    with pytest.raises(ValueError, match=r"prefix_cache.py:\d+: 'gone' does not stand there any more"):
        show(PrefixCache.find, {"gone": ""})


def test_a_prediction_is_held_against_the_engine() -> None:
    assert repr(predict("Blocks:", 7, 7)).startswith("✓ Blocks: You said 7; the engine says 7")
    assert repr(predict("Blocks:", 7, 9)).startswith("✗")
    assert repr(predict("Speed:", 90, 100, " tok/s", within=0.1)).startswith("✓")
    assert "The engine says 16." in repr(predict("Blocks:", None, 16))


def test_colours_are_the_visualizers() -> None:
    text = Path(ROOT / "webui/teachllm_webui/view/palette.js").read_text(encoding="utf-8")
    array = re.search(r"const BASE = (\[.*?\]);", text, re.DOTALL)
    assert array
    assert json.loads(re.sub(r",\s*\]", "]", array[1])) == [list(rgb) for rgb in palette.BASE]
    assert palette.ink_on(palette.color(6)) == "#0b0d10" and palette.ink_on(palette.color(4)) == "#ffffff"
