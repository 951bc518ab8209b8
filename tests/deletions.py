"""Delete each statement of a file, one at a time, and print which deletions no test notices.

    python -m tests.deletions teachllm/models/my_family.py -- tests/models/test_new_families.py

Imports, docstrings and annotations are left in. The trials run in a copy of the checkout, which is never changed. A
deletion is noticed if a test fails, if the code no longer runs, or if it never ends. So a statement that defines a name
used later is always noticed: whether its value is right, only a changed value would tell.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from teachllm_lessons.mutants import copy_to, run_test


def deletions(source: str) -> Iterator[tuple[int, int, str]]:
    """Yield (first line, last line, the source without them) for each statement; a body's only one becomes `pass`."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(body, list):
                continue
            kept = [each for each in body if not _is_text(each)]
            for each in kept:
                if isinstance(each, ast.Import | ast.ImportFrom):
                    continue
                decorators = getattr(each, "decorator_list", [])
                first, last = min([each.lineno, *(one.lineno for one in decorators)]), each.end_lineno or each.lineno
                instead = [f"{' ' * each.col_offset}pass\n"] if len(kept) == 1 else []
                yield first, last, "".join([*lines[: first - 1], *instead, *lines[last:]])


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _passes(folder: Path, tests: Sequence[str]) -> bool:
    try:
        return run_test(folder, *tests)[0] == 0
    except subprocess.TimeoutExpired:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("tests", nargs="+", help="arguments of pytest, after --")
    args = parser.parse_args(arguments)
    source, num_green = args.file.read_text(encoding="utf-8"), 0
    with tempfile.TemporaryDirectory(prefix="teachllm-deletions-") as name:
        folder = Path(name)
        copy_to(folder)
        code, words = run_test(folder, *args.tests)
        if code:
            parser.error(f"the tests fail before anything is deleted: {words}")
        trials = sorted(set(deletions(source)))
        for number, (first, last, changed) in enumerate(trials, 1):
            print(f"{number} of {len(trials)}: {args.file}:{first}", file=sys.stderr, flush=True)
            (folder / args.file).write_text(changed, encoding="utf-8")
            if _passes(folder, args.tests):
                num_green += 1
                print(f"{args.file}:{first}-{last} is not missed: {source.splitlines()[first - 1].strip()}", flush=True)
    print(f"{len(trials)} deletions, {num_green} of them not noticed")
    return int(num_green > 0)


if __name__ == "__main__":
    sys.exit(main())
