"""`teachllm serve`: an OpenAI-compatible server. Flags that `vllm serve` has, too, are spelled as it spells them."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Annotated, Any

import typer

from teachllm.config import EngineConfig
from teachllm_cli.options.engine_options import engine_command, read_object
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
    uds: Annotated[
        str | None,
        typer.Option(help="A Unix socket to listen on, in place of host and port.", rich_help_panel=_HTTP),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="Names by which clients may call this server, beside this machine's own; * is any. On another --host "
            "than this machine's any is taken unless there are some. May be given several times.",
            rich_help_panel=_HTTP,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that requests have to bring; may be given several times.",
            envvar="TEACHLLM_API_KEY",
            rich_help_panel=_HTTP,
        ),
    ] = None,
    max_request_bytes: Annotated[
        int | None,
        typer.Option(
            help="Of a request's body. Default: 1 MiB, or 64 for each token of the model's context if that is more.",
            rich_help_panel=_HTTP,
        ),
    ] = None,
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
    ssl_ca_certs: Annotated[
        str | None, typer.Option(help="TLS: certificates that vouch for clients.", rich_help_panel=_HTTP)
    ] = None,
    ssl_cert_reqs: Annotated[
        int,
        typer.Option(
            min=0,
            max=2,
            help="TLS: a client's certificate is 0 not wanted, 1 optional, 2 needed.",
            rich_help_panel=_HTTP,
        ),
    ] = 0,
    ssl_ciphers: Annotated[
        str | None, typer.Option(help="TLS: the ciphers, as OpenSSL lists them.", rich_help_panel=_HTTP)
    ] = None,
    uvicorn_log_level: Annotated[
        str,
        typer.Option(help="debug, info, warning, error, critical or trace.", rich_help_panel=_HTTP),
    ] = "warning",
    log_format: Annotated[str, typer.Option(help="text, or json for machines.", rich_help_panel=_HTTP)] = "text",
    log_requests: Annotated[
        bool, typer.Option("--log-requests/--no-log-requests", help="A line for each request.", rich_help_panel=_HTTP)
    ] = True,
    disable_log_requests: Annotated[
        bool,
        typer.Option("--disable-log-requests", help="The same as --no-log-requests.", rich_help_panel=_HTTP),
    ] = False,
    enable_request_id_headers: Annotated[
        bool,
        typer.Option(
            "--enable-request-id-headers",
            help="Answers have an X-Request-Id: they always do, and vLLM's flag is taken.",
            rich_help_panel=_HTTP,
        ),
    ] = False,
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
    enable_force_include_usage: Annotated[
        bool,
        typer.Option(
            "--enable-force-include-usage",
            help="Every stream ends with the usage, asked for or not.",
            rich_help_panel=API,
        ),
    ] = False,
    chat_template: ChatTemplate = None,
    default_chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            help="Variables of the template, unless a request gives its own: '{\"enable_thinking\": false}'.",
            metavar="JSON",
            rich_help_panel=TOOLS,
        ),
    ] = None,
    trust_request_chat_template: Annotated[
        bool,
        typer.Option(
            "--trust-request-chat-template",
            help="A request may bring its own template: a stranger's program, within limits of time and memory.",
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
        uds=uds,
        allowed_hosts=tuple(allowed_hosts or ()),
        api_keys=tuple(api_key or ()),
        served_model_names=tuple(served_model_name or ()),
        chat_template=read_template(chat_template),
        default_chat_template_kwargs=read_object(
            "default-chat-template-kwargs", default_chat_template_kwargs or "{}", '{"enable_thinking": false}'
        ),
        trust_request_chat_template=trust_request_chat_template,
        force_include_usage=enable_force_include_usage,
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
        ssl_ca_certs=ssl_ca_certs,
        ssl_cert_reqs=ssl_cert_reqs,
        ssl_ciphers=ssl_ciphers,
        uvicorn_log_level=uvicorn_log_level,
        log_format=log_format,
        log_requests=log_requests and not disable_log_requests,
    )
    raise typer.Exit(run(engine, options))


def _leave(*_: Any) -> None:
    raise typer.Exit(0)
