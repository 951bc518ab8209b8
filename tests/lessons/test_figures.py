"""The figures of the notebooks can be read: contrast in both themes, no label covered or cut off, no wider than a page.

WCAG 2.1 AA: text has a contrast of at least 4.5 to 1 against what is under it (1.4.3); lines, bars and the borders of
cells have 3 to 1 against the paper (1.4.11). A browser resolves the colors, as a reader's would.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from teachllm_lessons.build import sources
from teachllm_lessons.picture import Picture, axes

PAGE_WIDTH = 760.0  # points: what fits beside a cell's number
EXAMINE = Path(__file__).with_name("examine_figures.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tabs(browser: Any) -> dict[str, Any]:
    """Open one tab per theme."""
    return {scheme: browser.new_page(color_scheme=scheme) for scheme in ("light", "dark")}


def figures_of(source: Path) -> list[str]:
    """Return the figures of a made notebook, as SVG elements."""
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    found = [output.data["image/svg+xml"] for output in outputs if "image/svg+xml" in output.get("data", {})]
    return [each[each.index("<svg") :] for each in found]


def faults(tab: Any, figures: list[str]) -> list[str]:
    """Return what is wrong with figures, one line per fault."""
    tab.set_content(f"<meta charset=utf-8><body>{''.join(figures)}</body>")
    found = tab.evaluate(EXAMINE, PAGE_WIDTH)
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.stem)
def test_its_figures_can_be_read_in_light_and_in_dark(source: Path, tabs: dict[str, Any]) -> None:
    figures = figures_of(source)
    assert figures
    for scheme, tab in tabs.items():
        assert faults(tab, figures) == [], scheme


def test_figures_say_in_words_what_they_show() -> None:
    for source in sources():
        for figure in figures_of(source):
            found = re.search(r'aria-label="([^"]*)"', figure)
            assert found and len(found[1]) > 20 and re.search(r"\d", found[1]), f"{source.stem}: {found and found[1]}"


def badly_drawn() -> str:
    """Draw a figure with each kind of fault."""
    from matplotlib.patches import Rectangle

    figure, ax = axes(12, 2)
    ax.set_xlim(0, 10)
    ax.set_ylim(0, 1)
    ax.text(1, 0.5, "too pale", color="#cccccc")
    ax.text(3, 0.5, "covered", color="#000000", zorder=1)
    ax.add_patch(Rectangle((2.9, 0.4), 1, 0.4, facecolor="#1a7f37", zorder=2))
    ax.text(5, 0.5, "one upon", color="#000000")
    ax.text(5.1, 0.5, "another", color="#000000")
    ax.text(9.9, 0.5, "cut off at the edge", color="#000000", in_layout=False)
    ax.plot([0, 10], [0.1, 0.1], color="#ffff99")
    ax.add_patch(Rectangle((7, 0.4), 0.5, 0.4, facecolor="#fafad2"))
    return Picture(figure, "faults")._repr_svg_()


def test_each_kind_of_fault_is_found(tabs: dict[str, Any]) -> None:
    figure = badly_drawn()
    found = faults(tabs["light"], [figure[figure.index("<svg") :]])
    kinds = {each.partition(":")[0] for each in found}
    assert kinds == {
        "pale text",
        "covered text",
        "overlapping texts",
        "text cut off",
        "pale line",
        "pale patch",
        "too wide",
    }
