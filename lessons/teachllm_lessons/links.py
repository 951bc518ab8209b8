"""The links of a notebook: to its sources, to its preset in the visualizer, to other lessons and to the documentation.

A lesson's source names them ("lesson 06", "docs/server.md"); the notebook that is made from it links them.
"""

from __future__ import annotations

import re

from teachllm_lessons.index import FOLDER, Lesson, find

# A notebook that is opened in a kernel without the project installs it there.
INSTALL = """\
# `make lessons` installs everything and starts Jupyter; `teachllm lesson open {number}` opens this notebook. In a
# kernel without the project this cell installs it from the clone that the notebook is in: restart the kernel after it.
from importlib.util import find_spec

if find_spec("teachllm_lessons") is None:
    from IPython import get_ipython

    get_ipython().run_line_magic("pip", "install --editable ..[lessons]")
"""


def install_cell(lesson: Lesson) -> str:
    """Return the code of a notebook's first cell, which says how to install and start, and installs if need be."""
    return INSTALL.format(number=lesson.number).rstrip("\n")


def head(lesson: Lesson) -> str:
    """Return the links that stand below a lesson's introduction, as Markdown."""
    labelled = zip(lesson.source_labels, lesson.sources, strict=True)
    sources = ", ".join(f"[`{label}`](../{source})" for label, source in labelled)
    preset = f" --preset {lesson.preset}" if lesson.preset else ""
    return "\n".join(
        [
            f"- **Source:** {sources}",
            f"- **Watch it live:** `teachllm viz{preset}{lesson.viz_flags}`, [{lesson.viz_shows}]({lesson.viz_link})",
            "- **More:** [all lessons](README.md), [glossary](GLOSSARY.md)",
        ]
    )


def linked(text: str) -> str:
    """Return a Markdown cell with what it names as links: other lessons, and files of the documentation."""
    text = re.sub(r"\*Needs: .*?\. About", lambda found: _numbers(found[0]), text, flags=re.DOTALL)
    text = re.sub(r"(?<=\*Next: )(\d\d)(, [^*]*?)(?=\.\*)", lambda found: _link(found[1], found[1] + found[2]), text)
    text = re.sub(r"(?<!\[)\blesson (\d\d)\b", lambda found: _link(found[1], found[0]), text)
    text = re.sub(r"\blessons (\d\d) and (\d\d)\b", lambda found: _numbers(found[0]), text)
    return re.sub(r"`?(?<![(\w/])docs/(\w+\.md)\b`?", _document, text)


def _numbers(text: str) -> str:
    return re.sub(r"(?<!\[)\b\d\d\b(?=[ ,.]|$)(?! minutes)", lambda found: _link(found[0], found[0]), text)


def _link(number: str, text: str) -> str:
    return f"[{text}]({find(number).name}.ipynb)"


def _document(found: re.Match[str]) -> str:
    assert (FOLDER.parent / "docs" / found[1]).exists(), f"a lesson names docs/{found[1]}, which is not there"
    return f"[docs/{found[1]}](../docs/{found[1]})"
