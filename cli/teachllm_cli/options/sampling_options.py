"""The flags of a request that `chat`, `generate` and `complete` share. None: the checkpoint's default, else greedy."""

from __future__ import annotations

from typing import Annotated

import typer

_PANEL = "Sampling"

Temperature = Annotated[
    float | None,
    typer.Option(
        help="0 is greedy; higher is more varied. Default: the checkpoint's own, else 0.", rich_help_panel=_PANEL
    ),
]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.", rich_help_panel=_PANEL)]
TopP = Annotated[
    float | None,
    typer.Option(help="Sample from the fewest tokens that reach this probability.", rich_help_panel=_PANEL),
]
MinP = Annotated[
    float | None,
    typer.Option(help="Sample from tokens at least this fraction as likely as the likeliest.", rich_help_panel=_PANEL),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1 makes tokens that were already there less likely.", rich_help_panel=_PANEL)
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Output tokens at most. Default: what the checkpoint recommends, or else 128, in a chat 1024.",
        rich_help_panel=_PANEL,
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="Fixes the noise: the same request gives the same tokens.", rich_help_panel=_PANEL)
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End the output at this text; may be given several times.", rich_help_panel=_PANEL),
]
Prompts = Annotated[list[str] | None, typer.Option("--prompt", "-p", help="May be given several times.")]
PromptFile = Annotated[str | None, typer.Option(help="A file with one prompt a line; - reads them from stdin.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
NumCompletions = Annotated[int, typer.Option(help="Completions of each prompt.")]
