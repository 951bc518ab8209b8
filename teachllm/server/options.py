"""Define the server's options, beside the engine's settings. Names are vLLM's where vLLM has them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from teachllm.server.http.log import FORMATS

LOOPBACK = "127.0.0.1"
# Arguments of `Tokenizer.render_chat_template` that are not the template's variables.
RESERVED_VARIABLES = frozenset(("self", "messages", "tools", "chat_template", "continue_final_message"))
_OWN_HOSTS = ("localhost", LOOPBACK, "::1")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Configure a server.

    Attributes:
        host, port: where to listen; port 0 picks a free one.
        uds: the path of a Unix socket to listen on in place of those.
        allowed_hosts: what the Host header may name, beside this machine, when `host` is loopback; "*": anything. So a
            web page whose name its owner points to 127.0.0.1 gets no answer.
        api_keys: one of these has to come with a request; none: every client may ask.
        served_model_names: what clients call the model; none: as it was loaded.
        chat_template: Jinja in place of the checkpoint's template.
        trust_request_chat_template: a request may bring its own.
        default_chat_template_kwargs: variables of the template, unless a request gives its own.
        force_include_usage: every stream tells the usage, whether or not its request asks for it.
        enable_auto_tool_choice, tool_call_parser: calls of tools are found in the model's text.
        max_queued_requests: completions that may be open beyond `max_num_seqs` of each replica.
        max_request_bytes: of a request's body; None: 1 MiB, or 64 bytes for each token of the model's context if that
            is more.
        shutdown_timeout: seconds that open requests get when the server is told to end.
        allowed_origins, ...: CORS, off without origins.
        trace_endpoint: GET /trace.
        dev_endpoints: POST /reset_prefix_cache.
        root_path: URL prefix when behind a reverse proxy (ASGI `root_path`).
        ssl_...: TLS, as Python's `ssl` has it.
    """

    host: str = LOOPBACK
    port: int = 8000
    uds: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    force_include_usage: bool = False
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    max_queued_requests: int = 4096
    max_request_bytes: int | None = None
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
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str | None = None
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
        if self.max_request_bytes is not None and self.max_request_bytes < 1:
            raise ValueError(f"max_request_bytes={self.max_request_bytes}: must be at least 1")
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise ValueError(f"shutdown_timeout={self.shutdown_timeout}: must be 0 or more, and finite")
        if "" in self.api_keys:
            raise ValueError("an API key is empty: give --api-key a secret, or leave it out")
        if self.uds == "":
            raise ValueError("--uds is empty: give it the path of a socket")
        if self.log_format not in FORMATS:
            raise ValueError(f"log_format={self.log_format}: choose one of {', '.join(FORMATS)}")
        object.__setattr__(self, "root_path", self.root_path.rstrip("/"))
        if self.root_path and not self.root_path.startswith("/"):
            raise ValueError(f"root_path={self.root_path}: begin it with a slash")
        if wrong := sorted(RESERVED_VARIABLES & self.default_chat_template_kwargs.keys()):
            raise ValueError(f"default_chat_template_kwargs may not hold {wrong[0]}")
        if self.chat_template is not None:
            from teachllm.engine.text.chat_template import check_template

            check_template(self.chat_template)
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ValueError(f"ssl_cert_reqs={self.ssl_cert_reqs}: must be 0 (none), 1 (optional) or 2 (required)")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(path):
                raise ValueError(f"{name}={path}: there is no such file")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("TLS needs both --ssl-keyfile and --ssl-certfile")
        if self.ssl_certfile is None and (self.ssl_ca_certs is not None or self.ssl_cert_reqs or self.ssl_ciphers):
            raise ValueError("a server without --ssl-keyfile and --ssl-certfile has no TLS: leave the other flags out")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError(
                f"ssl_cert_reqs={self.ssl_cert_reqs}: no certificate of a client can be verified without --ssl-ca-certs"
            )

    @property
    def known_hosts(self) -> frozenset[str] | None:
        """Return what the Host header may name, without a port; None: anything."""
        is_loopback = self.uds is None and (self.host in ("localhost", "::1") or self.host.startswith("127."))
        if "*" in self.allowed_hosts or not (is_loopback or self.allowed_hosts):
            return None
        return frozenset(host.lower() for host in (*_OWN_HOSTS, self.host, *self.allowed_hosts))
