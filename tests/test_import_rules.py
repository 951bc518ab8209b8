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
    *("teachllm.errors", "teachllm.startup_progress"),
)
FROM_ABOVE = (
    *("teachllm", "teachllm.engine", "teachllm.bench", "teachllm.simulator"),
    *("teachllm.core.memory", "teachllm.trace", "teachllm.roofline", *PLAIN_DATA),
)
TO_A_WORKER = ("teachllm.core.scheduler_output", "teachllm.core.memory")
TENSORS = ("teachllm_kernels", "teachllm.distributed", "teachllm.layers")
A_MODEL = ("teachllm.checkpoint", "teachllm.quantization.formats", "teachllm.models")
# The floors of the house, lowest first: a package, and what it may import of ours besides itself. All of that stands
# before it in this table, so no two packages can import each other. A name stands for itself and, unless it is
# `teachllm`, for what lies under it; None allows all lower floors.
FLOORS: dict[str, tuple[str, ...] | None] = {
    "teachllm": (),  # the version, and names that load on first use: an import of one counts as one of its home
    "teachllm_kernels": (),
    "teachllm.errors": (),
    "teachllm.startup_progress": (),
    "teachllm.sampling_params": (),
    "teachllm.speculative_config": ("teachllm.errors",),
    "teachllm.config": ("teachllm.sampling_params", "teachllm.speculative_config", "teachllm.errors"),
    "teachllm.outputs": ("teachllm.sampling_params",),
    "teachllm.core": PLAIN_DATA,
    "teachllm.trace": ("teachllm.core", *PLAIN_DATA),
    "teachllm.distributed": ("teachllm_kernels.comm.one_shot_all_reduce", *PLAIN_DATA),
    # Formats and models read settings and headers of a checkpoint before a weight is read. So these files stand below
    # both, while `loading`, which fills a model with weights, stands above.
    "teachllm.checkpoint": PLAIN_DATA,
    # `layers/weights/` says what a layer needs of a format (`Scheme`), and formats implement it.
    "teachllm.layers": ("teachllm_kernels", "teachllm.distributed", *PLAIN_DATA),
    "teachllm.quantization.formats": (*TENSORS, "teachllm.checkpoint", *PLAIN_DATA),
    "teachllm.models": (*TENSORS, "teachllm.checkpoint", "teachllm.quantization.formats", *PLAIN_DATA),
    "teachllm.roofline": ("teachllm.models.model_config",),
    "teachllm.loading": (*TENSORS, *A_MODEL, *PLAIN_DATA),
    "teachllm.quantization.algorithms": (
        *("teachllm", "teachllm.layers.weights", "teachllm.quantization.formats", "teachllm.checkpoint"),
        *("teachllm.models.registry", "teachllm.models.tensor_names", "teachllm.errors"),
    ),
    "teachllm.sampling": (*TENSORS, *TO_A_WORKER, *PLAIN_DATA),
    # A drafter is loaded as any model is, and its drafts are verified as the sampler samples: above both of these.
    "teachllm.spec_decode": (
        *("teachllm_kernels", "teachllm.layers", "teachllm.checkpoint", "teachllm.models", "teachllm.loading"),
        *("teachllm.sampling", *TO_A_WORKER, "teachllm.core.request", *PLAIN_DATA),
    ),
    "teachllm.worker": (
        *("teachllm", *TENSORS, *A_MODEL, "teachllm.loading", "teachllm.sampling", "teachllm.spec_decode"),
        *(*TO_A_WORKER, *PLAIN_DATA),
    ),
    "teachllm.engine": (
        *("teachllm", *TENSORS, *A_MODEL, "teachllm.sampling", "teachllm.spec_decode", "teachllm.core"),
        *("teachllm.worker", "teachllm.roofline", "teachllm.trace", *PLAIN_DATA),
    ),
    "teachllm.simulator": (
        *("teachllm.core", "teachllm.engine", "teachllm.trace", "teachllm.roofline", "teachllm.models.model_config"),
        *PLAIN_DATA,
    ),
    # With what compares a quantized model with its original: both run in the engine.
    "teachllm.bench": (
        *("teachllm", "teachllm.core", "teachllm.engine", "teachllm.worker.device", "teachllm.trace"),
        *("teachllm.roofline", "teachllm.models.model_config", "teachllm.quantization.algorithms"),
        *("teachllm.checkpoint", *PLAIN_DATA),
        "teachllm_kernels.kernel_list",
        # To name the kernel or the graph that a step waited for.
        *("teachllm_kernels.first_launch", "teachllm.worker.gpu.cuda_graphs"),
    ),
    "teachllm.server": FROM_ABOVE,
    "teachllm_webui": FROM_ABOVE,
    "teachllm_lessons": None,
    "teachllm_cli": (
        *("teachllm.spec_decode", "teachllm.quantization.algorithms"),
        *("teachllm.worker.processes.host", "teachllm.worker.processes.torchrun", *FROM_ABOVE),
    ),
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
                    home = teachllm._HOMES.get(alias.name, source) if source == "teachllm" else source
                    yield Import(module, full if full in MODULES else home, on_use)
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


def floor_of(module: str) -> str | None:
    """Return the longest name of a floor that the module is or lies under."""
    return max((floor for floor in FLOORS if lies_under(module, floor)), key=len, default=None)


def folder_of(module: str) -> str:
    """Return the package that a module lies in; a module of a wing's own folder stands for itself."""
    is_package = MODULES[module].name == "__init__.py"
    return module if is_package or module.count(".") < 2 else module.rpartition(".")[0]


def outside_of(module: str) -> str | None:
    """Return the longest name in `OUTSIDE` that the module is or lies under."""
    found = [name for name in OUTSIDE if module == name or module.startswith(name + ".")]
    return max(found, key=len, default=None)


def test_there_are_imports_to_judge() -> None:
    assert len(MODULES) > 20
    assert any(found.on_use for found in imports())


def test_every_module_stands_on_a_floor() -> None:
    assert not [module for module in {found.module for found in imports()} if floor_of(module) is None]


def test_a_floor_may_import_only_lower_ones() -> None:
    order = list(FLOORS)
    for floor, allowed in FLOORS.items():
        lower = order[: order.index(floor)]
        assert not [name for name in allowed or () if floor_of(name) not in lower], floor


def test_each_floor_imports_only_what_lies_below_it() -> None:
    wrong, order = [], list(FLOORS)
    for found in imports():
        floor = floor_of(found.module)
        is_ours = found.target.split(".")[0] in OURS and found.module != "teachllm"
        if not is_ours or floor is None or floor == floor_of(found.target):
            continue
        allowed = FLOORS[floor]
        if allowed is None:
            allowed = tuple(order[: order.index(floor)])
        if found.on_use:
            allowed = (*allowed, *ON_USE.get(floor, ()))
        if not any(lies_under(found.target, name) for name in allowed):
            wrong.append(f"{found.module} imports {found.target}")
    assert not wrong, "\n".join(wrong)


def test_no_two_packages_import_each_other() -> None:
    """Imports inside functions and under TYPE_CHECKING count; one by a name made at run time cannot be seen.

    A package and the folders inside of it are one. What `teachllm` itself names loads on first use.
    """
    pairs = {
        (folder_of(found.module), folder_of(found.target))
        for found in imports()
        if found.target in MODULES and "teachllm" not in (found.module, found.target)
    }
    apart = {(a, b) for a, b in pairs if not lies_under(a, b) and not lies_under(b, a)}
    assert not {(a, b) for a, b in apart if (b, a) in apart and a < b}


def test_the_engine_knows_neither_commands_nor_pages_nor_lessons() -> None:
    above = OURS - {"teachllm", "teachllm_kernels"}
    wrong = [i for i in imports() if i.module.split(".")[0] == "teachllm" and i.target.split(".")[0] in above]
    assert not wrong, "\n".join(map(str, wrong))


def test_only_what_every_install_has_is_imported_at_the_top_of_a_module() -> None:
    wrong = []
    for found in imports():
        floor, library = outside_of(found.module), found.target.split(".")[0]
        if floor is None or found.on_use or library in OURS | sys.stdlib_module_names | OUTSIDE[floor]:
            continue
        wrong.append(f"{found.module} imports {library}")
    assert not wrong, "\n".join(map(str, wrong))


def test_core_and_plain_data_use_the_standard_library_alone_even_inside_functions() -> None:
    for found in imports():
        if outside_of(found.module) in ("teachllm.core", *PLAIN_DATA):
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
