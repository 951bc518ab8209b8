"""`teachllm serve`: what its flags make of a server, vLLM's among them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from teachllm.config import EngineConfig
from teachllm.server import lifecycle
from teachllm.server.options import ServerOptions


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command handles them until the server does."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def options(teachllm, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command with these flags, without a server; returns the server's options."""
    found: list[ServerOptions] = []

    def serve(config: EngineConfig, given: ServerOptions) -> int:
        found.append(given)
        return 0

    monkeypatch.setattr(lifecycle, "serve", serve)

    def run(*flags: str) -> ServerOptions:
        result = teachllm("serve", *flags)
        assert result.exit_code == 0, result.output
        return found[-1]

    return run


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--uds /tmp/a.sock", {"uds": "/tmp/a.sock"}),
        ("--api-key one --api-key other", {"api_keys": ("one", "other")}),
        ("--allowed-hosts a.example --allowed-hosts b.example", {"allowed_hosts": ("a.example", "b.example")}),
        ("--enable-force-include-usage", {"force_include_usage": True}),
        ("--disable-log-requests", {"log_requests": False}),
        ("--no-log-requests", {"log_requests": False}),
        ("--enable-request-id-headers", {}),
        ("--root-path /a", {"root_path": "/a"}),
        ("--max-request-bytes 5", {"max_request_bytes": 5}),
        ('--default-chat-template-kwargs {"a":1}', {"default_chat_template_kwargs": {"a": 1}}),
    ],
)
def test_flags_become_options(options: Any, flags: str, expected: dict[str, Any]) -> None:
    assert options(*flags.split()) == ServerOptions(**expected)


def test_certificates_of_clients_are_options_too(options: Any, tmp_path: Path) -> None:
    for name in ("key", "cert", "ca"):
        (tmp_path / name).touch()
    flags = [f"--ssl-keyfile={tmp_path / 'key'}", f"--ssl-certfile={tmp_path / 'cert'}"]
    found = options(*flags, f"--ssl-ca-certs={tmp_path / 'ca'}")
    assert (found.ssl_keyfile, found.ssl_certfile) == (str(tmp_path / "key"), str(tmp_path / "cert"))
    assert found.ssl_ca_certs == str(tmp_path / "ca")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--chat-template", "{% if %}"), "the chat template is no Jinja: line 1"),
        (("--default-chat-template-kwargs", "[1]"), "is JSON, but no object"),
        (("--ssl-ca-certs", "/nowhere"), "ssl_ca_certs=/nowhere: there is no such file"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(teachllm, flags: tuple[str, str], message: str) -> None:
    result = teachllm("serve", *flags)
    assert result.exit_code == 1 and message in result.output


def test_a_template_that_is_no_text_is_refused_by_its_flag(teachllm, tmp_path: Path) -> None:
    (tmp_path / "of.jinja").write_bytes(b"\xfa\xff")
    result = teachllm("serve", "--chat-template", str(tmp_path / "of.jinja"))
    assert result.exit_code == 1 and "--chat-template" in result.output and "UTF-8" in result.output
