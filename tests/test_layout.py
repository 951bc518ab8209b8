"""The size of files and folders, and names that stand for one thing: what keeps the project readable."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WINGS = ("teachllm", "kernels", "cli", "webui", "lessons")
FOLDERS = (*WINGS, "tests", "benchmarks", "training")
MAX_FILES, MAX_LINES, MAX_TEST_LINES = 20, 400, 500


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def too_long(files: list[Path], limit: int) -> list[str]:
    lengths = ((len(path.read_text(encoding="utf-8").splitlines()), path) for path in files)
    return [f"{path.relative_to(ROOT)}: {length} lines" for length, path in lengths if length > limit]


def test_no_folder_has_more_than_20_python_files() -> None:
    folders: dict[Path, int] = defaultdict(int)
    for path in python_files(*FOLDERS):
        folders[path.parent] += 1
    assert not [f"{path.relative_to(ROOT)}: {count}" for path, count in folders.items() if count > MAX_FILES]


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "tests"])
def test_no_file_of_a_package_is_over_400_lines(folder: str) -> None:
    # The source of a notebook is as long as its lesson.
    assert not too_long([path for path in python_files(folder) if not path.stem[:2].isdigit()], MAX_LINES)


def test_no_test_file_is_over_500_lines() -> None:
    assert not too_long(python_files("tests"), MAX_TEST_LINES)


def test_the_name_of_a_public_class_stands_for_one_class() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in python_files(*WINGS):
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE):
            homes[name].append(str(path.relative_to(ROOT)))
    several = {name: places for name, places in homes.items() if len(places) > 1}
    assert not several, "\n".join(f"{name}: {', '.join(places)}" for name, places in sorted(several.items()))
