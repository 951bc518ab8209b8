"""The exported page as a text."""

from __future__ import annotations

import json
import re
import sys

import pytest

from teachllm_webui import export


def test_the_page_refers_to_nothing_outside_itself() -> None:
    page = export.html_page(['{"event": "header"}'], "a trace")
    ours = page[: page.index('<script type="text/plain"')]
    assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\((?!data:)""", ours)


def test_lines_come_back_out_of_the_page_as_they_went_in_and_cannot_end_their_element() -> None:
    lines = ['{"event": "arrival", "prompt_text": ["</script><script>", "<!--", "é\\u2028"]}', '{"broken": "</scr']
    embedded = export.embedded_json(lines)
    assert "<" not in embedded
    assert json.loads(embedded) == lines


def test_the_title_is_escaped() -> None:
    assert "<title>&lt;b&gt;</title>" in export.html_page([], "<b>")


def test_no_embedded_script_can_end_its_element_early() -> None:
    page = export.html_page([], "a trace")
    assert page.count("<script") - page.count("'<script") >= 4
    assert len(re.findall(r"</script", page)) == 4


def test_a_missing_plotly_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"pip install 'teachllm\[ui\]'"):
        export.html_page([], "a trace")


def test_every_file_of_the_view_is_part_of_the_page() -> None:
    scripts = {path.name for path in export.VIEW.glob("*.js")}
    assert scripts == set(export.SCRIPTS)
