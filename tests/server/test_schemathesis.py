"""Whatever the schema allows, and what it does not, sent to the server: requests that nobody thought of.

Schemathesis reads /openapi.json. For each operation it first tries the limits of every field by itself, from both
sides, and wrong methods and types; then Hypothesis draws at random, the same on every run: five thousand requests
where tests are thorough, a handful that was picked elsewhere. The engine is real, its model small, and the KV
cache checks itself after every step.

Every answer has to be what the schema says. Nothing may be refused that the schema allows, except where fields
contradict each other (`CONTRADICTIONS`); nothing may be accepted that it forbids.

/trace is left out: its stream has no end, and test_trace_endpoint.py reads it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import GenerationConfig
from schemathesis.core.failures import AcceptedNegativeData, FailureGroup
from schemathesis.specs.openapi.checks import positive_data_acceptance

from teachllm.config import EngineConfig
from teachllm.engine.async_llm import AsyncLLM
from tests.server.checkpoints import random_checkpoint
from tests.server.fake_engine import Server, chunks, serving
from tests.thorough import THOROUGH
from tests.waiting import HANG_SECONDS, wait_for

MODEL = "tiny"
LEAST_RANDOM = 40  # cases of an operation
MAX_TOKENS_OF_A_CASE = 1024  # more would be waiting, and no test

# How many cases each operation gets at least where tests are thorough.
CASES = {
    "GET /health": 8,
    "GET /version": 8,
    "GET /metrics": 8,
    "GET /v1/models": 8,
    "GET /v1/models/{model}": 60,
    "POST /v1/completions": 1520,
    "POST /v1/chat/completions": 2100,
    "POST /tokenize": 900,
    "POST /detokenize": 220,
    "POST /v1/load_lora_adapter": 80,
    "POST /v1/unload_lora_adapter": 80,
    "POST /reset_prefix_cache": 8,
}
_USER = {"role": "user", "content": "a"}
# What is asked of each operation where tests are not thorough, and the status of the answer.
PICKED: list[tuple[str, Any, int]] = [
    *((label, None, 200) for label in CASES if label.startswith("GET") or "reset" in label),
    ("POST /v1/completions", {"prompt": "a"}, 200),
    ("POST /v1/completions", {"prompt": [[5], [6, 7]], "n": 2, "echo": True, "logprobs": 0, "max_tokens": 1}, 200),
    ("POST /v1/completions", {"prompt": ["", "\x00\u2028"], "stream": True, "seed": -(2**63), "min_p": 1.0}, 400),
    ("POST /v1/completions", {"prompt": "\x00\u2028", "stream": True, "seed": -(2**63), "min_p": 1.0}, 200),
    ("POST /v1/completions", {"prompt": "a", "temperature": -1e-9}, 400),
    ("POST /v1/chat/completions", {"messages": [_USER], "stream": True, "priority": 1 - 2**31}, 200),
    ("POST /v1/chat/completions", {"messages": [_USER], "logprobs": True, "top_logprobs": 20, "stop": ["a"]}, 200),
    ("POST /v1/chat/completions", {"messages": [_USER | {"name": "b"}], "prompt_logprobs": 0, "max_tokens": 1}, 200),
    ("POST /v1/chat/completions", {"messages": [{"role": "user"}]}, 400),
    ("POST /v1/chat/completions", {"messages": [_USER], "response_format": {"type": "json_object"}}, 501),
    ("POST /tokenize", {"messages": [_USER], "add_generation_prompt": False}, 200),
    ("POST /tokenize", {"prompt": 5}, 400),
    ("POST /detokenize", {"tokens": [0, 4095]}, 200),
    ("POST /detokenize", {"tokens": [4096]}, 400),
    ("POST /v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}, 501),
    ("POST /v1/unload_lora_adapter", {"lora_name": "a"}, 501),
]
GENERATES = ("POST /v1/completions", "POST /v1/chat/completions")

# Why a request may be refused that the schema allows: what no schema of single fields can tell.
CONTRADICTIONS = re.compile(
    r"the prompt has \d+ tokens?"
    r"|the (prompt|conversation) has \d+ characters, and \d+ tokens"
    r"|stream_options says how to stream"
    r"|prompt_logprobs are not streamed"
    r"|max_tokens=0 generates nothing"
    r"|min_tokens=\d+ is more than max_tokens"
    r"|top_logprobs needs logprobs"
    r"|continue_final_message: the last message has no text"
    r"|continue_final_message goes on with the last message, and add_generation_prompt begins another"
    r"|structured_outputs takes exactly one kind"
    r"|tool_choice (names|allows)"
    r"|the arguments of a tool call have to be a JSON object"
    r"|a request may not bring its own chat_template"
    r"|chat_template_kwargs may not hold"
    r"|logit_bias: token id \d+ is not in the vocabulary"
)
# Fields that end nearly every random request before it reaches the engine.
REFUSED = ("model", "structured_outputs", "response_format", "use_beam_search", "chat_template", "stream_options")
REFUSED += ("tool_choice", "tools", "min_tokens", "logit_bias", "top_logprobs", "max_tokens", "max_completion_tokens")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = EngineConfig(
        model=random_checkpoint(tmp_path_factory.mktemp("random"), max_new_tokens=8),
        device="cpu",
        max_model_len=256,
        max_num_seqs=32,
        scheduling_policy="priority",
        check_invariants=True,
    )
    engine_client = AsyncLLM.start(
        config, own_process=False, on_stats=lambda stats: running.service.metrics.on_step(stats)
    )
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with serving(engine_client, served_model_names=(MODEL,), dev_endpoints=True, **tools) as running:
        yield running
    engine_client.close()


@pytest.fixture(scope="module")
def schema(server: Server) -> Any:
    config = schemathesis.Config.from_dict(
        {
            "cache": {"enabled": False},  # it would write into the working directory
            "max-stream-events": 1_000_000,  # it would read ten and hang up
        }
    )
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=config, timeout=HANG_SECONDS)


def test_there_are_five_thousand_cases_and_no_operation_without_any(schema: Any) -> None:
    assert sum(CASES.values()) >= 5000
    assert {result.ok().label for result in schema.get_all_operations()} == set(CASES)


@pytest.fixture(autouse=True)
def no_constants_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis mixes in constants of the modules that happen to be loaded: cases would depend on the other tests."""
    monkeypatch.setattr(providers, "_get_local_constants", providers.Constants)
    monkeypatch.setattr(providers, "CONSTANTS_CACHE", type(providers.CONSTANTS_CACHE)(1024))


@pytest.mark.skipif(not THOROUGH, reason="five thousand requests: make test-thorough")
@pytest.mark.parametrize("label", CASES)
def test_an_operation_answers_as_its_schema_says(server: Server, schema: Any, label: str) -> None:
    before = greedy(server)
    operation = schema.find_operation_by_label(label)
    statuses: Counter[int] = Counter()
    with requests.Session() as session:

        def judge(case: Case) -> None:
            statuses[answered(case, session)] += 1

        if "{model}" in label:
            assert answered(operation.Case(path_parameters={"model": MODEL}), session) == 200
        for case in schema.iter_coverage_cases(
            operation, generation_modes=list(GenerationMode), generation_config=GenerationConfig()
        ):
            judge(case)
        positive = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
        negative = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
        strategies = [positive, positive.map(to_the_engine), positive.map(as_a_stream), negative]
        random = settings(
            max_examples=max(CASES[label] - statuses.total(), LEAST_RANDOM),
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # the first failure is told as it is
            suppress_health_check=list(HealthCheck),
        )
        random(given(case=st.one_of(strategies))(judge))()
    assert statuses.total() >= CASES[label], statuses
    if label in GENERATES:
        assert statuses[200] >= 150, "too few requests reached the engine to tell anything"
    nothing_is_left(server)
    assert greedy(server) == before


def test_picked_requests_are_answered_as_the_schema_says(server: Server, schema: Any) -> None:
    """A few of what is drawn at random where tests are thorough."""
    assert {label for label, _, _ in PICKED} == set(CASES)
    before = greedy(server)
    with requests.Session() as session:
        for label, body, status in PICKED:
            operation = schema.find_operation_by_label(label)
            given = {"path_parameters": {"model": MODEL}} if "{model}" in label else {}
            given |= {} if body is None else {"body": body, "media_type": "application/json"}
            found = answered(operation.Case(**given), session, is_allowed=status != 400)
            assert found == status, (label, body)
    nothing_is_left(server)
    assert greedy(server) == before


def answered(case: Case, session: requests.Session, is_allowed: bool = True) -> int:
    """Return the status of the answer, which has to be a right one.

    Args:
        is_allowed: The schema allows the request; a case that schemathesis has made knows that itself.
    """
    is_positive = is_allowed if case.meta is None else case.meta.generation.mode.is_positive
    if is_positive and isinstance(case.body, dict):
        limit_work(case.body)
    response = case.call(session=session, timeout=HANG_SECONDS)
    # What these two ask for is asked for below, with the exceptions that are named.
    try:
        case.validate_response(response, excluded_checks=[not_a_server_error, positive_data_acceptance])
    except FailureGroup as failures:
        if not all(is_no_violation(failure, case) for failure in failures.exceptions):
            raise
    status = response.status_code
    if response.headers["content-type"][0].startswith("text/event-stream"):
        assert not any("error" in chunk for chunk in chunks(response.text))
    if status >= 400 and not case.path.startswith("/health"):
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == status and error["message"] and error["type"].endswith("Error")
        assert status < 500 or (status == 501 and "not built yet" in error["message"]), error
        if is_positive and status == 400:
            assert CONTRADICTIONS.search(error["message"]), (error, case.body)
    return status


def is_no_violation(failure: BaseException, case: Case) -> bool:
    """Return whether no refusal was due: what violates one branch of `anyOf` may suit another."""
    if not isinstance(failure, AcceptedNegativeData) or "component: in body" not in failure.message:
        return False
    document = case.operation.schema.raw_schema
    content = document["paths"][case.path][case.method.lower()]["requestBody"]["content"]["application/json"]
    body_schema = {**content["schema"], "components": document["components"]}
    return bool(jsonschema_rs.validator_for(body_schema).is_valid(case.body))


def to_the_engine(case: Case) -> Case:
    """Leaves out what would end the request before."""
    if isinstance(case.body, dict):
        case.body = {name: value for name, value in case.body.items() if name not in REFUSED}
    return case


def as_a_stream(case: Case) -> Case:
    """The same, streamed."""
    to_the_engine(case)
    if isinstance(case.body, dict) and case.operation.label in GENERATES:
        case.body.pop("prompt_logprobs", None)
        case.body |= {"stream": True}
    return case


def limit_work(body: dict[str, Any]) -> None:
    """Asks for less where the schema allows hours of work."""
    n, prompt, max_tokens = body.get("n") or 1, body.get("prompt"), body.get("max_tokens") or 16
    if isinstance(prompt, list) and not isinstance(prompt[0], int | float):
        del prompt[max(1, MAX_TOKENS_OF_A_CASE // 16 // int(n)) :]
        n *= len(prompt)
    if n * max_tokens > MAX_TOKENS_OF_A_CASE:
        body["max_tokens"] = max(1, int(MAX_TOKENS_OF_A_CASE // n))


def greedy(server: Server) -> str:
    request = {"prompt": "Still there?", "max_tokens": 12, "temperature": 0}
    response = server.post("/v1/completions", request)
    assert response.status_code == 200
    return response.json()["choices"][0]["text"]


def nothing_is_left(server: Server) -> None:
    """No request is open, and the engine has none, and no block of the KV cache is in use."""
    server.until(lambda: server.service.num_open == 0 and not server.service.open)

    def is_idle() -> bool:
        lines = server.http.get("/metrics").text.splitlines()
        values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("teachllm:")}
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(values[f"teachllm:{name}"] for name in gauges)

    wait_for(is_idle)  # an abort reaches the engine a moment after the client has gone
    assert server.http.get("/health").json() == {"status": "healthy"}
