"""The exported page as a text."""

from __future__ import annotations

import json
import re

from teachllm_webui import export


def test_the_page_refers_to_nothing_outside_itself() -> None:
    page = export.html_page(['{"event": "header"}'], "a trace")
    assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\((?!data:)""", page)


def test_lines_come_back_out_of_the_page_as_they_went_in_and_cannot_end_their_element() -> None:
    lines = ['{"event": "arrival", "prompt_text": ["</script><script>", "<!--", "é\\u2028"]}', '{"broken": "</scr']
    embedded = export.embedded_json(lines)
    assert "<" not in embedded
    assert json.loads(embedded) == lines


def test_the_title_is_escaped() -> None:
    page = export.html_page([], "<b></script>")
    assert "<title>&lt;b&gt;&lt;/script&gt;</title>" in page and "<b></script>" not in page


def test_no_embedded_script_can_end_its_element_early() -> None:
    page = export.html_page([], "a trace")
    assert page.count("<script") - page.count("'<script") >= 3
    assert len(re.findall(r"</script", page)) == 3


def test_every_file_of_the_view_is_part_of_the_page() -> None:
    scripts = {path.name for path in export.VIEW.glob("*.js")}
    assert scripts == set(export.SCRIPTS)
