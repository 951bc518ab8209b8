"""What all routes share: keys, ids, limits, bodies that are none, health, metrics, and the routes beside generation."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from teachllm import __version__
from tests.clients import http_client
from tests.server.fake_engine import FakeEngineClient, Server, error_of, serving

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


# -- who asks ----------------------------------------------------------------------------------------------


def test_a_key_is_needed_for_all_but_health_metrics_and_version() -> None:
    with serving(FakeEngineClient(), api_keys=("secret", "other"), dev_endpoints=True) as server:
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
        for key in ("secret", "other"):
            assert server.http.get("/v1/models", headers={"authorization": f"bearer {key}"}).status_code == 200
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


# -- the routes beside generation --------------------------------------------------------------------------


def test_the_models_are_listed_under_all_their_names(server: Server) -> None:
    listed = server.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["teachlm", "alias"]
    assert all(model["max_model_len"] == 1024 and model["root"] == "teachlm" for model in listed["data"])
    assert server.http.get("/v1/models/alias").json()["id"] == "alias"
    answer = server.post(PATH, {"model": "alias", "prompt": "a", "max_tokens": 1}).json()
    assert answer["model"] == "alias"


def test_text_becomes_tokens_and_tokens_text(server: Server) -> None:
    text = "What is a KV cache?"
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 1024
    assert "".join(answer["token_strs"]) == text
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    messages = [{"role": "user", "content": text}]
    with_header = server.post("/tokenize", {"messages": messages}).json()
    without = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert with_header["token_strs"] is None and with_header["count"] > without["count"] > answer["count"]
    assert "4096" in error_of(server.post("/detokenize", {"tokens": [4096]}), 400)["message"]
    error_of(server.post("/tokenize", {"prompt": "a", "model": "gpt"}), 404)
    error_of(server.post("/detokenize", {"tokens": "a"}), 400)


def test_a_long_prompt_becomes_the_same_tokens_as_its_parts(server: Server) -> None:
    """It takes the way through a thread."""
    part = server.post("/tokenize", {"prompt": " word" * 10}).json()["tokens"]
    assert server.post("/tokenize", {"prompt": " word" * 3000}).json()["tokens"] == part * 300


def test_adapters_are_understood_and_not_built(server: Server) -> None:
    assert (
        "LoRA" in error_of(server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}), 501)["message"]
    )
    assert "LoRA" in error_of(server.post("/v1/unload_lora_adapter", {"lora_name": "a"}), 501)["message"]
    error_of(server.post("/v1/load_lora_adapter", {"lora_name": "a"}), 400)


def test_the_prefix_cache_is_forgotten_only_where_that_is_offered(server: Server) -> None:
    request = {"prompt": "one two three four five six " * 10, "max_tokens": 1, "cache_salt": "reset"}

    def num_cached() -> int:
        return server.post(PATH, request).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert num_cached() == 0 and num_cached() > 0
    assert server.http.post("/reset_prefix_cache").json() == {"reset": True}
    assert num_cached() == 0
    with serving(FakeEngineClient()) as plain:
        error_of(plain.http.post("/reset_prefix_cache"), 404)


def test_the_version_is_the_package_s(server: Server) -> None:
    assert server.http.get("/version").json() == {"version": __version__}


def test_health_tells_starting_healthy_stopping_and_dead_apart() -> None:
    with serving(None) as server:

        def health() -> tuple[int, str]:
            response = server.http.get("/health")
            return response.status_code, response.json()["status"]

        assert health() == (503, "starting")
        for path in ("/v1/models", "/v1/models/x"):
            assert "loading" in error_of(server.http.get(path), 503)["message"]
        for path in (PATH, "/v1/chat/completions", "/tokenize", "/detokenize"):
            error_of(server.post(path, {}), 503)
        assert server.http.get("/openapi.json").status_code == server.http.get("/metrics").status_code == 200
        server.call(lambda: server.service.started(FakeEngineClient()))
        assert health() == (200, "healthy")
        server.call(server.service.stop)
        assert health() == (503, "stopping")
        assert "shutting down" in error_of(server.post(PATH, {"prompt": "a"}), 503)["message"]
        server.call(server.service.died)
        assert health() == (503, "dead")
        assert "died" in error_of(server.post(PATH, {"prompt": "a"}), 503)["message"]


def test_metrics_count_what_was_done_under_their_known_names(server: Server) -> None:
    def values() -> dict[str, float]:
        lines = server.service.metrics.text().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    label = '{model_name="teachlm"}'
    before = values()
    request = {"prompt": "Metrics count. " * 20, "max_tokens": 5, "ignore_eos": True, "cache_salt": "metrics"}
    num_prompt = server.post(PATH, request).json()["usage"]["prompt_tokens"]
    server.stream(PATH, request)
    ended = 'teachllm:request_success_total{finished_reason="length",model_name="teachlm"}'
    sampled = f"teachllm:generation_tokens_total{label}"
    server.until(lambda: values()[sampled] >= before.get(sampled, 0) + 10 and server.service.num_open == 0)
    after = values()
    assert server.http.get("/metrics").headers["content-type"].startswith("text/plain")
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown[ended] == 2
    assert grown[sampled] == 10
    assert grown[f"teachllm:prefix_cache_queries_total{label}"] == 2 * num_prompt
    assert 0 < grown[f"teachllm:prefix_cache_hits_total{label}"] < num_prompt
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert grown[f"teachllm:{name}_seconds_count{label}"] == 2
        assert grown[f"teachllm:{name}_seconds_sum{label}"] > 0
        assert grown[f'teachllm:{name}_seconds_bucket{{le="+Inf",model_name="teachlm"}}'] == 2
    assert grown[f"teachllm:request_decode_time_seconds_count{label}"] == 2
    assert 2 <= grown[f"teachllm:inter_token_latency_seconds_count{label}"] <= 8
    assert grown[f"teachllm:iteration_tokens_total_count{label}"] >= 10
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[f"teachllm:{name}{label}"] == 0
    for name in ("num_preemptions", "spec_decode_num_drafts", "spec_decode_num_draft_tokens"):
        assert f"teachllm:{name}_total{label}" in after


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
