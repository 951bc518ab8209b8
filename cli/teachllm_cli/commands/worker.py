"""`teachllm worker`: this machine has some of the ranks of an engine that runs on another one."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from teachllm_cli.errors import one_line_errors
from teachllm_cli.terminal import notes


def worker(
    address: Annotated[str, typer.Option("--join", metavar="tcp://HOST:PORT", help="Where the engine listens.")],
    node_rank: Annotated[
        int | None,
        typer.Option(
            min=1, help="Which of the engine's machines this one is, 0 being its own. By itself: any that is missing."
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Have ranks of an engine on another machine, which waits for --nnodes of them.

    TEACHLLM_SECRET has to be set to what the engine says when it begins to wait. The model is found here under the same
    name as there.
    """
    with one_line_errors(debug):
        try:
            from teachllm.worker.processes.host import join
        except ModuleNotFoundError as error:
            raise ImportError(f"ranks on other machines need {error.name}: pip install 'teachllm[serve]'") from None
        secret = os.environ.get("TEACHLLM_SECRET")
        if not secret:
            raise ValueError("TEACHLLM_SECRET is not set: the engine says what it is when it begins to wait")
        notes().print(f"joining the engine at {address}", style="dim", markup=False, soft_wrap=True)
        join(
            address,
            secret,
            place=node_rank,
            joined=lambda ranks: notes().print(f"ranks here: {', '.join(map(str, ranks))}", style="dim", markup=False),
        )
