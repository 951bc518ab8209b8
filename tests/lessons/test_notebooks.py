"""The notebooks: each is what its source says, short, without an error, and quotes no code of the package.

`make test` executes two of them as well, and `make test-thorough` all; of the others a stamp says what they were when
they were last executed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from teachllm_lessons.build import FOLDER, execute, inputs, read, sources, stamp, stamps
from teachllm_lessons.exercise import VERDICT_TYPE
from teachllm_lessons.faults import FAULTS, ROOT
from teachllm_lessons.predict import PREDICTION_TYPE
from teachllm_lessons.source import Source
from tests.thorough import only_thorough

MAX_CELLS = 30
MAX_QUOTED = 4  # lines in a row
BEATS = ("Question", "Show", "Step", "Predict", "Build", "Break", "Measure")


def made(source: Path) -> Any:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def is_left_to_the_reader(cell: Any) -> bool:
    return "skip-execution" in cell.metadata.get("tags", ())


def whole_text(notebook: Any) -> str:
    """Return the sources and the textual outputs of all cells."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output.get("text", "") for output in outputs]
    for output in outputs:
        shown += [text for kind, text in output.get("data", {}).items() if kind in ("text/plain", "text/markdown")]
    return "\n".join([cell.source for cell in notebook.cells] + shown)


of_each = pytest.mark.parametrize("source", sources(), ids=lambda source: source.stem)


@of_each
def test_it_is_what_its_source_says(source: Path) -> None:
    again = "python -m teachllm_lessons.build"
    assert inputs(made(source)) == inputs(read(source)), f"{source.name} has been changed: run {again}"


@of_each
def test_it_has_been_executed_as_it_is_now(source: Path) -> None:
    again = f"python -m teachllm_lessons.build {source.name[:2]}"
    assert stamps().get(source.stem) == stamp(source), f"its source or helpers have changed: run {again}"


def shown_sources(source: Path) -> list[Source]:
    """Return what the calls of `show` in a lesson show today; what they name is imported at the lesson's top level."""
    tree, names = ast.parse(source.read_text(encoding="utf-8")), dict[str, Any]()
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), str(source), "exec"), names)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "show"]
    return [eval(compile(ast.Expression(call), str(source), "eval"), names) for call in calls]


@of_each
def test_it_shows_the_code_as_it_is_now(source: Path) -> None:
    text, again = whole_text(made(source)), f"python -m teachllm_lessons.build {source.name[:2]}"
    for shown in shown_sources(source):
        assert "\n".join(shown.lines) in text, f"{shown.where} has been changed: run {again}"


@of_each
def test_it_is_short_and_has_been_run_without_an_error(source: Path) -> None:
    cells = made(source).cells
    assert len(cells) <= MAX_CELLS
    for cell in cells:
        if cell.cell_type == "code" and not is_left_to_the_reader(cell):
            assert cell.execution_count is not None
            assert not [output for output in cell.outputs if output.output_type == "error"]


@of_each
def test_it_has_all_the_beats_in_order(source: Path) -> None:
    headings = re.findall(r"^## (\w+)", "\n".join(cell.source for cell in made(source).cells), re.MULTILINE)
    assert [heading for heading in headings if heading in BEATS] == list(BEATS)


@of_each
def test_faults_are_revealed_by_the_reader_alone(source: Path) -> None:
    revealing = [cell for cell in made(source).cells if cell.cell_type == "code" and ".reveal()" in cell.source]
    assert revealing
    for cell in revealing:
        assert is_left_to_the_reader(cell) and cell.execution_count is None and not cell.outputs


@of_each
def test_no_cell_tells_what_is_wrong_with_an_engine_that_has_a_fault(source: Path) -> None:
    said = " ".join(whole_text(made(source)).split())
    for fault in FAULTS:
        if fault.id in re.findall(r'plant\("(\w+)"\)', said):
            for told in (fault.name, fault.after, fault.happens, fault.test.partition("::")[2]):
                assert " ".join(told.split()) not in said, f"{source.stem} tells of {fault.id}: {told.strip()}"


@of_each
def test_a_prediction_shows_nothing_until_the_reader_has_a_number(source: Path) -> None:
    cells = made(source).cells
    (at,) = (number for number, cell in enumerate(cells) if "yours = None" in cell.source.splitlines())
    (output,) = cells[at].outputs  # nothing is printed beside it
    assert output.data[PREDICTION_TYPE] == {"verdict": "open"}
    assert cells[at + 1].source.startswith("## Build")  # why it is so is told with the verdict, not in the next cell


@of_each
def test_its_first_cell_of_code_says_how_to_install_and_start(source: Path) -> None:
    first = next(cell for cell in made(source).cells if cell.cell_type == "code")
    assert "make lessons" in first.source and f"teachllm lesson open {source.name[:2]}" in first.source
    assert "install --editable" in first.source and not first.outputs


@of_each
def test_its_links_lead_somewhere(source: Path) -> None:
    text = "\n".join(cell.source for cell in made(source).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) >= 5
    for link in links:
        path, _, anchor = link.partition("#")
        assert (FOLDER / path).exists(), link
        assert not anchor or anchor in anchors_of(FOLDER / path), link
    assert not re.search(r"(?<!\[)\blesson \d\d\b|\*Next: \d|(?<![(\[/])docs/\w+\.md", text)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a Markdown page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings}


@of_each
def test_what_is_to_be_written_is_left_to_the_reader(source: Path) -> None:
    verdicts = [
        output.data[VERDICT_TYPE]["verdict"]
        for cell in made(source).cells
        for output in cell.get("outputs", ())
        if VERDICT_TYPE in output.get("data", {})
    ]
    assert verdicts and set(verdicts) == {"unwritten"}


def lines_of(text: str) -> list[str]:
    """Lines that say something, without what makes no difference to a reader."""
    stripped = (re.sub(r"\s+", " ", line.partition("#")[0]).strip() for line in text.splitlines())
    return [line for line in stripped if len(line) > 3]


def runs(lines: list[str]) -> set[tuple[str, ...]]:
    length = MAX_QUOTED + 1
    return {tuple(lines[at : at + length]) for at in range(len(lines) - length + 1)}


@pytest.fixture(scope="module")
def package_runs() -> set[tuple[str, ...]]:
    wings = ("teachllm", "kernels/teachllm_kernels", "cli/teachllm_cli", "webui/teachllm_webui")
    paths = [path for wing in wings for path in (ROOT / wing).rglob("*.py")]
    return set().union(*(runs(lines_of(path.read_text(encoding="utf-8"))) for path in paths))


@of_each
def test_no_cell_holds_a_copy_of_the_package(source: Path, package_runs: set[tuple[str, ...]]) -> None:
    for cell in made(source).cells:
        if cell.cell_type == "code":  # outputs are printed live, so they are what the package says
            quoted = runs(lines_of(cell.source)) & package_runs
            assert not quoted, f"show the source instead: {quoted}"


def test_a_copy_would_be_noticed(package_runs: set[tuple[str, ...]]) -> None:
    text = (ROOT / "teachllm/core/prefix_cache.py").read_text(encoding="utf-8")
    start = text.index("    content = parent")
    copied = "\n".join(line.strip() for line in text[start:].splitlines()[:6])
    assert runs(lines_of(copied)) & package_runs


def test_every_source_has_a_notebook_and_every_notebook_a_source() -> None:
    notebooks = {path.stem for path in FOLDER.glob("*.ipynb")}
    assert {source.stem for source in sources()} == notebooks == stamps().keys()


@only_thorough
@of_each
def test_it_runs_from_its_top_after_its_cells_ran_in_reverse_order_and_then_once_more(source: Path) -> None:
    notebook = read(source)
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and not is_left_to_the_reader(cell)]
    backwards = [nbformat.v4.new_code_cell(cell.source, metadata={"tags": ["raises-exception"]}) for cell in code[::-1]]
    twice = [nbformat.v4.new_code_cell(cell.source) for _ in range(2) for cell in code]
    notebook.cells = backwards + twice
    execute(notebook, FOLDER)  # raises where a cell of a pass from the top fails
    failed = [output for cell in backwards for output in cell.get("outputs", ()) if output.output_type == "error"]
    assert {output.ename for output in failed} <= {"NameError"}  # of what a cell above would have made
