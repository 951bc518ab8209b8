"""Health, metrics, and the routes beside generation."""

from __future__ import annotations

from teachllm import __version__
from tests.server.fake_engine import FakeEngineClient, Server, error_of, serving

PATH = "/v1/completions"


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
    assert (
        server.post("/tokenize", {"prompt": text, "truncate_prompt_tokens": 2}).json()["tokens"]
        == answer["tokens"][-2:]
    )
    assert server.post("/tokenize", {"prompt": text, "messages": None}).json()["tokens"] == answer["tokens"]
    messages = [{"role": "user", "content": text}]
    assert (
        "send one of them" in error_of(server.post("/tokenize", {"prompt": "a", "messages": messages}), 400)["message"]
    )
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
    own = {"Origin": server.url, "Host": server.url.removeprefix("http://")}
    assert server.http.post("/reset_prefix_cache", headers=own).json() == {"reset": True}
    error_of(server.http.post("/reset_prefix_cache", headers={"Origin": "http://evil.example"}), 403)
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
