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
    flags = {parameter.name: parameter for parameter in context.command.params}
    found: dict[str, Any] = {}
    for key, value in _read(file).items():
        name = str(key).replace("-", "_")
        if name not in flags or name in ("config", "help"):
            raise typer.BadParameter(f"{file}: {context.command.name} has no flag --{key}")
        if value is not None:
            found[name] = [_text(each) for each in value] if isinstance(value, list) else _text(value)
    context.default_map = {**(context.default_map or {}), **found}
    return file


def _read(file: str) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{file}: must hold flags by name, like max-model-len: 4096")
    return content


def _text(value: Any) -> str:
    """Return a value as it would be typed: so it is checked as if it were."""
    return value if isinstance(value, str) else json.dumps(value)
