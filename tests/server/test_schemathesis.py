"""Whatever the schema allows, and what it does not, sent to the server: requests that nobody thought of, hundreds of
them, or two thousand where tests are thorough.

Schemathesis reads /openapi.json. For each operation it first tries every limit of every field by itself, from both
sides, and wrong methods and types; then Hypothesis draws at random, the same on every run. The engine is real, its
model small, and the KV cache checks itself after every step.

Every answer has to be what the schema says, in time. Nothing may be refused that the schema allows, except where
fields contradict each other (`CONTRADICTIONS`); nothing may be accepted that it forbids.

/trace is left out: its stream has no end, and test_trace_endpoint.py reads it.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import GenerationConfig
from schemathesis.specs.openapi.checks import positive_data_acceptance

from teachllm.config import EngineConfig
from teachllm.engine.async_llm import AsyncLLM
from tests.server.checkpoints import random_checkpoint
from tests.server.door import Server, chunks, serving
from tests.thorough import times
from tests.waiting import wait_for

MODEL = "tiny"
TIME_LIMIT = 30.0  # seconds for one case; the slowest takes one on an idle machine
LEAST_RANDOM = 40  # cases of an operation
MAX_TOKENS_OF_A_CASE = times(32, 1024)  # more would be waiting, and no test

# How many cases each operation gets at least where tests are thorough; a sixth of it elsewhere.
CASES = {
    "GET /health": 8,
    "GET /version": 8,
    "GET /metrics": 8,
    "GET /v1/models": 8,
    "GET /v1/models/{model}": 50,
    "POST /v1/completions": 700,
    "POST /v1/chat/completions": 960,
    "POST /tokenize": 400,
    "POST /detokenize": 80,
    "POST /v1/load_lora_adapter": 70,
    "POST /v1/unload_lora_adapter": 70,
    "POST /reset_prefix_cache": 8,
}
GENERATES = ("POST /v1/completions", "POST /v1/chat/completions")

# Why a request may be refused that the schema allows: what no schema of single fields can tell.
CONTRADICTIONS = re.compile(
    r"the prompt has \d+ tokens"
    r"|stream_options says how to stream"
    r"|prompt_logprobs are not streamed"
    r"|max_tokens=0 generates nothing"
    r"|min_tokens=\d+ is more than max_tokens"
    r"|top_logprobs needs logprobs"
    r"|structured_outputs takes exactly one kind"
    r"|tool_choice names"
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
    door = AsyncLLM.start(config, own_process=False, on_stats=lambda stats: running.service.metrics.on_step(stats))
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with serving(door, served_model_names=(MODEL,), dev_endpoints=True, **tools) as running:
        yield running
    door.close()


@pytest.fixture(scope="module")
def schema(server: Server) -> Any:
    config = schemathesis.Config.from_dict(
        {
            "cache": {"enabled": False},  # it would write into the working directory
            "max-stream-events": 1_000_000,  # it would read ten and hang up
        }
    )
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=config)


def num_cases(label: str) -> int:
    return CASES[label] // times(6, 1)


def test_there_are_two_thousand_cases_and_no_operation_without_any(schema: Any) -> None:
    assert sum(CASES.values()) >= 2000
    assert {result.ok().label for result in schema.get_all_operations()} == set(CASES)


@pytest.fixture(autouse=True)
def no_constants_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis mixes in constants of the modules that happen to be loaded: cases would depend on the other tests."""
    monkeypatch.setattr(providers, "_get_local_constants", providers.Constants)
    monkeypatch.setattr(providers, "CONSTANTS_CACHE", type(providers.CONSTANTS_CACHE)(1024))


@pytest.mark.slow
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
            max_examples=max(num_cases(label) - statuses.total(), LEAST_RANDOM),
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # the first failure is told as it is
            suppress_health_check=list(HealthCheck),
        )
        random(given(case=st.one_of(strategies))(judge))()
    assert statuses.total() >= num_cases(label), statuses
    if label in GENERATES:
        assert statuses[200] >= times(25, 150), "too few requests reached the engine to tell anything"
    nothing_is_left(server)
    assert greedy(server) == before


def answered(case: Case, session: requests.Session) -> int:
    """The status of the answer, which has to be a right one."""
    is_positive = case.meta is None or case.meta.generation.mode.is_positive
    if is_positive and isinstance(case.body, dict):
        limit_work(case.body)
    began = time.monotonic()
    response = case.call(session=session, timeout=TIME_LIMIT)
    assert time.monotonic() - began < TIME_LIMIT
    # What these two ask for is asked for below, with the exceptions that are named.
    case.validate_response(response, excluded_checks=[not_a_server_error, positive_data_acceptance])
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
