"""The flags of a request to a running server, which `chat --url` and `complete` share."""

from __future__ import annotations

from typing import Annotated

import typer

PANEL = "Server"

ApiKey = Annotated[
    str | None,
    typer.Option(
        help="The server's key, sent as a bearer token.",
        envvar=["OPENAI_API_KEY", "TEACHLLM_API_KEY"],
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
