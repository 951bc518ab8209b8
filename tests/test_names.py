"""The project's private words are gone: no module, class, function, attribute or argument bears an old name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_import_rules import MODULES

# Old names by the package in which they meant what has another name now; "" stands for all of the project.
OLD_NAMES: dict[str, set[str]] = {
    "": {
        *("awake", "seconds_awake", "borrowed", "one_shot_sum", "few_rows_linear", "fixed_linear", "grouped_linear"),
        *("making", "prompt_scores", "weighty", "hold_codes", "codes", "Codes", "taps", "speaks", "_awaited"),
        *("own_logits", "compute_logits", "own_lm_logits", "lm_logits", "Pieces", "ITS_OWN", "Door", "Front", "_Life"),
        *("Told", "Place", "Share", "Slice", "Unsummed", "Mailbox"),
        *("_STRANGER", "_DOUBT", "_FEW", "_MOMENT", "_WORTH_A_WORD"),
    },
    "teachllm.core": {"gap"},
    "teachllm.layers": {"onto", "stream", "share", "wanted", "ending"},
    "teachllm.models": {"onto", "stream", "share", "serve", "wanted", "ending"},
    "teachllm.quantization": {"onto", "stream"},
    "teachllm.distributed": {"serve", "share", "Cut"},
    "teachllm.worker": {"serve", "learn", "expect", "share", "wanted", "ending"},
    "teachllm.engine": {"serve", "learn"},
    "teachllm.server": {"Layout"},
    "teachllm.spec_decode": {"share"},
    "teachllm.trace": {"share"},
    "teachllm_kernels": {"onto"},
}


def names_of(module: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, qualified name) of everything that a file defines, and of itself."""
    yield module.rpartition(".")[2], module

    def visit(node: ast.AST, inside: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            below = inside
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                below = f"{inside}.{child.name}"
                yield child.name, below
            elif isinstance(child, ast.arg):
                yield child.arg, f"{inside}({child.arg})"
            elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
                yield child.attr, f"{inside}: {ast.unparse(child)}"
            elif isinstance(child, ast.AnnAssign | ast.Assign) and not isinstance(node, ast.FunctionDef):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                names = (each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
                yield from ((name.id, f"{inside}.{name.id}") for name in names)
            yield from visit(child, below)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), module)


@pytest.mark.parametrize("package", OLD_NAMES, ids=lambda package: package or "anywhere")
def test_no_definition_bears_an_old_name(package: str) -> None:
    found = [
        qualified
        for module, path in MODULES.items()
        if not package or module == package or module.startswith(package + ".")
        for name, qualified in names_of(module, path)
        if name in OLD_NAMES[package]
    ]
    assert not found, "\n".join(found)


def test_an_old_name_would_be_found(tmp_path: Path) -> None:
    source = "class Door:\n    codes: int\n    def learn(self, gap):\n        self.taps = gap\n"
    (tmp_path / "awake.py").write_text(source)
    found = {name for name, _ in names_of("teachllm.awake", tmp_path / "awake.py")}
    assert found >= {"awake", "Door", "codes", "learn", "gap", "taps"}
