"""Random mutants: small faults on lines that the tests execute, each tried against a test suite.

    coverage run ... -m pytest; coverage json -o coverage.json
    python tests/random_mutants.py --seed 1 --count 30 --coverage coverage.json [--root CHECKOUT] [--only 3,7]

Coverage shows that a line ran, not that a test would notice if it were wrong. A mutant changes one comparison,
operator, constant, boolean or call on an executed line of `core`, `worker` or `sampling`. One that no test finds is
printed with its place: either the change makes no difference, or a test is missing.

Source: DeMillo, Lipton and Sayward, "Hints on Test Data Selection", 1978.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS_OF_A_TEST = 240  # one that waits for longer hangs, and so finds the mutant; its own waits end before
FOLDERS = ("teachllm/core", "teachllm/worker", "teachllm/sampling")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed line: the file from the root, the line's number, and the line before and after."""

    path: str
    line: int
    before: str
    after: str


def changes(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield faulty replacements of one node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        yield ast.Call(ast.Name("max" if node.func.id == "min" else "min"), node.args, node.keywords)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    elif isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        yield ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)


def mutants(root: Path, path: str, lines: set[int]) -> Iterator[Mutant]:
    """Yield every mutant of a file that changes one executed line."""
    text = (root / path).read_text(encoding="utf-8")
    rows = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        line = getattr(node, "lineno", None)
        if line is None or line not in lines or node.end_lineno != line or not rows[line - 1].isascii():
            continue
        for faulty in changes(node):
            before, new = rows[line - 1], ast.unparse(ast.fix_missing_locations(faulty))
            if isinstance(faulty, ast.expr) and not isinstance(faulty, ast.Constant | ast.Name | ast.Call):
                new = f"({new})"
            yield Mutant(path, line, before, before[: node.col_offset] + new + before[node.end_col_offset :])


def choose(root: Path, coverage: Path, seed: int, count: int) -> list[Mutant]:
    """Return mutants spread evenly over the executed lines of `FOLDERS`."""
    files = json.loads(coverage.read_text())["files"]
    found: dict[tuple[str, int], list[Mutant]] = {}
    for path, entry in sorted(files.items()):
        path = os.path.relpath(path, root) if os.path.isabs(path) else path
        if path.startswith(FOLDERS):
            for mutant in mutants(root, path, set(entry["executed_lines"])):
                found.setdefault((mutant.path, mutant.line), []).append(mutant)
    rng = random.Random(seed)
    return [rng.choice(found[place]) for place in rng.sample(sorted(found), count)]


def is_found(root: Path, mutant: Mutant, workers: int, tests: list[str]) -> str:
    """Return the first failing test, or nothing, when the suite runs in a copy with the mutant in it."""
    with tempfile.TemporaryDirectory() as name:
        subprocess.run(["git", "clone", "-q", str(root), name], check=True)
        file = Path(name, mutant.path)
        rows = file.read_text(encoding="utf-8").splitlines(keepends=True)
        assert rows[mutant.line - 1].rstrip("\n") == mutant.before
        rows[mutant.line - 1] = mutant.after + "\n"
        file.write_text("".join(rows), encoding="utf-8")
        paths = [name, *(f"{name}/{wing}" for wing in ("kernels", "cli", "webui", "lessons"))]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-n", str(workers), "--dist", "worksteal"),
                *("-o", f"faulthandler_timeout={SECONDS_OF_A_TEST}", "-o", "faulthandler_exit_on_timeout=true", *tests),
            ],
            cwd=name,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
        said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return "" if done.returncode == 0 else (said or done.stdout.splitlines()[-1:])[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--coverage", type=Path, required=True, help="of the suite, as `coverage json` writes it")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose tests are tried")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", help="numbers of the mutants to try, with commas between them")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    parser.add_argument("tests", nargs="*", help="files or folders, in order; all by default")
    options = parser.parse_args()
    chosen = choose(options.root, options.coverage, options.seed, options.count)
    only = {int(each) for each in options.only.split(",")} if options.only else set(range(1, len(chosen) + 1))
    num_missed = 0
    print(f"seed {options.seed}: {len(chosen)} mutants")
    for number, mutant in enumerate(chosen, 1):
        print(f"{number:3} {mutant.path}:{mutant.line}")
        print(f"      {mutant.before.strip()}\n   -> {mutant.after.strip()}", flush=True)
        if number in only and not options.list:
            found = is_found(options.root, mutant, options.workers, options.tests)
            num_missed += not found
            print(f"    {found or 'NOT FOUND'}", flush=True)
    if not options.list:
        print(f"{len(only) - num_missed} of {len(only)} found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
