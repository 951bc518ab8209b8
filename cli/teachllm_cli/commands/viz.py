"""`teachllm viz`: an engine, a server, or a trace, in the browser."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from teachllm.config import EngineConfig
from teachllm_cli.options.engine_options import engine_command
from teachllm_cli.terminal import notes


@engine_command
def viz(
    engine: EngineConfig,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Start with this preset: docs/visualizer.md lists them.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show a trace, finished or growing, in place of an engine.")
    ] = None,
    attach: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Watch a server that runs with --trace-endpoint, in place of an engine."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The key that the server of --attach asks for.", envvar="TEACHLLM_API_KEY")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 opens the page to other machines.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 picks a free one.")] = 7860,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Watch an engine think: its blocks, batches and queue, step by step, in a browser."""
    if attach is not None and (replay is not None or engine != EngineConfig()):
        raise ValueError("--attach shows what a server does: leave out --replay and the flags of an engine")
    from teachllm_webui.presets import PRESETS
    from teachllm_webui.presets import preset as find_preset

    if preset is not None and (replay is not None or attach is not None or engine != EngineConfig()):
        raise ValueError("--preset has settings of its own: leave out --replay, --attach and the flags of an engine")
    first = PRESETS[0] if preset is None else find_preset(preset)
    notes().print("starting the page ...")
    from teachllm_webui.page import launch
    from teachllm_webui.session import LiveSession

    session = LiveSession()
    if replay is not None:
        if engine != EngineConfig():
            raise ValueError("--replay shows what an engine did: leave out the flags of one")
        session.replay(replay)
        session.home = replay.name, lambda: session.replay(replay)
    elif attach is not None:
        key = next(iter((api_key or "").split()), None)  # the variable may hold all that a server takes
        session.attach(attach, key)
        session.home = session.status.title, lambda: session.attach(attach, key)
    elif engine != EngineConfig():
        session.home = engine.model, lambda: session.start(engine)
    page = launch(session, host, port)
    if session.home is None:
        session.start_preset(first)
    elif replay is None and attach is None:
        session.start(engine)
    try:
        if page.is_open:
            notes().print(
                "other machines can reach this page: whoever has its whole address can use it, and see what you ask",
                markup=False,
                soft_wrap=True,
            )
        notes().print(f"teachllm viz: {page.url} (Ctrl-C ends it)", markup=False, soft_wrap=True)
        if browser:
            webbrowser.open(page.url)
        threading.Event().wait()
    finally:
        page.close()
