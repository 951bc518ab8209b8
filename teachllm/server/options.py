"""Define the server's options, beside the engine's settings. Names are vLLM's where vLLM has them."""

from __future__ import annotations

import os
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Configure a server.

    Attributes:
        host, port: where to listen; port 0 picks a free one.
        api_keys: one of these has to come with a request; none: every client may ask.
        served_model_names: what clients call the model; none: as it was loaded.
        chat_template: Jinja in place of the checkpoint's template.
        trust_request_chat_template: a request may bring its own.
        enable_auto_tool_choice, tool_call_parser: calls of tools are found in the model's text.
        max_queued_requests: completions that may be open beyond `max_num_seqs` of each replica.
        max_request_bytes: of a request's body.
        shutdown_timeout: seconds that open requests get when the server is told to end.
        allowed_origins, ...: CORS, off without origins.
        trace_endpoint: GET /trace.
        dev_endpoints: POST /reset_prefix_cache.
        root_path: URL prefix when behind a reverse proxy (ASGI `root_path`).
    """

    host: str = LOOPBACK
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    max_queued_requests: int = 4096
    max_request_bytes: int = 16 << 20
    shutdown_timeout: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    trace_endpoint: bool = False
    dev_endpoints: bool = False
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    uvicorn_log_level: str = "warning"
    log_format: str = "text"
    log_requests: bool = True

    def __post_init__(self) -> None:
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError(
                "--enable-auto-tool-choice needs to know how the model calls tools: add --tool-call-parser"
            )
        if self.max_queued_requests < 0:
            raise ValueError(f"max_queued_requests={self.max_queued_requests}: must be 0 or more")
        if self.max_request_bytes < 1:
            raise ValueError(f"max_request_bytes={self.max_request_bytes}: must be at least 1")
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise ValueError(f"shutdown_timeout={self.shutdown_timeout}: must be 0 or more, and finite")
        if "" in self.api_keys:
            raise ValueError("an API key is empty: give --api-key a secret, or leave it out")
        for name in ("ssl_keyfile", "ssl_certfile"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(path):
                raise ValueError(f"{name}={path}: there is no such file")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("TLS needs both --ssl-keyfile and --ssl-certfile")
