"""Lesson 03, continuous batching: which request has which place, what a batch costs, and a policy that is judged."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from teachllm.config import EngineConfig
from teachllm.core.policy import FirstComeFirstServed, Key, Policy
from teachllm.core.request import Request
from teachllm.engine.observability.ceilings import known_ceilings
from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm.roofline import Ceilings, StepShape, step_work
from teachllm.sampling_params import SamplingParams
from teachllm.simulator.shapes import model_shape
from teachllm.simulator.simulate import DEFAULT_DEVICE, Simulation, simulate
from teachllm.simulator.workload import Arrival, Workload
from teachllm.trace.reader import parse_trace
from teachllm.trace.replay import Line
from teachllm_lessons.exercise import Exercise, Wrong, require, run_with
from teachllm_lessons.faults import ROOT
from teachllm_lessons.predict import Prediction
from teachllm_lessons.watch import Watch

QUEUE = {"A": 10, "B": 3, "C": 2, "D": 7, "E": 4, "F": 6}  # tokens of each answer, in order of arrival
PLACES = 3
ROOM: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 256, "enable_prefix_caching": False}
SHAPE = "qwen3-8b"

BYTES_OF_A_BATCH = Prediction(
    asks="Bytes of a step for 8 long contexts, in steps for a short one",
    answer=2.276,
    within=0.05,
    because="One token of context has 147,456 bytes of K and V, so the steps read 15.14 + 0.04 and 15.14 + 19.40 GB. "
    "Where reading is the limit, that is how many times as long the second step takes. The simulator, which adds what "
    "kernels and launches cost, has {simulated:.2f}; {where} took {alone:.2f} and {many:.2f} ms, {measured:.2f} times "
    "as long. The short step takes about a seventh longer than reading its bytes would, the long one a seventeenth: "
    "starting its kernels costs both the same. 8 times the tokens in little more than twice the time, with contexts "
    "that are 64 times as long: that is what empty places waste.",
    traps={
        1: "Weights are read once for all requests, but each request has K and V of its own.",
        1.157: "That is one request with the long context. Each of the 8 has K and V of its own.",
        1.639: "That is K or V alone: a step reads both.",
        8: "That is as if each request read the weights for itself. They are read once per step.",
        514: "That is K and V alone. Both steps read the weights as well.",
    },
)


def serve(scheduling_policy: str = "fcfs", overrides: EngineOverrides = NO_OVERRIDES) -> Watch:
    """The queue in three places, nothing computed yet."""
    watch = Watch(scheduling_policy=scheduling_policy, overrides=overrides, max_num_seqs=PLACES, **ROOM)
    for name, num_tokens in QUEUE.items():
        watch.add(name, f"Who is {name}?", num_tokens)
    return watch


# -- what is judged --------------------------------------------------------------------------------------------


class ShortestFirst(FirstComeFirstServed):
    """Put the request with the lowest bound on its output tokens first; requests may join in every step."""

    def key(self, request: Request) -> Key:
        return request.max_len - request.num_prompt_tokens, request.arrival_index

    def opens_batch(self, num_running: int) -> bool:
        return True


def request_for(name: str, arrival: int, num_tokens: int | None, num_prompt: int = 4) -> Request:
    """A request as a policy sees it in its queue, of a model with room for 100 tokens."""
    made = Request(name, list(range(num_prompt)), SamplingParams(max_tokens=num_tokens), arrival_index=arrival)
    made.max_len = made.longest(100, 16, 64)
    return made


def contract_order(policy: Policy, requests: Sequence[Request]) -> int:
    """Keys of any policy: one for each request, the same whenever it is asked for, and comparable."""
    keys: list[Key] = []
    for request in requests:
        found = policy.key(request)
        require(isinstance(found, tuple), f"key of {request.request_id} is {found!r}: give a tuple of numbers")
        require(
            policy.key(request) == found,
            f"key of {request.request_id} is another one when asked again: the queue is sorted once, and finds a "
            "request by its key",
        )
        keys.append(found)
    for index, one in enumerate(keys):
        for other_index, other in enumerate(keys[:index]):
            names = f"{requests[other_index].request_id} and {requests[index].request_id}"
            require(one != other, f"gives {names} the same key {one}: the queue cannot tell one from the other")
            try:
                _ = one < other
            except TypeError as error:
                raise Wrong(f"keys of {names} are {other} and {one}, which have no order: {error}") from error
    return len(requests)


def contract_batching(piece: type[Policy]) -> int:
    """Open while others run, shortest answer first, ties in order of arrival, no two keys alike."""
    policy = piece()
    require(bool(policy.opens_batch(0)), "opens_batch(0) is false: nothing runs, and no request may begin")
    for num_running in (1, 2, 7, 255):
        require(
            bool(policy.opens_batch(num_running)),
            f"opens_batch({num_running}) is false: a place that has become free stays empty until all have finished. "
            "That is static batching",
        )
    cases = 5

    short_one, long_one = request_for("the one that wants 2", 1, 2), request_for("the one that wants 3", 0, 3)
    cases += contract_order(policy, [long_one, short_one])
    require(
        policy.key(short_one) < policy.key(long_one),
        "lets a request that wants 3 tokens go before one that wants 2 and came later: the fewer first",
    )
    twins = [request_for(f"arrival {arrival}", arrival, 5) for arrival in range(12)]
    cases += contract_order(policy, twins)
    for one, other in pairwise(twins):
        require(
            policy.key(one) < policy.key(other),
            f"puts {other.request_id} before {one.request_id}, of the same length: the one that came first goes first",
        )
    talkative, brief = request_for("a prompt of 60", 2, 4, num_prompt=60), request_for("a prompt of 2", 3, 9, 2)
    cases += contract_order(policy, [talkative, brief])
    require(
        policy.key(talkative) < policy.key(brief),
        "lets an answer of 9 tokens to a short prompt go before one of 4 tokens to a long prompt: a prompt takes one "
        "step, an answer one for each of its tokens",
    )
    endless = request_for("the one that says no number", 0, None)
    cases += contract_order(policy, [endless, request_for("the one that wants 5", 1, 5)])
    require(
        policy.key(request_for("the one that wants 5", 1, 5)) < policy.key(endless),
        "lets a request without max_tokens, which may go on to the model's last position, go before one of 5 tokens",
    )
    return cases + 3


CROWD = Workload(num_requests=120, rate=40.0, prompt_len=(20, 200), output_len=(4, 200))


@lru_cache
def _crowd(piece: type[Policy]) -> Simulation:
    config = EngineConfig(max_num_seqs=8, enable_prefix_caching=False)
    return simulate(config, CROWD, model_shape(SHAPE), overrides=EngineOverrides(policy=piece()))


def crowd(piece: type[Policy]) -> Simulation:
    """120 requests on a simulated H200, under a policy that is made anew."""
    return _crowd(piece)


def waits(found: Simulation) -> list[float]:
    """Seconds to each request's first token, of a simulation, in order of arrival."""
    requests = parse_trace(found.lines).replay.requests.values()
    return [request.token_times[0] - request.arrival["time"] for request in requests]


def live_batching(piece: type[Policy]) -> str:
    run_with(EngineOverrides(policy=piece()))
    usual, found = (crowd(each).figures.ttft.mean for each in (FirstComeFirstServed, piece))
    require(found < 0.8 * usual, f"gains nothing: a first token after {found:.2f} s on average, {usual:.2f} s in order")
    return (
        f"The engine ran with it: the same words. Of 120 requests on a simulated GPU one waits {found:.2f} s for its "
        f"first token on average, in order of arrival {usual:.2f} s."
    )


BATCHING = Exercise(
    lesson="03",
    name="Batching",
    contract=contract_batching,
    live=live_batching,
    reference=ShortestFirst,
    hints=(
        "`opens_batch` has one answer that is right for continuous batching, whatever runs. For the key: which number "
        "of a request says how many steps it will take at most, and what if two are alike?",
        "`request.sampling_params.max_tokens` may be None. `request.max_len` never is: it is the longest that prompt "
        "and answer can get together. After that number put one that no two requests share.",
        "`return (request.max_len - request.num_prompt_tokens, request.arrival_index)`, and `return True`.",
    ),
    whose="the lesson's",
)


# -- what the pictures show ------------------------------------------------------------------------------------


def seats(lines: Sequence[Line], count: int = PLACES) -> list[list[tuple[str, bool] | None]]:
    """Return, for each step and place, a request and whether it computes its prompt, or None."""
    taken: dict[str, int] = {}
    found: list[list[tuple[str, bool] | None]] = []
    for step in (line for line in lines if line["event"] == "step"):
        row: list[tuple[str, bool] | None] = [None] * count
        for scheduled in step["scheduled"]:
            name = scheduled["request_id"]
            if name not in taken:
                taken[name] = min(set(range(count)) - set(taken.values()))
            row[taken[name]] = name, scheduled["phase"] == "prefill"
        found.append(row)
        for name in [*step["finished"], *step["preempted"]]:
            taken.pop(name, None)
    return found


def ceilings() -> Ceilings:
    """Return the ceilings of an H200 in bfloat16."""
    found = known_ceilings(DEFAULT_DEVICE, "bfloat16")
    assert found is not None
    return found


# -- what is measured ------------------------------------------------------------------------------------------


def decode_seconds(lines: Iterable[Line]) -> dict[int, float]:
    """Seconds of a step of decodes alone, from the end of the step before it, by the number of its requests.

    The shortest of its kind: the machine may have had other work during the others.
    """
    steps = [line for line in lines if line["event"] == "step"]
    found: dict[int, list[float]] = {}
    for before, step in pairwise(steps):
        if all(scheduled["phase"] == "decode" for scheduled in [*before["scheduled"], *step["scheduled"]]):
            found.setdefault(len(step["scheduled"]), []).append(step["end"] - before["end"])
    return {size: min(found[size]) for size in sorted(found)}


def simulated_step(num_requests: int, context: int = 64) -> float:
    """Seconds of a decode step on a simulated H200, with so many requests of so many tokens."""
    config = EngineConfig(max_num_seqs=num_requests, max_num_batched_tokens=1 << 20, enable_prefix_caching=False)
    work = [Arrival(0.0, [1] * context, 6) for _ in range(num_requests)]
    found = simulate(config, work, model_shape(SHAPE))
    return decode_seconds(map(json.loads, found.lines))[num_requests]


def live_steps(doublings: int = 4, apart: int = 8, num_runs: int = 5) -> dict[int, float]:
    """Seconds of a decode step on this machine, for 1, 2, 4, ... requests: the median of a few runs.

    Each run has all sizes, since half of the requests end every `apart` steps; other work then slows all of them alike.
    """
    settings = ROOM | {"num_gpu_blocks_override": 400, "check_invariants": False}
    runs = []
    for _ in range(num_runs):
        with Watch(max_num_seqs=1 << doublings, **settings) as watch:
            for number in range(1 << doublings):
                watch.add(str(number), "Why?", apart * (doublings + 1 - number.bit_length()))
            runs.append(decode_seconds(watch.run().trace.lines))
    return {size: statistics.median(run[size] for run in runs) for size in runs[0]}


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was timed on a GPU."""

    step: StepShape
    seconds: float


def bytes_of_a_step(step: StepShape) -> int:
    """Return the bytes that a step must read and write."""
    return step_work(model_shape(SHAPE), step).num_bytes


def measured_points() -> tuple[dict[str, MeasuredStep], str]:
    """Return steps as benchmarks/h200.py measured them (`teachllm/bench/workloads.py`), and what was measured where.

    Contexts grow while a workload is timed; each is taken at its mean.
    """
    for path in sorted((ROOT / "benchmarks" / "results").glob("*-nvidia-h200-*.json"), reverse=True):
        found = json.loads(path.read_text(encoding="utf-8"))
        work = found.get("workloads", {}).get(SHAPE, {})
        is_whole = {"single", "batch64", "long", "prefill16k"} <= work.keys()
        if "ceilings" in found and found.get("variant") == "bf16" and is_whole:
            milliseconds = {
                "1 x 256": (StepShape([1], [256], 1), work["single"]["tpot_ms"]),
                "64 x 1,088": (StepShape([1] * 64, [1088] * 64, 64), work["batch64"]["step_ms"]),
                "8 x 16,448": (StepShape([1] * 8, [16_448] * 8, 8), work["long"]["step_ms"]),
                "prompt of 16,384": (StepShape([16_384], [16_384], 1), work["prefill16k"]["ttft_ms"]),
            }
            points = {name: MeasuredStep(step, ms / 1000) for name, (step, ms) in milliseconds.items()}
            return points, f"{SHAPE} on one {found['device']} (commit {found['commit'][:9]})"
    raise FileNotFoundError("no result of benchmarks/h200.py in benchmarks/results")


def two_ways() -> None:
    """The queue under both policies."""
    for policy in ("static", "fcfs"):
        with serve(policy) as watch:
            watch.run()
            table = seats(watch.trace.lines)
        begins = {seat[0]: step for step, row in reversed([*enumerate(table)]) for seat in row if seat is not None}
        empty = sum(seat is None for row in table for seat in row)
        starts = ", ".join(f"{name} in {begins[name]}" for name in sorted(begins))
        print(f"{policy:6} {len(table)} steps, {empty:2} empty places; first steps: {starts}")
