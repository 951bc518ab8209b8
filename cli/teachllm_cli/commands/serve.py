"""`teachllm serve`: an OpenAI-compatible server. Flags that `vllm serve` has, too, are spelled as it spells them."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Annotated, Any

import typer

from teachllm.config import EngineConfig
from teachllm_cli.options.engine_options import engine_command
from teachllm_cli.options.serving_options import (
    API,
    TOOLS,
    ChatTemplate,
    EnableAutoToolChoice,
    EngineSeed,
    ServedModelName,
    ToolCallParser,
    read_template,
)

_HTTP, _CORS = "HTTP", "CORS"


@engine_command
def serve(
    context: typer.Context,
    engine: EngineConfig,
    model_tag: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None,
    seed: EngineSeed = 0,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 lets other machines in.", rich_help_panel=_HTTP)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0 picks a free one.", rich_help_panel=_HTTP)
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that requests have to bring; may be given several times.",
            envvar="TEACHLLM_API_KEY",
            rich_help_panel=_HTTP,
        ),
    ] = None,
    max_request_bytes: Annotated[int, typer.Option(help="Of a request's body.", rich_help_panel=_HTTP)] = 16 << 20,
    max_queued_requests: Annotated[
        int,
        typer.Option(
            help="Completions that may be open beyond --max-num-seqs of each replica; then 429.", rich_help_panel=_HTTP
        ),
    ] = 4096,
    shutdown_timeout: Annotated[
        float,
        typer.Option(help="Seconds that open requests get when the server is told to end.", rich_help_panel=_HTTP),
    ] = 30.0,
    root_path: Annotated[
        str, typer.Option(help="URL prefix when behind a reverse proxy (ASGI `root_path`).", rich_help_panel=_HTTP)
    ] = "",
    ssl_keyfile: Annotated[str | None, typer.Option(help="TLS: the key.", rich_help_panel=_HTTP)] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="TLS: the certificate.", rich_help_panel=_HTTP)] = None,
    uvicorn_log_level: Annotated[
        str,
        typer.Option(help="debug, info, warning, error, critical or trace.", rich_help_panel=_HTTP),
    ] = "warning",
    log_format: Annotated[str, typer.Option(help="text, or json for machines.", rich_help_panel=_HTTP)] = "text",
    log_requests: Annotated[
        bool, typer.Option("--log-requests/--no-log-requests", help="A line for each request.", rich_help_panel=_HTTP)
    ] = True,
    served_model_name: ServedModelName = None,
    trace_endpoint: Annotated[
        bool, typer.Option("--trace-endpoint", help="GET /trace: what the engine does, live.", rich_help_panel=API)
    ] = False,
    dev_endpoints: Annotated[
        bool,
        typer.Option(
            "--dev-endpoints",
            help="POST /reset_prefix_cache.",
            envvar="TEACHLLM_SERVER_DEV_MODE",
            rich_help_panel=API,
        ),
    ] = False,
    chat_template: ChatTemplate = None,
    trust_request_chat_template: Annotated[
        bool,
        typer.Option(
            "--trust-request-chat-template",
            help="A request may bring its own template: code that nothing limits in time.",
            rich_help_panel=TOOLS,
        ),
    ] = False,
    enable_auto_tool_choice: EnableAutoToolChoice = False,
    tool_call_parser: ToolCallParser = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(help="Web pages that may ask; * is all. May be given several times.", rich_help_panel=_CORS),
    ] = None,
    allowed_methods: Annotated[list[str] | None, typer.Option(rich_help_panel=_CORS)] = None,
    allowed_headers: Annotated[list[str] | None, typer.Option(rich_help_panel=_CORS)] = None,
    allow_credentials: Annotated[bool, typer.Option("--allow-credentials", rich_help_panel=_CORS)] = False,
) -> None:
    """Serve a model over HTTP, the way OpenAI does."""
    for number in (signal.SIGINT, signal.SIGTERM):  # until the server has its own
        signal.signal(number, _leave)
    source = context.get_parameter_source("model")
    is_typed = source is not None and source.name == "COMMANDLINE"  # a file's model gives way
    if is_typed and model_tag not in (None, engine.model):
        raise ValueError(f"two models, {model_tag} and --model {engine.model}: give one")
    engine = replace(engine, model=model_tag or engine.model, seed=seed)
    try:
        from teachllm.server.lifecycle import serve as run
        from teachllm.server.options import ServerOptions
    except ModuleNotFoundError as error:
        raise ImportError(f"the server needs {error.name}: pip install 'teachllm[serve]'") from None
    options = ServerOptions(
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        served_model_names=tuple(served_model_name or ()),
        chat_template=read_template(chat_template),
        trust_request_chat_template=trust_request_chat_template,
        enable_auto_tool_choice=enable_auto_tool_choice,
        tool_call_parser=tool_call_parser,
        max_queued_requests=max_queued_requests,
        max_request_bytes=max_request_bytes,
        shutdown_timeout=shutdown_timeout,
        allowed_origins=tuple(allowed_origins or ()),
        allowed_methods=tuple(allowed_methods or ("*",)),
        allowed_headers=tuple(allowed_headers or ("*",)),
        allow_credentials=allow_credentials,
        trace_endpoint=trace_endpoint,
        dev_endpoints=dev_endpoints,
        root_path=root_path,
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
        uvicorn_log_level=uvicorn_log_level,
        log_format=log_format,
        log_requests=log_requests,
    )
    raise typer.Exit(run(engine, options))


def _leave(*_: Any) -> None:
    raise typer.Exit(0)
