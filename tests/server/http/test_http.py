"""What all routes share: bodies that are none, keys, request ids, the log, other origins, proxies, the schema."""

from __future__ import annotations

import json
import logging
import socket
import urllib.error
import urllib.request
from http.client import HTTPResponse
from typing import Any

import pytest

from tests.clients import http_client
from tests.server.fake_engine import FakeEngineClient, Server, error_of, serving
from tests.waiting import HANG_SECONDS

PATH = "/v1/completions"


# -- bodies that are none ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "unknown": {"a": 1e999}}',
        b'{"prompt": "a", "unknown": {"a": [-' + b"9" * 309 + b".5]}}",
        b'{"prompt": "a", "unknown": 1' + b"0" * 250 + b"e99}",
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "chat_template_kwargs": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}",
        b'{"prompt": "a"} and more',
    ],
)
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/load_lora_adapter"])
def test_a_body_that_is_no_object_of_json_is_refused(server: Server, path: str, body: bytes) -> None:
    error_of(server.http.post(path, content=body, headers={"content-type": "application/json"}), 400)


def test_long_numbers_that_a_float_holds_are_read(server: Server) -> None:
    for number in (b"1e+0000001", b"0." + b"1" * 400, b"-1E308", b"9" * 309, b"9" * 209 + b"e9", b'"1e999"'):
        body = b'{"prompt": "a", "unknown": ' + number + b"}"
        assert server.http.post(PATH, content=body, headers={"content-type": "application/json"}).status_code == 200


@pytest.mark.parametrize("offer", ["Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c", "upgrade: websocket"])
@pytest.mark.parametrize("apart", [False, True])
def test_an_offer_of_another_protocol_is_not_taken_up(server: Server, offer: str, apart: bool) -> None:
    body = json.dumps({"prompt": "\r\nUpgrade: h2c\r\n\r\n", "max_tokens": 1, "echo": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{offer}\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS) as connection:
        for _ in range(2):  # on one connection
            for piece in (head.encode(), body) if apart else (head.encode() + body,):
                connection.sendall(piece)
            response = HTTPResponse(connection)
            response.begin()
            assert response.status == 200
            assert json.loads(response.read())["choices"][0]["text"].startswith("\r\nUpgrade: h2c")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/xml", "", None])
def test_only_json_is_read(server: Server, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = server.http.post(PATH, content=b'{"prompt": "a"}', headers=headers)
    assert "Content-Type: application/json" in error_of(response, 400)["message"]
    fine = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.http.post(PATH, content=b'{"prompt": "a"}', headers=fine).status_code == 200


def test_routes_and_methods_that_do_not_exist_are_said_to(server: Server) -> None:
    for path in ("/", "/v1/completion", "/v1/completions/", "/docs", "/trace", "/v1/models/none", "/%00"):
        error_of(server.http.get(path), 404)
    for method, path in (("GET", PATH), ("DELETE", "/v1/models"), ("PUT", "/tokenize"), ("POST", "/health")):
        response = server.http.request(method, path)
        assert "does not take" in error_of(response, 405)["message"]
        assert response.headers["allow"]


def test_a_request_that_is_too_large_is_refused_however_it_says_its_size() -> None:
    with serving(FakeEngineClient(), max_request_bytes=1000) as server:
        large = json.dumps({"prompt": "a" * 1000}).encode()
        headers = {"content-type": "application/json"}

        def in_pieces() -> Any:
            yield from (large[i : i + 100] for i in range(0, len(large), 100))

        for content in (large, in_pieces()):
            response = server.http.post(PATH, content=content, headers=headers)
            assert "--max-request-bytes" in error_of(response, 413)["message"]
        assert server.http.post(PATH, content=large[:500] + b'"}', headers=headers).status_code == 200


@pytest.mark.parametrize(("key", "status"), [("secret", 413), ("wrong", 401)])
def test_who_is_still_sending_when_it_is_refused_sees_why(key: str, status: int) -> None:
    """urllib closes the connection after each answer, and reads none before it has sent everything."""
    with serving(FakeEngineClient(), api_keys=("secret",)) as server:
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        request = urllib.request.Request(server.url + PATH, b"a" * (24 << 20), headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=HANG_SECONDS)
        assert refused.value.code == status and b"error" in refused.value.read()


# -- who asks ----------------------------------------------------------------------------------------------


def test_a_key_is_needed_for_all_but_health_metrics_and_version() -> None:
    with serving(FakeEngineClient(), api_keys=("secret", "other", "schlüssel"), dev_endpoints=True) as server:
        for path in ("/health", "/metrics", "/version", "/openapi.json"):
            assert server.http.get(path).status_code == 200
        paths = [PATH, "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/load_lora_adapter", "/v1/models"]
        paths += ["/reset_prefix_cache", "/trace", "/nothing", "//v1/models", "/health/", "/version/../v1/models"]
        for path in paths:
            for given in ({}, {"Authorization": "secret"}, {"Authorization": "Bearer wrong"}, {"Authorization": ""}):
                for method in ("GET", "POST"):
                    response = server.http.request(method, path, headers=given)
                    error_of(response, 401)
                    assert response.headers["www-authenticate"] == "Bearer"
        for key in ("secret", "other", "schlüssel"):
            given = {"authorization": f"bearer {key}".encode()}
            assert server.http.get("/v1/models", headers=given).status_code == 200
        schema = server.http.get("/openapi.json").json()
        assert schema["paths"][PATH]["post"]["security"] == [{"key": []}]
        assert "security" not in schema["paths"]["/health"]["get"]


def test_every_answer_has_the_request_s_id_the_client_s_own_if_it_is_plain(server: Server) -> None:
    own = {"X-Request-Id": "job-7:a.b_c"}
    response = server.post(PATH, {"prompt": "a", "max_tokens": 1}, **own)
    assert response.headers["x-request-id"] == own["X-Request-Id"]
    assert response.json()["id"] == "cmpl-job-7:a.b_c"
    assert server.post(PATH, {"prompt": ""}, **own).headers["x-request-id"] == own["X-Request-Id"]
    assert server.http.get("/nothing", headers=own).headers["x-request-id"] == own["X-Request-Id"]
    for odd in ("a b", "a#1", "x" * 200, 'a"b', ""):
        given = server.http.get("/version", headers={"X-Request-Id": odd}).headers["x-request-id"]
        assert given != odd and len(given) == 32


def test_the_same_id_twice_at_once_disturbs_nobody() -> None:
    engine_client = FakeEngineClient()
    with serving(engine_client) as server, http_client(server.url) as other:
        server.call(engine_client.go.clear)
        headers = {"X-Request-Id": "same"}
        request = {"prompt": "a", "stream": True}
        with (
            other.stream("POST", PATH, json=request, headers=headers) as first,
            server.http.stream("POST", PATH, json=request, headers=headers) as second,
        ):
            assert len(engine_client.open) == 2
            server.call(engine_client.go.set)
            assert "three" in first.read().decode() and "three" in second.read().decode()


def test_the_log_has_a_line_for_each_request_and_nothing_of_what_was_written(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="teachllm.requests"):
        name = server.post(PATH, {"prompt": "my secret", "max_tokens": 2, "stream": True}).headers["x-request-id"]
        server.http.get("/health")
        server.until(lambda: len(caplog.records) > 0)
    [record] = caplog.records
    fields = vars(record)["fields"]
    assert fields["request_id"] == name
    assert (fields["method"], fields["path"], fields["status"]) == ("POST", PATH, 200)
    assert fields["completion_tokens"] == 2 and fields["seconds"] > 0
    assert "secret" not in str(fields)


def test_pages_from_elsewhere_are_let_in_only_if_they_are_named() -> None:
    origin = {"Origin": "https://page.example"}
    ask = origin | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with serving(FakeEngineClient()) as server:
        assert "access-control-allow-origin" not in server.http.get("/version", headers=origin).headers
        assert server.http.options(PATH, headers=ask).status_code == 405
    with serving(FakeEngineClient(), allowed_origins=("https://page.example",), api_keys=("secret",)) as server:
        allowed = "access-control-allow-origin"
        assert server.http.get("/version", headers=origin).headers[allowed] == origin["Origin"]
        assert server.http.options(PATH, headers=ask).status_code == 200
        refused = server.http.get("/v1/models", headers=origin)
        assert refused.status_code == 401 and refused.headers[allowed] == origin["Origin"]
        assert allowed not in server.http.get("/version", headers={"Origin": "https://other.example"}).headers


def test_a_proxy_may_put_the_server_elsewhere() -> None:
    with serving(FakeEngineClient(), root_path="/llm", api_keys=("secret",)) as server:
        for prefix in ("", "/llm"):
            assert server.http.get(f"{prefix}/health").status_code == 200
            error_of(server.http.get(f"{prefix}/v1/models"), 401)
            headers = {"Authorization": "Bearer secret"}
            assert server.http.get(f"{prefix}/v1/models", headers=headers).status_code == 200


# -- what there is -----------------------------------------------------------------------------------------


def test_the_schema_names_every_route_its_limits_and_its_errors(server: Server) -> None:
    schema = server.http.get("/openapi.json").json()
    assert {PATH, "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/health"} <= set(schema["paths"])
    schemas = schema["components"]["schemas"]
    assert schemas["TokenId"]["maximum"] == 4095
    assert schemas["MaxTokens"]["maximum"] == 1023
    assert schemas["CompletionRequest"]["properties"]["top_p"]["anyOf"][0]["exclusiveMinimum"] == 0
    answers = schema["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "401", "404", "413", "429", "500", "501", "503"} == set(answers)
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    for status, answer in answers.items():
        if status != "200":
            assert answer["content"]["application/json"]["schema"]["$ref"].endswith("/Error")
    text = json.dumps(schema)
    for name in schemas:
        text = text.replace(f'"#/components/schemas/{name}"', '"known"')
    assert "#/" not in text
