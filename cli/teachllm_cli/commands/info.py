"""`teachllm info`: what runs here, and where a model's memory would go."""

from __future__ import annotations

import json as json_format
import platform
from functools import partial
from importlib import metadata
from typing import Annotated

import typer

from teachllm import __version__
from teachllm.config import EngineConfig
from teachllm_cli.options.engine_options import engine_command
from teachllm_cli.terminal import answers

Row = tuple[str, str, str]  # what, amount, explanation


@partial(engine_command, runs=False)
def info(
    engine: EngineConfig,
    input_len: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens of the requests that are counted.")
    ] = None,
    output_len: Annotated[int | None, typer.Option(min=1, help="Output tokens of those requests.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Print versions, devices, a model's shape and memory table, and how many requests fit; reads no weights."""
    from teachllm.engine.info import describe_model

    versions, machines, model = _versions(), devices(), describe_model(engine, input_len, output_len)
    if json:
        rows = [{"what": what, "amount": amount, "explanation": why} for what, amount, why in model]
        found = {"versions": versions, "devices": machines, "name": engine.model, "model": rows}
        typer.echo(json_format.dumps(found))
        return
    _print_table("Versions", [(name, version, "") for name, version in versions.items()])
    _print_table("Devices", [(name, text, "") for name, text in machines.items()])
    _print_table(engine.model, model)


def _versions() -> dict[str, str]:
    """Of what decides how the engine behaves; read from package metadata, which loads nothing."""
    versions = {"teachllm": __version__, "python": platform.python_version()}
    for package in ("torch", "triton", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def devices() -> dict[str, str]:
    """{"cpu": …, "cuda:0": …}: what `--device` can name here."""
    import torch

    from teachllm.engine.observability.ceilings import device_name

    found = {"cpu": device_name("cpu")}
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{card.name}, {card.total_memory / 2**30:.1f} GiB, sm_{card.major}{card.minor}"
    return found


def _print_table(title: str, rows: list[Row]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right" if any(why for *_, why in rows) else "left")
    table.add_column(style="dim")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = answers()
    console.print(Text(title, style="bold"))
    console.print(table)
    console.print()
