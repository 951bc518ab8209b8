"""The flags of a server's engine and API that `serve` and `run-batch` share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

API, TOOLS = "API", "Tools and templates"

EngineSeed = Annotated[int, typer.Option(help="Of everything random that a request does not seed itself.")]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(help="What clients call the model; may be given several times.", rich_help_panel=API),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(help="A Jinja file, or the template itself, for the checkpoint's own.", rich_help_panel=TOOLS),
]
EnableAutoToolChoice = Annotated[
    bool, typer.Option("--enable-auto-tool-choice", help="The model may call tools.", rich_help_panel=TOOLS)
]
ToolCallParser = Annotated[
    str | None, typer.Option(help="How it writes that: hermes or llama3_json.", rich_help_panel=TOOLS)
]


def read_template(given: str | None) -> str | None:
    """The template, or what is in the file of that name.

    Raises:
        ValueError: it is neither, or the file is no text.
    """
    if given is None or "{" in given:
        return given
    if not os.path.isfile(given):
        raise ValueError(f"--chat-template {given}: there is no such file, and it is no template either")
    try:
        return Path(given).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--chat-template {given}: the file is no text in UTF-8") from error
