"""The map: every concept has its lesson, its sources name it, and the page says what the list says."""

from __future__ import annotations

import re

import pytest

from teachllm_lessons.build import sources
from teachllm_lessons.faults import FAULTS
from teachllm_lessons.index import FOLDER, LESSONS, PAGE, ROOT, Lesson, find, page

GLOSSARY = FOLDER / "GLOSSARY.md"


def test_the_page_is_made_from_the_list() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m teachllm_lessons.index"


def test_lessons_are_numbered_in_order_and_every_notebook_is_one() -> None:
    assert [lesson.number for lesson in LESSONS] == [f"{number:02}" for number in range(14)]
    assert {source.stem for source in sources()} == {lesson.name for lesson in LESSONS}
    assert all(lesson.notebook.exists() for lesson in LESSONS)
    assert find("5") is find("05")


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_its_sources_are_there_and_name_it_at_their_top(lesson: Lesson) -> None:
    for source in lesson.sources:
        head = (ROOT / source).read_text(encoding="utf-8").partition("\n")[0]
        numbers = re.search(r"\(lessons? ([\d, and]+)\)", head)
        assert numbers and lesson.number in re.findall(r"\d\d", numbers[1]), f"{source}: {head}"


def test_no_file_names_a_lesson_that_is_not_about_it() -> None:
    about = {source: {lesson.number for lesson in LESSONS if source in lesson.sources} for source in all_sources()}
    for folder in ("teachllm", "kernels", "cli"):
        for path in (ROOT / folder).rglob("*.py"):
            head = path.read_text(encoding="utf-8").partition("\n")[0]
            if numbers := re.search(r"\(lessons? ([\d, and]+)\)", head):
                name = path.relative_to(ROOT).as_posix()
                assert set(re.findall(r"\d\d", numbers[1])) == about.get(name, set()), name


def all_sources() -> set[str]:
    return {source for lesson in LESSONS for source in lesson.sources}


def test_every_term_of_the_glossary_has_a_chinese_one_and_a_lesson() -> None:
    rows = [line.split("|")[1:-1] for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    terms = [[cell.strip() for cell in row] for row in rows[2:]]
    assert len(terms) > 50
    for term, chinese, what, lesson in terms:
        assert term and what and find(lesson)
        assert re.search(r"[\u4e00-\u9fff]", chinese) or chinese.startswith("top-k"), term
    assert {row[3] for row in terms} == {lesson.number for lesson in LESSONS}


def test_every_lesson_has_a_fault_to_find() -> None:
    assert {fault.lesson for fault in FAULTS} == {lesson.number for lesson in LESSONS}
