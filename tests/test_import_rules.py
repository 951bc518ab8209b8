"""Who may import whom: the floors of the house, read from the source with `ast`, and what an import may load."""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import teachllm
from tests.bench.serve.fake_openai import Answer, FakeServer, running
from tests.programs import run_program

ROOT = Path(__file__).resolve().parent.parent
WINGS = {".": "teachllm", "kernels": "teachllm_kernels", "cli": "teachllm_cli"}
WINGS |= {"webui": "teachllm_webui", "lessons": "teachllm_lessons"}
OURS = set(WINGS.values())

PLAIN_DATA = (
    *("teachllm.config", "teachllm.speculative_config", "teachllm.sampling_params", "teachllm.outputs"),
    "teachllm.errors",
)
FROM_ABOVE = (
    *("teachllm", "teachllm.engine", "teachllm.bench", "teachllm.simulator"),
    *("teachllm.core.memory", "teachllm.trace", "teachllm.roofline", *PLAIN_DATA),
)
TENSORS = ("teachllm.layers", "teachllm.distributed", "teachllm.quantization", "teachllm_kernels")
FEATURES = ("teachllm.sampling", "teachllm.spec_decode", "teachllm.structured_output", "teachllm.lora")
A_CHECKPOINT = ("teachllm.checkpoint", "teachllm.models.registry", "teachllm.models.tensor_names")
TO_A_WORKER = ("teachllm.core.scheduler_output", "teachllm.core.memory")
# Floor: what it may import of ours. A name stands for itself and, unless it is `teachllm`, what lies under it.
FLOORS = {
    "teachllm.config": PLAIN_DATA,
    "teachllm.speculative_config": PLAIN_DATA,
    "teachllm.sampling_params": PLAIN_DATA,
    "teachllm.outputs": PLAIN_DATA,
    "teachllm.errors": PLAIN_DATA,
    "teachllm.core": ("teachllm.core", *PLAIN_DATA),
    "teachllm.checkpoint": ("teachllm.checkpoint", *PLAIN_DATA),
    "teachllm.loading": ("teachllm.loading", "teachllm.checkpoint", "teachllm.models", *TENSORS, *PLAIN_DATA),
    "teachllm.layers": (*TENSORS, *PLAIN_DATA),
    "teachllm.sampling": ("teachllm.sampling", *TENSORS, *TO_A_WORKER, *PLAIN_DATA),
    "teachllm.spec_decode": (
        *(
            "teachllm.checkpoint",
            "teachllm.loading",
            "teachllm.spec_decode",
            "teachllm.sampling",
            "teachllm.models",
            "teachllm.layers",
            "teachllm_kernels",
        ),
        *(*TO_A_WORKER, "teachllm.core.request", *PLAIN_DATA),
    ),
    "teachllm.quantization": (*TENSORS, *A_CHECKPOINT, *PLAIN_DATA),
    "teachllm.distributed": (
        "teachllm.distributed",
        "teachllm_kernels.comm.one_shot_all_reduce",
        *TO_A_WORKER,
        *PLAIN_DATA,
    ),
    "teachllm.quantization.algorithms": (
        "teachllm",
        "teachllm.layers.weights",
        "teachllm.quantization",
        *A_CHECKPOINT,
        "teachllm.errors",
    ),
    "teachllm.models": ("teachllm.models", "teachllm.checkpoint", "teachllm.lora", *TENSORS, *TO_A_WORKER, *PLAIN_DATA),
    "teachllm.worker": (
        *("teachllm", "teachllm.worker", "teachllm.models", "teachllm.loading"),
        *(*FEATURES, *TENSORS, *TO_A_WORKER, *PLAIN_DATA),
    ),
    "teachllm.roofline": ("teachllm.models.model_config",),
    "teachllm.trace": ("teachllm.trace", "teachllm.core", *PLAIN_DATA),
    "teachllm.engine": (
        *(
            "teachllm",
            "teachllm.checkpoint",
            "teachllm.engine",
            "teachllm.core",
            "teachllm.worker",
            "teachllm.models",
            "teachllm.roofline",
        ),
        *("teachllm.trace", *FEATURES, *TENSORS, *PLAIN_DATA),
    ),
    "teachllm.simulator": (
        *("teachllm.simulator", "teachllm.core", "teachllm.engine", "teachllm.trace", "teachllm.roofline"),
        *("teachllm.models.model_config", *PLAIN_DATA),
    ),
    "teachllm.server": ("teachllm.server", *FROM_ABOVE),
    "teachllm_kernels": ("teachllm_kernels",),
    "teachllm_cli": (
        *("teachllm_cli", "teachllm.spec_decode", "teachllm.quantization.algorithms"),
        *("teachllm.worker.processes.host", "teachllm.worker.processes.torchrun", *FROM_ABOVE),
    ),
    "teachllm_webui": ("teachllm_webui", *FROM_ABOVE),
}
# Wings that may be imported where they are used, though not at the top of a module.
ON_USE = {"teachllm_cli": ("teachllm_webui", "teachllm_lessons", "teachllm.server")}
CORE_INSTALL = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "jinja2"}
SERVE_EXTRA = {"fastapi", "starlette", "uvicorn", "pydantic", "pydantic_core", "typing_extensions"}
SERVE_EXTRA |= {"prometheus_client", "msgspec"}
OUTSIDE = {
    "teachllm.core": set(),
    **{name: set() for name in PLAIN_DATA},
    "teachllm_kernels": {"torch", "triton"},
    "teachllm.trace": set(),
    "teachllm_cli": {"typer"},
    "teachllm.server": SERVE_EXTRA,
    "teachllm": CORE_INSTALL,
    **{
        f"teachllm.engine.processes.{name}": {"zmq", "msgspec"}
        for name in ("core_client", "core_link", "core_process", "core_messages")
    },
    **{f"teachllm.engine.processes.{name}": {"msgspec"} for name in ("text_process", "text_workers")},
    **{
        f"teachllm.worker.processes.{name}": {"torch", "zmq", "msgspec"}
        for name in ("host", "host_lines", "host_messages", "host_plan", "host_socket", "rank_hosts", "ray_ranks")
    },
}


@dataclass(frozen=True)
class Import:
    """`module` imports `target`; `on_use` when that happens inside a function."""

    module: str
    target: str
    on_use: bool


def modules() -> Iterator[tuple[str, Path]]:
    for folder, package in WINGS.items():
        for path in sorted((ROOT / folder / package).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(modules())


def imports_of(module: str, path: Path) -> Iterator[Import]:
    def visit(node: ast.AST, on_use: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = on_use or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or is_for_types(child)
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(module, alias.name, on_use)
            elif isinstance(child, ast.ImportFrom):
                source = child.module or ""
                if child.level:
                    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
                    base = package.split(".")[: len(package.split(".")) - child.level + 1]
                    source = ".".join([*base, source] if source else base)
                for alias in child.names:
                    full = f"{source}.{alias.name}"
                    yield Import(module, full if full in MODULES else source, on_use)
            yield from visit(child, inside)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), False)


def is_for_types(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:` names types and loads nothing."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@functools.cache
def imports() -> list[Import]:
    """Of all modules; not at once, since every worker of a test run imports this file."""
    return [found for module, path in MODULES.items() for found in imports_of(module, path)]


def lies_under(name: str, floor: str) -> bool:
    return name == floor or (floor != "teachllm" and name.startswith(floor + "."))


def floor_of(module: str, table: dict) -> str | None:
    """The longest name in the table that the module is or lies under."""
    found = [floor for floor in table if module == floor or module.startswith(floor + ".")]
    return max(found, key=len, default=None)


def test_there_are_imports_to_judge() -> None:
    assert len(MODULES) > 20
    assert any(found.on_use for found in imports())


def test_each_floor_imports_only_what_lies_below_it() -> None:
    wrong = []
    for found in imports():
        floor = floor_of(found.module, FLOORS)
        if floor is None or found.target.split(".")[0] not in OURS:
            continue
        allowed = (*FLOORS[floor], *(ON_USE.get(floor, ()) if found.on_use else ()))
        if not any(lies_under(found.target, name) for name in allowed):
            wrong.append(f"{found.module} imports {found.target}")
    assert not wrong, "\n".join(map(str, wrong))


def test_the_engine_knows_neither_commands_nor_pages_nor_lessons() -> None:
    above = OURS - {"teachllm", "teachllm_kernels"}
    wrong = [i for i in imports() if i.module.split(".")[0] == "teachllm" and i.target.split(".")[0] in above]
    assert not wrong, "\n".join(map(str, wrong))


def test_only_what_every_install_has_is_imported_at_the_top_of_a_module() -> None:
    wrong = []
    for found in imports():
        floor, library = floor_of(found.module, OUTSIDE), found.target.split(".")[0]
        if floor is None or found.on_use or library in OURS | sys.stdlib_module_names | OUTSIDE[floor]:
            continue
        wrong.append(f"{found.module} imports {library}")
    assert not wrong, "\n".join(map(str, wrong))


def test_core_and_plain_data_use_the_standard_library_alone_even_inside_functions() -> None:
    for found in imports():
        if floor_of(found.module, OUTSIDE) in ("teachllm.core", *PLAIN_DATA):
            assert found.target.split(".")[0] in sys.stdlib_module_names | {"teachllm"}, found


def test_the_folder_called_kernels_is_no_package() -> None:
    """`import transformers` would run it in place of the library of that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


# What no command loads before it runs. A row is (module to import or command line, what must still be absent).
_ENGINE = ("torch", "transformers", "tokenizers", "numpy", "teachllm.engine.llm_engine", "fastapi")
_LIGHT = ("torch", "transformers", "rich.console")
_HELP = ("torch", "transformers", "numpy")
LOADS = {
    "teachllm": _LIGHT,
    "teachllm.core.scheduler": _LIGHT,
    "teachllm.config": _LIGHT,
    "teachllm_cli.app": _LIGHT,
    "--help": _HELP,
    "chat --help": _HELP,
    "bench latency --help": _HELP,
    "bench serve --help": (*_HELP, "aiohttp", "plotly", "uvloop"),
    "chat --url {url}": _ENGINE,
    "teachllm_webui.page": ("torch",),
    "teachllm_webui.session": ("torch",),
}
_PROGRAM = """
import contextlib, importlib, io, json, sys
loads, url = json.loads(sys.argv[1]), sys.argv[2]
loaded, printed = {}, {}
for what, absent in loads.items():
    if "teachllm" in what:
        try:
            importlib.import_module(what)
        except ModuleNotFoundError as error:
            assert error.name == "gradio", error
    else:
        from teachllm_cli.app import app
        sys.stdin = io.StringIO("Hi")
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            app(what.format(url=url).split(), prog_name="teachllm")
        printed[what] = out.getvalue()
    loaded[what] = [name for name in absent if name in sys.modules]
print(json.dumps([loaded, printed, "httpx2" in sys.modules]))
"""


def test_imports_help_and_asking_a_server_leave_alone_what_they_do_not_need() -> None:
    """Run in one fresh interpreter, one after the other."""
    with running(FakeServer(lambda body: Answer(num_tokens=2))) as url:
        result = run_program("-c", _PROGRAM, json.dumps(LOADS), url, environment={"COLUMNS": "200"})
    assert result.returncode == 0, result.stderr
    loaded, printed, has_client = json.loads(result.stdout)
    assert loaded == {what: [] for what in LOADS}
    assert printed["chat --url {url}"] == " word word\n" and has_client
    assert all(command in printed["--help"] for command in ("chat", "generate", "info"))
    assert "--batch-size" in printed["bench latency --help"]


def test_names_of_the_package_load_on_first_use_and_a_wrong_one_is_named() -> None:
    assert teachllm.SamplingParams.__module__ == "teachllm.sampling_params"
    with pytest.raises(AttributeError, match="module 'teachllm' has no attribute 'LMM'"):
        _ = teachllm.LMM
