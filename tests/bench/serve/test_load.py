"""A load on a server: what is sent, when, and what is made of it."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from teachllm.bench.serve.arrivals import arrival_times
from teachllm.bench.serve.client import Target
from teachllm.bench.serve.dataset import Prompt, RandomLengths, random_prompts, read_prompts
from teachllm.bench.serve.figures import (
    details,
    figures,
    most_at_once,
    parse_metrics,
    parse_objectives,
    parse_percentiles,
)
from teachllm.bench.serve.load import Load, measure, run
from teachllm.bench.serve.record import Record
from tests.bench.serve.fake_openai import MODEL, Answer, FakeServer, running
from tests.waiting import HANG_SECONDS

PROMPTS = [Prompt(f"request {index}", 3) for index in range(8)]


def load_of(url: str, prompts: Sequence[Prompt], arrivals_s: Sequence[float], **how: object) -> Load:
    return run(asyncio.wait_for(measure(Target(url, timeout_s=HANG_SECONDS), prompts, arrivals_s, **how), HANG_SECONDS))  # type: ignore[arg-type]


def opens_at(num_open: int, server: FakeServer) -> Answer:
    """Holds every answer until so many requests are open at once."""
    gate = asyncio.Event()

    def on_open(number: int) -> None:
        if number == num_open:
            gate.set()

    server.on_open = on_open
    return Answer(held=gate)


def test_requests_arrive_whether_or_not_those_before_them_were_answered() -> None:
    server = FakeServer()
    answer = opens_at(len(PROMPTS), server)
    server.answer = lambda body: answer
    with running(server) as url:
        arrivals_s = arrival_times(len(PROMPTS), request_rate=200.0)
        load = load_of(url, PROMPTS, arrivals_s)
    assert not load.failed and server.max_open == most_at_once(load.records) == len(PROMPTS)
    assert [record.due_s for record in load.records] == arrivals_s
    assert all(record.sent_s >= record.due_s for record in load.records)
    assert {body["prompt"] for body in server.bodies} == {prompt.content for prompt in PROMPTS}


def test_no_more_than_max_concurrency_are_out_and_their_wait_is_not_the_clients_lateness() -> None:
    server = FakeServer()
    answer = opens_at(3, server)
    server.answer = lambda body: answer
    with running(server) as url:
        load = load_of(url, PROMPTS, [0.0] * 8, max_concurrency=3)
    assert not load.failed and server.max_open == most_at_once(load.records) == 3
    first_end = min(record.end_s for record in load.records)
    held = [record for record in load.records if record.sent_s >= first_end]
    assert len(held) == 5
    assert all(record.free_s >= first_end and record.late_s == record.sent_s - record.free_s for record in held)


def test_warm_ups_are_sent_before_and_not_counted() -> None:
    server, seen = FakeServer(), []
    with running(server) as url:
        warmups = [Prompt("warm up", 1)] * 2
        load = load_of(url, PROMPTS, [0.0] * 8, warmups=warmups, progress=lambda *done: seen.append(done))
    assert [body["prompt"] for body in server.bodies[:2]] == ["warm up"] * 2
    assert (load.model, len(load.records), len(server.bodies)) == (MODEL, 8, 10)
    assert seen == [(number, 10) for number in range(1, 11)]


def test_a_warm_up_that_fails_ends_it() -> None:
    with (
        running(FakeServer(lambda body: Answer(status=400))) as url,
        pytest.raises(RuntimeError, match="refused with 400"),
    ):
        load_of(url, PROMPTS, [0.0] * 8, warmups=PROMPTS[:1])


def test_failures_are_counted_and_their_tokens_are_not() -> None:
    def answer(body: dict) -> Answer:
        return Answer(hangs_up_after=1) if body["prompt"] in ("request 2", "request 5") else Answer()

    with running(FakeServer(answer)) as url:
        load = load_of(url, PROMPTS, [0.0] * 8)
    found = figures(load)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (6, 2, 18)
    assert list(found["errors"].values()) == [2]
    assert [bool(error) for error in details(load)["request_errors"]] == [index in (2, 5) for index in range(8)]


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_concurrency=0: must be at least 1"):
        run(measure(Target("http://here"), PROMPTS, [0.0] * 8, 0))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_spread_that_were_asked_for(burstiness: float) -> None:
    times = arrival_times(20_000, 50.0, burstiness, seed=3)
    gaps = [after - before for before, after in pairwise(times)]
    mean = statistics.fmean(gaps)
    assert times[0] == 0.0 and min(gaps) >= 0
    assert mean == pytest.approx(1 / 50.0, rel=0.06)
    assert statistics.pstdev(gaps) / mean == pytest.approx(burstiness**-0.5, rel=0.06)


def test_arrivals_follow_the_seed() -> None:
    assert arrival_times(9, 5.0, seed=1) == arrival_times(9, 5.0, seed=1) != arrival_times(9, 5.0, seed=2)
    assert arrival_times(3) == [0.0] * 3


@pytest.mark.parametrize("wrong", [{"request_rate": 0.0}, {"burstiness": -1.0}, {"request_rate": math.nan}])
def test_a_rate_that_is_none_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be more than 0"):
        arrival_times(3, **wrong)


def test_random_prompts_have_the_lengths_and_the_prefix_and_follow_the_seed() -> None:
    lengths = RandomLengths(input_len=10, output_len=20, range_ratio=0.5, prefix_len=4)
    ids = random_prompts(200, lengths, seed=1, num_ids=50)
    assert ids == random_prompts(200, lengths, seed=1, num_ids=50) != random_prompts(200, lengths, seed=2, num_ids=50)
    assert {tuple(prompt.content[:4]) for prompt in ids} == {tuple(ids[0].content[:4])}
    assert {len(prompt.content) - 4 for prompt in ids} == set(range(5, 16))
    assert {prompt.output_len for prompt in ids} == set(range(10, 31))
    assert {token for prompt in ids for token in prompt.content} == set(range(50))

    texts = [prompt.content for prompt in random_prompts(200, lengths, seed=1)]
    assert all(isinstance(text, str) for text in texts) and len(set(texts)) == 200
    words = [text.split() for text in texts]
    assert len({tuple(each[:4]) for each in words}) == 1
    assert {len(each) - 4 for each in words} == set(range(5, 16))


@pytest.mark.parametrize(
    "wrong", [{"input_len": 0}, {"output_len": 0}, {"prefix_len": -1}, {"range_ratio": 1.0}, {"range_ratio": -0.1}]
)
def test_lengths_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"random_{next(iter(wrong))}="):
        RandomLengths(**wrong)  # type: ignore[arg-type]


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: object) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return path

    return write


def test_a_file_of_prompts_is_read_in_its_order(written: Callable[..., Path]) -> None:
    path = written({"prompt": "Hi", "output_tokens": 5}, "", {"prompt": [1, 2]}, {"prompt": "Ho"})
    prompts = [Prompt("Hi", 5), Prompt([1, 2], 7), Prompt("Ho", 7)]
    assert read_prompts(path, None, 7) == prompts
    assert read_prompts(path, 2, 7) == prompts[:2]
    with pytest.warns(UserWarning, match="has 3 prompts, 5 are asked for"):
        assert read_prompts(path, 5, 7) == [*prompts, *prompts[:2]]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '"text"', {"text": "Hi"}, {"prompt": []}, {"prompt": ["a"]}, {"prompt": "Hi", "output_tokens": 0}],
)
def test_a_line_that_is_no_prompt_is_named(written: Callable[..., Path], line: object) -> None:
    with pytest.raises(ValueError, match="line 2: must be like"):
        read_prompts(written({"prompt": "Hi"}, line), None, 7)
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(written(""), None, 7)


def record(sent_s: float, *chunk_s: float, num_tokens: int, error: str = "", due_s: float = 0.0) -> Record:
    found = Record(due_s, num_tokens, due_s, sent_s, list(chunk_s), chunk_s[-1] if chunk_s else sent_s + 1)
    found.num_prompt_tokens, found.num_output_tokens, found.has_usage, found.error = 10, num_tokens, True, error
    return found


LOAD = Load(
    "m",
    [
        record(0.0, 0.1, 0.2, 0.5, num_tokens=5),
        record(1.0, 1.3, 1.4, num_tokens=2, due_s=1.0),
        record(2.0, 2.2, num_tokens=1, due_s=1.5),
        record(1.9, error="gone", num_tokens=9, due_s=1.9),
    ],
    duration_s=4.0,
    busy=0.2,
)


def test_figures_are_what_their_names_say() -> None:
    found = figures(LOAD, {"ttft": 250.0}, percentiles=(50, 99.9))
    assert (found["completed"], found["failed"], found["errors"]) == (3, 1, {"gone": 1})
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 8)
    assert (found["output_throughput"], found["total_token_throughput"]) == (2.0, 9.5)
    assert (found["request_throughput"], found["request_goodput"]) == (0.75, 0.5)
    assert found["mean_ttft_ms"] == pytest.approx(200) and found["p50_ttft_ms"] == pytest.approx(200)
    assert found["mean_tpot_ms"] == pytest.approx(100)  # (0.5 - 0.1) / 4 and 0.1; the single token has none
    assert found["mean_itl_ms"] == pytest.approx(500 / 3)  # 100, 300 and 100
    assert found["median_e2el_ms"] == pytest.approx(400)
    assert found["p99.9_e2el_ms"] == pytest.approx(500, rel=0.01)
    assert found["max_concurrent_requests"] == 2
    assert found["client"]["max_late_ms"] == pytest.approx(500) and found["client"]["busy"] == 0.2
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("objectives", "num_met"),
    [({"ttft": 400}, 3), ({"ttft": 150}, 1), ({"tpot": 99}, 1), ({"e2el": 450}, 2), ({"ttft": 250, "e2el": 450}, 1)],
)
def test_goodput_counts_the_finished_requests_that_meet_every_objective(objectives: dict, num_met: int) -> None:
    assert figures(LOAD, objectives)["request_goodput"] == num_met / 4.0


def test_without_a_finished_request_there_are_no_times() -> None:
    found = figures(Load("m", LOAD.records[3:], 1.0, 0.1), {"ttft": 1.0})
    assert (found["completed"], found["request_goodput"], found["p99_itl_ms"]) == (0, 0.0, None)


def test_a_client_that_was_the_bottleneck_is_told() -> None:
    def doubts(late_s: float, ttft_s: float, busy: float = 0.5) -> str:
        return " ".join(Load("m", [record(late_s, late_s + ttft_s, num_tokens=1)], 1.0, busy).doubts())

    assert doubts(0.001, 0.002) == "" == doubts(0.015, 0.2)
    assert "100 ms late or more, beside a median TTFT of 200 ms" in doubts(0.1, 0.2)
    assert "used 97% of a core" in doubts(0.0, 0.2, busy=0.97)
    unsure = record(0.0, 0.1, num_tokens=1)
    unsure.has_usage = False
    assert "no usage for 1 requests" in " ".join(Load("m", [unsure], 1.0, 0.1).doubts())


def test_what_is_given_as_text_is_read_or_refused() -> None:
    assert parse_objectives(["ttft:200", "tpot:2.5"]) == {"ttft": 200.0, "tpot": 2.5}
    assert parse_metrics("itl,ttft") == ["itl", "ttft"] and parse_percentiles("50,99.9") == [50.0, 99.9]
    for wrong in (["ttft"], ["ttft:-1"], ["itl:20"], ["ttft:1", "ttft:2"], ["ttft:soon"]):
        with pytest.raises(ValueError, match="must be METRIC:MILLISECONDS"):
            parse_objectives(wrong)
    with pytest.raises(ValueError, match="no 'speed' here"):
        parse_metrics("ttft,speed")
    for text in ("101", "-1", "half"):
        with pytest.raises(ValueError, match="must be numbers from 0 to 100"):
            parse_percentiles(text)
