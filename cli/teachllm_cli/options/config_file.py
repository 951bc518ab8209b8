"""`--config FILE`: flags of a command out of a YAML file, as `vllm serve` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer


def take_file(context: typer.Context, file: str | None) -> str | None:
    """Make a file's values the defaults of a command's flags. It runs before these are read.

    The file names flags without their dashes in front: `tensor-parallel-size: 2`, or with underscores.

    Raises:
        typer.BadParameter: the file cannot be read, or names a flag that the command does not have.
    """
    if file is None:
        return None
    flags = _flags(context.command)
    found: dict[str, Any] = {}
    for key, value in _read(file).items():
        name = str(key).replace("_", "-")
        if name not in flags or name in ("config", "help"):
            raise typer.BadParameter(f"{file}: {context.command.name} has no flag --{key}")
        parameter, is_on = flags[name]
        if value is None:
            continue
        if not is_on:
            if not isinstance(value, bool):
                raise typer.BadParameter(f"{file}: {key} is true or false")
            value = not value
        values = value if isinstance(value, list) else [value] if parameter.multiple else value
        found[parameter.name] = [_text(each) for each in values] if isinstance(values, list) else _text(values)
    context.default_map = {**(context.default_map or {}), **found}
    return file


def _flags(command: Any) -> dict[str, tuple[Any, bool]]:
    """Return each long or short flag without its dashes, with its parameter, and whether it switches that on."""
    found: dict[str, tuple[Any, bool]] = {}
    for parameter in command.params:
        if parameter.param_type_name == "option":
            found |= {name.lstrip("-"): (parameter, True) for name in parameter.opts}
            found |= {name.lstrip("-"): (parameter, False) for name in parameter.secondary_opts}
    return found


def _read(file: str) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{file}: must hold flags by name, like max-model-len: 4096")
    return content


def _text(value: Any) -> str:
    """Return a value as it would be typed: so it is checked as if it were."""
    if not isinstance(value, bool | int | float | list | dict):
        return str(value)  # YAML has dates, too
    try:
        return json.dumps(value, default=str)
    except (ValueError, RecursionError):
        raise typer.BadParameter("a value in the file contains itself") from None
