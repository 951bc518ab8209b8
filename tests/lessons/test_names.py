"""Every name of the project that a lesson uses is there: a rename that breaks a notebook is found without executing it.

Notebooks are what their sources say (`test_notebooks.py`), so the sources are read. Checked are imports, dotted paths
that begin with an imported name, the keywords of calls of such a path, and the attributes of variables that are only
ever bound to instances of one imported class.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from teachllm_lessons.build import FOLDER, sources
from teachllm_lessons.faults import FAULTS

OURS = ("teachllm", "teachllm_kernels", "teachllm_cli", "teachllm_webui", "teachllm_lessons", "tests")
FILES = [*sources(), *sorted((FOLDER / "teachllm_lessons").rglob("*.py"))]


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in OURS


def find(module: str, name: str) -> Any:
    """Return what `from module import name` gives."""
    found = importlib.import_module(module)
    return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")


def imported(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the names that imports of the project bind, with what they stand for; fail where one is not there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and is_ours(node.module):
            for alias in node.names:
                yield alias.asname or alias.name, find(node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in filter(lambda alias: is_ours(alias.name), node.names):
                module = importlib.import_module(alias.name)
                root = alias.name.partition(".")[0]
                yield (alias.asname, module) if alias.asname else (root, importlib.import_module(root))


def assigned(tree: ast.AST) -> set[str]:
    """Return the names that something else than an import binds, somewhere in the file."""
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    return stored | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def resolve(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return what a dotted path stands for, or None where it does not begin with an imported name."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := resolve(node.value, names)) is not None:
        return getattr(owner, node.attr)
    return None


def instances(tree: ast.AST, names: dict[str, Any]) -> dict[str, type]:
    """Return the classes of variables that are only ever bound to a call of one imported class."""
    bound: dict[str, list[Any]] = {}
    for node in ast.walk(tree):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.withitem) and node.optional_vars:
            pairs = [(node.optional_vars, node.context_expr)]
        for target, value in pairs:
            if isinstance(target, ast.Name) and isinstance(value, ast.Call):
                bound.setdefault(target.id, []).append(resolve(value.func, names))
    stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return {
        name: made[0]
        for name, made in bound.items()
        if len(made) == stored.count(name) and len(set(made)) == 1
        if inspect.isclass(made[0]) and is_ours(made[0].__module__)
    }


@cache
def attributes(made: type) -> set[str]:
    """Return the names of what instances of a class have: of its body, and what its methods set."""
    found = set(dir(made))
    for base in filter(lambda base: is_ours(base.__module__), made.__mro__):
        found |= set(inspect.get_annotations(base))
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return found


def check_keywords(call: ast.Call, names: dict[str, Any]) -> None:
    """Fail if a call of an imported function or class has a keyword that it does not take."""
    called = resolve(call.func, names)
    if called is None or not is_ours(getattr(called, "__module__", None) or ""):
        return
    try:
        parameters = inspect.signature(called).parameters
    except ValueError:  # of an exception, which has no signature of its own
        return
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        given = {keyword.arg for keyword in call.keywords if keyword.arg}
        assert given <= parameters.keys(), f"{ast.unparse(call.func)} takes no {given - parameters.keys()}"


def check(text: str) -> None:
    """Fail if a file uses a name of the project that is not there."""
    tree = ast.parse(text)
    names = dict(imported(tree))
    for name in assigned(tree):
        names.pop(name, None)
    classes = instances(tree, names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            resolve(node, names)
            if isinstance(node.value, ast.Name) and (made := classes.get(node.value.id)):
                assert node.attr in attributes(made), f"{made.__name__} has no {node.attr}"
        elif isinstance(node, ast.Call):
            check_keywords(node, names)
    for module, name in re.findall(r"[\"'](teachllm_lessons[\w.]*):(\w+)[\"']", text):
        find(module, name)
    planted = set(re.findall(r'plant\("([^"]+)"\)', text.replace("\n#", "")))
    assert planted <= {fault.id for fault in FAULTS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_every_name_that_a_lesson_uses_is_there(path: Path) -> None:
    check(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text",
    [
        "import teachllm.core.gone",
        "from teachllm.core.policy import Gone",
        "import teachllm.core.policy\nteachllm.core.policy.Priority.gone",
        "from teachllm.core import policy\nprint(policy.Gone())",
        "from teachllm_lessons.watch import Watch\nWatch.gone",
        "from teachllm_lessons.watch import Watch\nwatch = Watch()\nwatch.gone",
        "from teachllm_lessons.breaking import plant\nplant(fault='05a')",
        "from teachllm_lessons.breaking import plant\nplant('x').symptom('teachllm_lessons.helpers.lesson_05:gone')",
        'from teachllm_lessons.breaking import plant\nplant("no such fault")',
    ],
)
def test_a_name_that_has_gone_is_noticed(text: str) -> None:
    with pytest.raises((ImportError, AttributeError, AssertionError)):
        check(text)
