"""`teachllm lesson`: what there is, and what it says of a reader's notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat.sign import NotebookNotary

from teachllm_lessons import index
from teachllm_lessons.exercise import VERDICT_TYPE
from tests.thorough import THOROUGH

PIECE = """
from teachllm_lessons.exercise import Exercise, check, require

def contract(piece):
    require(piece(2) == 4, f"double(2) is {piece(2)}, not 4")
    return 1

DOUBLE = Exercise("99", "double", contract, lambda piece: "It ran.", lambda x: 2 * x, ("a", "b", "c"))
"""


def saved(folder: Path, *cells: str) -> str:
    path = folder / "mine.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), path)
    return str(path)


def test_the_list_has_every_lesson(teachllm: Any) -> None:
    result = teachllm("lesson", "list")
    assert result.exit_code == 0
    for lesson in index.LESSONS:
        assert f"{lesson.number}  {lesson.concept[:12]}" in result.stdout


@pytest.mark.skipif(not THOROUGH, reason="starts a kernel: make test-thorough")
def test_a_saved_notebook_is_run_and_its_pieces_are_judged(teachllm: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, PIECE, "check(DOUBLE, lambda x: x + x)", "check(DOUBLE, lambda x: x * x + 1)")
    before = Path(path).read_bytes()
    result = teachllm("lesson", "check", "05", "--notebook", path)
    assert result.exit_code == 1, result.stderr  # one does not hold
    said = " ".join(result.stdout.split())
    assert "✓ double keeps its contract in 1 cases. It ran." in said
    assert "✗ double double(2) is 5, not 4" in said
    assert Path(path).read_bytes() == before


def test_every_piece_of_a_notebook_has_a_line_and_one_that_does_not_hold_is_exit_code_1(
    teachllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = {"right": "keeps its contract in 1 cases.\nIt ran.", "wrong": "double(2) is 5, not 4"}

    def execute(notebook: Any, folder: Path, on_cell: Any) -> None:
        for cell, (verdict, text) in zip(notebook.cells, says.items(), strict=False):
            data = {VERDICT_TYPE: {"exercise": "double", "verdict": verdict, "says": text}}
            cell.outputs = [nbformat.v4.new_output("display_data", data)]

    monkeypatch.setattr("teachllm_lessons.saved.execute", execute)
    result = teachllm("lesson", "check", "05", "--notebook", saved(tmp_path, "check(...)", "check(...)"))
    assert result.exit_code == 1
    assert result.stdout.splitlines() == ["✓ double keeps its contract in 1 cases.", "✗ double double(2) is 5, not 4"]
    assert teachllm("lesson", "check", "05", "--notebook", saved(tmp_path, "check(...)")).exit_code == 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            CellExecutionError("", "ZeroDivisionError", "division by zero"),
            "mine.ipynb: cell 2 of 3 (x = 1 / 0) fails: ZeroDivisionError: division by zero",
        ),
        (
            CellTimeoutError("too long"),
            "mine.ipynb: cell 2 of 3 (x = 1 / 0) was still running after 1500 seconds: does",
        ),
        (DeadKernelError("Kernel died"), "mine.ipynb: cell 2 of 3 (x = 1 / 0) ends the process that runs the notebook"),
        (None, "mine.ipynb: no cell shows what check(...) says: put the notebook back as it was"),
    ],
    ids=["fails", "hangs", "dies", "no check"],
)
def test_what_cannot_be_judged_is_said_in_a_line(
    teachllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, said: str
) -> None:
    def execute(notebook: Any, folder: Path, on_cell: Any) -> None:
        on_cell(1)
        if error is not None:
            raise error

    monkeypatch.setattr("teachllm_lessons.saved.execute", execute)
    result = teachllm("lesson", "check", "05", "--notebook", saved(tmp_path, "1", "# a\n\nx = 1 / 0", "2"))
    assert result.exit_code == 1
    assert said in " ".join(result.stderr.split())


def test_a_wrong_number_and_a_file_that_is_not_there_are_named(
    teachllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no lesson '99': choose one of 00, 01" in " ".join(teachllm("lesson", "open", "99").stderr.split())
    result = teachllm("lesson", "check", "05", "--notebook", str(tmp_path / "none.ipynb"))
    assert result.exit_code == 1 and "not a notebook that can be read" in " ".join(result.stderr.split())
    monkeypatch.setattr(index, "FOLDER", tmp_path)
    result = teachllm("lesson", "open", "5")
    assert result.exit_code == 1 and "clone it" in " ".join(result.stderr.split())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Return what is started in Jupyter's place; signatures go to a folder of the test's."""
    commands: list[list[str]] = []
    monkeypatch.setattr("subprocess.call", lambda command, cwd: commands.append(command) or 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    return commands


def test_open_starts_jupyter_where_the_links_of_notebooks_lead_somewhere(
    teachllm: Any, started: list[list[str]]
) -> None:
    for arguments in (["05"], [], ["--port", "8889"], ["5", "--port", "8889"]):
        assert teachllm("lesson", "open", *arguments).exit_code == 0
    jupyter = ["-m", "jupyterlab", f"--ServerApp.root_dir={index.ROOT}"]
    page = "--LabApp.default_url=/lab/tree/lessons"
    assert [command[1:] for command in started] == [
        [*jupyter, f"{page}/05_prefix_caching.ipynb"],
        [*jupyter, page],
        [*jupyter, page, "--port", "8889"],
        [*jupyter, f"{page}/05_prefix_caching.ipynb", "--port", "8889"],
    ]


def test_open_signs_the_notebooks_so_that_jupyter_shows_their_pictures(
    teachllm: Any, started: list[list[str]], tmp_path: Path
) -> None:
    path = index.find("05").notebook
    notary = NotebookNotary(data_dir=str(tmp_path))
    assert not notary.check_signature(nbformat.read(path, as_version=4))
    assert teachllm("lesson", "open", "05").exit_code == 0
    assert notary.check_signature(nbformat.read(path, as_version=4))
