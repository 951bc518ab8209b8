"""What a server may be started with is checked before a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from teachllm.server.options import ServerOptions


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"enable_auto_tool_choice": True}, "add --tool-call-parser"),
        ({"max_queued_requests": -1}, "max_queued_requests=-1: must be 0 or more"),
        ({"max_request_bytes": 0}, "max_request_bytes=0: must be at least 1"),
        ({"shutdown_timeout": -1.0}, "shutdown_timeout=-1.0: must be 0 or more"),
        ({"shutdown_timeout": float("inf")}, "shutdown_timeout=inf: must be 0 or more, and finite"),
        ({"shutdown_timeout": float("nan")}, "shutdown_timeout=nan"),
        ({"api_keys": ("a", "")}, "an API key is empty"),
        ({"chat_template": "{% for %}"}, "template"),
        ({"default_chat_template_kwargs": {"messages": []}}, "default_chat_template_kwargs may not hold messages"),
        ({"default_chat_template_kwargs": {"self": 1}}, "default_chat_template_kwargs may not hold self"),
        ({"uds": ""}, "--uds is empty"),
        ({"log_format": "foo"}, "log_format=foo: choose one of text, json"),
        ({"root_path": "api"}, "root_path=api: begin it with a slash"),
        ({"ssl_ca_certs": __file__}, "without --ssl-keyfile and --ssl-certfile has no TLS"),
        ({"ssl_cert_reqs": 2}, "without --ssl-keyfile and --ssl-certfile has no TLS"),
        ({"ssl_cert_reqs": 2, "ssl_keyfile": __file__, "ssl_certfile": __file__}, "without --ssl-ca-certs"),
        ({"ssl_cert_reqs": 3}, "ssl_cert_reqs=3: must be 0"),
        ({"ssl_ca_certs": "no/such/file"}, "ssl_ca_certs=no/such/file: there is no such file"),
        ({"ssl_keyfile": __file__}, "both --ssl-keyfile and --ssl-certfile"),
    ],
)
def test_what_no_server_can_be_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerOptions(**options)


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({}, True),
        ({"host": "127.0.0.3"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"uds": "/tmp/of-teachllm"}, False),
        ({"host": "0.0.0.0", "allowed_hosts": ("me.example",)}, True),
    ],
)
def test_hosts_are_known_on_loopback_or_if_they_are_named(options: dict[str, Any], known: bool) -> None:
    assert (ServerOptions(**options).known_hosts is not None) is known


def test_a_slash_at_the_end_of_the_prefix_changes_nothing() -> None:
    assert [ServerOptions(root_path=path).root_path for path in ("", "/", "/api", "/api/")] == ["", "", "/api", "/api"]
