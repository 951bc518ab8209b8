"""The project's private words are gone: no module, class, function, attribute or argument bears an old name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.test_import_rules import MODULES

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tests", "benchmarks", "training")

# Old names by the package in which they meant what has another name now; "" stands for all of the project. A hyphen
# breaks a name that `git grep -w` must find nowhere.
OLD_NAMES: dict[str, str] = {
    "": "awake seconds_aw-ake borrowed one_shot_s-um few_rows_lin-ear fixed_lin-ear grouped_linear making "
    "prompt_sco-res weigh-ty hold_co-des codes Codes taps speaks _awaited own_log-its compute_logits own_lm_log-its "
    "lm_logits Pieces "
    "ITS_O-WN Door Front _Li-fe Told Place Share Slice Un-summed Mail-box _STRAN-GER _DO-UBT _FE-W _MO-MENT "
    "_WORTH_A_WO-RD",
    "teachllm.core": "gap",
    "teachllm.layers": "onto stream share wanted ending",
    "teachllm.models": "onto stream share serve wanted ending",
    "teachllm.quantization": "onto stream",
    "teachllm.distributed": "serve share Cut",
    "teachllm.worker": "serve learn expect share wanted ending",
    "teachllm.engine": "serve learn",
    "teachllm.server": "Layout",
    "teachllm.spec_decode": "share",
    "teachllm.trace": "share",
    "teachllm_kernels": "onto",
}
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def names_of(module: str, path: Path) -> list[tuple[str, str]]:
    """Return (name, qualified name) of everything that a file defines, and of itself."""
    found = [(module.rpartition(".")[2], module)]

    def visit(node: ast.AST, inside: str, is_local: bool) -> None:
        for child in ast.iter_child_nodes(node):
            below, is_inner = inside, is_local
            if isinstance(child, _DEFINITIONS):
                below, is_inner = f"{inside}.{child.name}", not isinstance(child, ast.ClassDef)
                found.append((child.name, below))
            elif isinstance(child, ast.arg):
                found.append((child.arg, f"{inside}({child.arg})"))
            elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
                found.append((child.attr, f"{inside}: {child.attr}"))
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store) and not is_local:
                found.append((child.id, f"{inside}.{child.id}"))
            visit(child, below, is_inner)

    visit(ast.parse(path.read_text(encoding="utf-8")), module, is_local=False)
    return found


def test_no_definition_bears_an_old_name() -> None:
    others = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    files = MODULES | {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in others}
    old_names = {package: set(names.replace("-", "").split()) for package, names in OLD_NAMES.items()}
    found = []
    for module, path in files.items():
        packages = [package for package in old_names if not package or f"{module}.".startswith(f"{package}.")]
        old = set().union(*(old_names[package] for package in packages))
        if not old.isdisjoint(re.findall(r"\w+", path.read_text(encoding="utf-8"))):  # most need no parser
            found += [qualified for name, qualified in names_of(module, path) if name in old]
    assert not found, "\n".join(found)


def test_an_old_name_would_be_found(tmp_path: Path) -> None:
    source = "class Door:\n    codes: int\n    async def learn(self, gap):\n        self.taps = speaks = gap\n"
    (tmp_path / "awake.py").write_text(source)
    found = {name for name, _ in names_of("teachllm.awake", tmp_path / "awake.py")}
    assert found == {"awake", "Door", "codes", "learn", "self", "gap", "taps"}  # a local variable may have any name
