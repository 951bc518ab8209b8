"""One flag per field of EngineConfig, for every command that starts an engine.

EngineConfig is where a knob is declared, explained and checked. A command that takes an `engine: EngineConfig`
and is decorated with `engine_command` gets a flag for each knob, with the help text from EngineConfig's
docstring, and `--debug`. What goes wrong inside it reaches the user as one line.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from teachllm.config import OBJECTS, EngineConfig
from teachllm.worker.processes.torchrun import works_for_process_0
from teachllm_cli.errors import one_line_errors
from teachllm_cli.options.config_file import take_file

# `seed` is a flag of the request, which fixes its noise whatever else runs; commands print text, so they need
# the tokenizer.
_NOT_FLAGS = {"seed", "skip_tokenizer_init"}
_NAMES = {"trace_path": "--trace", "trace_text": "--trace-text/--trace-no-text"}
_SHORT = {
    "model": "-m",
    "quantization": "-q",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep",
    "nnodes": "-n",
}
_OBJECTS = {"speculative_config": '{"method": "ngram"}', **OBJECTS}  # given as JSON like this


def engine_command(command: Callable[..., None], runs: bool = True) -> Callable[..., None]:
    """Replace the parameter `engine` of a command by the flags that make it, and add `--config` and `--debug`.

    Args:
        runs: the engine does something that could be traced. Where torchrun has started this process and it is not the
            first, it is a rank of the first one's engine in place of the command.
    """
    flags = [flag for flag in _flags() if runs or not flag.name.startswith("trace")]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        values.pop("config")  # has been read, see `config_file.py`
        with one_line_errors(debug=values.pop("debug")):
            engine = EngineConfig(**{flag.name: _read(flag.name, values.pop(flag.name)) for flag in flags})
            if not (runs and works_for_process_0(engine)):
                command(engine=engine, **values)

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "engine"]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in [*own, *flags, _config_flag(), _debug_flag()]]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def given_flags(context: typer.Context) -> list[str]:
    """Those of `engine_command` that were given, be it with their defaults, as --block-size."""
    given = [
        field.name
        for field in fields(EngineConfig)
        if field.name not in _NOT_FLAGS
        and (source := context.get_parameter_source(field.name)) is not None
        and source.name in ("COMMANDLINE", "DEFAULT_MAP")
    ]
    return [_NAMES.get(name, f"--{name.replace('_', '-')}").split("/")[0] for name in given]


def _flags() -> Iterator[inspect.Parameter]:
    types, explained = get_type_hints(EngineConfig), _explanations(EngineConfig.__doc__ or "")
    for field in fields(EngineConfig):
        if field.name in _NOT_FLAGS:
            continue
        section, text = explained.get(field.name, ("Engine", ""))
        kind, name = types[field.name], field.name.replace("_", "-")
        is_on = kind in (bool, bool | None) and field.default is not False
        names = [_NAMES.get(field.name, f"--{name}/--no-{name}" if is_on else f"--{name}")]
        names += [_SHORT[field.name]] if field.name in _SHORT else []
        is_object = field.name in _OBJECTS
        metavar = "JSON" if is_object else None
        option = typer.Option(*names, help=text[:1].upper() + text[1:], rich_help_panel=section, metavar=metavar)
        yield _parameter(field.name, Annotated[str | None if is_object else kind, option], field.default)


def _read(name: str, given: Any) -> Any:
    """Return what a flag's text stands for. Raises as `read_object`."""
    if name not in _OBJECTS or given is None:
        return given
    return read_object(name.replace("_", "-"), given, _OBJECTS[name])


def read_object(name: str, given: str, example: str) -> dict[str, Any]:
    """Return the JSON object that a flag's text is.

    Args:
        name: of the flag, without its dashes.
        example: of such a text.

    Raises:
        ValueError: it is none.
    """
    advice = f"write it like --{name} '{example}', in single quotes"
    try:
        value = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--{name} {given!r} is not JSON ({error}): {advice}") from error
    if not isinstance(value, dict):
        raise ValueError(f"--{name} {given!r} is JSON, but no object: {advice}")
    return value


def _config_flag() -> inspect.Parameter:
    option = typer.Option(
        "--config",
        help="A YAML file of flags, as `max-model-len: 4096`; what is typed wins.",
        callback=take_file,
        is_eager=True,
        metavar="FILE",
    )
    return _parameter("config", Annotated[str | None, option], None)


def _debug_flag() -> inspect.Parameter:
    return _parameter("debug", Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")], False)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _explanations(docstring: str) -> dict[str, tuple[str, str]]:
    """{field: (section, text)} from a docstring of `Section:` blocks with a `field: text` per field."""
    found: dict[str, tuple[str, str]] = {}
    section = name = ""
    for line in inspect.cleandoc(docstring).splitlines():
        if heading := re.fullmatch(r"(\w[\w ]*):", line):
            section = heading[1]
        elif entry := re.fullmatch(r" {4}(\w+): (.*)", line):
            name = entry[1]
            found[name] = (section, entry[2])
        elif re.match(r" {8}\S", line) and name in found:
            found[name] = (section, f"{found[name][1]} {line.strip()}")
    return found
