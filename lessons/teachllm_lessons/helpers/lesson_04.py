"""Lesson 04, chunked prefill: how much of a long prompt a step takes, and a queue in which it matters."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from teachllm.core.policy import FirstComeFirstServed
from teachllm.core.request import Request
from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm.sampling_params import SamplingParams
from teachllm.simulator.simulate import Simulation
from teachllm.simulator.workload import Arrival, Workload, arrivals_of
from teachllm.trace.reader import parse_trace
from teachllm_lessons.exercise import Exercise, require, run_with
from teachllm_lessons.predict import Prediction
from teachllm_lessons.results import committed
from teachllm_lessons.watch import NoProgress, Watch

SHORT, LONG = 64, 16  # tokens: up to which a prompt is taken whole, and how much of a longer one a step takes
ROOM: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 512, "max_num_seqs": 8}
TALKERS = {"A": "What is a KV cache?", "B": "What is a block table?", "C": "What is a batch?"}
LONG_TEXT = "Paged attention, continuous batching, chunked prefill and prefix caching are explained in this long text. "
BUDGET = 96

Chunk = Callable[[Request, int], int]

PROMPT_STEPS = Prediction(
    asks="Steps that compute a part of the prompt",
    answer=10,
    because="A, B and C come first with one token each, so 45 of 48 are left for the prompt. Nine steps compute 405 of "
    "its tokens, and the tenth the last 4.",
    traps={
        1: "That is without chunking. A step computes 48 tokens at most.",
        7: "That is with a budget of 64, as in the picture above.",
        9: "That is 409 / 48 rounded up, without the three tokens per step that go to A, B and C, or 409 / 45 rounded "
        "down: a last step computes what is left.",
    },
)


def polite(request: Request, num_tokens: int) -> int:
    """A short prompt as far as it goes; of a long one a little in every step."""
    return num_tokens if request.num_prompt_tokens <= SHORT else min(num_tokens, LONG)


class Cut(FirstComeFirstServed):
    """Chunk prompts with the reader's `chunk`."""

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk

    def chunk(self, request: Request, num_tokens: int) -> int:
        return self._chunk(request, num_tokens)


def request_of(num_tokens: int, num_computed: int = 0) -> Request:
    """A prompt of so many tokens, some of which are computed."""
    made = Request("a", list(range(num_tokens)), SamplingParams())
    made.num_computed_tokens = num_computed
    return made


def contract_chunk(piece: Chunk) -> int:
    """No more than is allowed, never nothing, short ones whole, long ones in little pieces."""
    cases = 0
    for length in (2, SHORT, SHORT + 1, 500):
        for most in (2, 3, LONG, LONG + 1, SHORT, 200):
            if most > length:
                continue
            found = piece(request_of(length), most)
            asked = f"chunk(a prompt of {length}, {most})"
            require(isinstance(found, int), f"{asked} is {found!r}: give a number of tokens")
            require(found <= most, f"{asked} is {found}: more than budget and prompt allow")
            require(found > 0, f"{asked} is {found}: then nothing of it is ever computed, and it waits for ever")
            if length <= SHORT:
                require(found == most, f"{asked} is {found}: a prompt of up to {SHORT} tokens is to be taken as it is")
            else:
                require(
                    found <= LONG,
                    f"{asked} is {found}: of a prompt beyond {SHORT} tokens a step takes {LONG} at most, or all "
                    "others wait for it",
                )
                most_of_it = min(most, LONG)
                require(
                    found == most_of_it, f"{asked} is {found}: {most_of_it} are allowed, so it takes needlessly long"
                )
            cases += 1
    left = piece(request_of(500, 460), 40)
    require(left == LONG, f"the last 40 tokens of a prompt of 500 get {left}: it is still a long one, {LONG} per step")
    return cases + 1


def newcomers(overrides: EngineOverrides = NO_OVERRIDES, **settings: Any) -> Watch:
    """A long prompt first, then three short ones, all at once. The engine is closed."""
    with Watch(
        overrides=overrides, **(ROOM | {"max_num_batched_tokens": BUDGET, "enable_prefix_caching": False} | settings)
    ) as w:
        w.add("long", LONG_TEXT * 20, 8)
        for name, question in TALKERS.items():
            w.add(name, question, 12)
        return w.run()


def first_token_steps(watch: Watch) -> dict[str, int]:
    """The step that gave each request its first token."""
    found: dict[str, int] = {}
    for step in watch.trace.steps:
        for scheduled in step["scheduled"]:
            if scheduled.get("num_sampled"):
                found.setdefault(scheduled["request_id"], step["step"])
    return found


def live_chunk(piece: Chunk) -> str:
    run_with(EngineOverrides(policy=Cut(piece)))
    before, after = (
        first_token_steps(newcomers(overrides)) for overrides in (NO_OVERRIDES, EngineOverrides(policy=Cut(piece)))
    )
    late = [name for name in TALKERS if after[name] > 0]
    require(not late, f"lets {', '.join(late)} wait behind the long prompt, which came first")
    return (
        f"The engine ran with it: the same words. A, B and C have their first tokens in step 0, where they had to wait "
        f"for step {before['A']}; the long prompt has its own in step {after['long']} in place of {before['long']}."
    )


CHUNK = Exercise(
    lesson="04",
    name="chunk",
    contract=contract_chunk,
    live=live_chunk,
    reference=polite,
    hints=(
        "`num_tokens` is what budget and prompt allow, and you may only take less. When would you?",
        f"`request.num_prompt_tokens` says how long the prompt is. Up to {SHORT}: take what is allowed.",
        f"`return num_tokens if request.num_prompt_tokens <= {SHORT} else min(num_tokens, {LONG})`",
    ),
    whose="the lesson's",
)


def talk(**settings: Any) -> Watch:
    """Run three requests that are answering when a long prompt comes, after their fourth tokens; close the engine."""
    with Watch(**(ROOM | {"enable_prefix_caching": False} | settings)) as watch:
        for name, question in TALKERS.items():
            watch.add(name, question, 16)
        watch.run(4)
        watch.add("long", LONG_TEXT * 20, 8)
        return watch.run()


def gaps(watch: Watch) -> dict[str, list[float]]:
    """Seconds between a request's tokens."""
    times = {name: request.token_times for name, request in watch.state.requests.items()}
    return {name: [later - one for one, later in pairwise(each)] for name, each in times.items()}


def answers_and_long_prompts() -> list[Arrival]:
    """Return what benchmarks/prefill_gaps.py serves: 32 short questions, and 12 long prompts from half a second on."""
    answering = Workload(num_requests=32, prompt_len=64, output_len=300)
    prompts = Workload(num_requests=12, rate=8.0, prompt_len=6000, output_len=16)
    late = [replace(arrival, time=arrival.time + 0.5) for arrival in arrivals_of(prompts, 32_000)]
    return arrivals_of(answering, 32_000) + late


def ttft_of_long_prompts(found: Simulation, longer_than: int = 1000) -> float:
    """Return the mean seconds to a first token, of a simulation's long prompts."""
    requests = parse_trace(found.lines).replay.requests.values()
    long = [request for request in requests if request.arrival["num_prompt_tokens"] > longer_than]
    return statistics.fmean(request.token_times[0] - request.arrival["time"] for request in long)


def measured_budgets() -> tuple[dict[str, dict[str, float]], str]:
    """Return what benchmarks/prefill_gaps.py measured on a GPU, by budget ("whole": not cut), and what ran where."""
    _, found = committed("prefill-gaps")
    return found["budgets"], f"{found['device']}, {found['model']}"


def measured_rungs() -> tuple[dict[str, dict[str, Any]], str]:
    """Return the measured figures of the ladder's rungs without and with chunked prefill, and what ran where."""
    _, found = committed("ladder")
    (name, ladder), *_ = found["models"].items()
    figures = {rung["name"]: rung["figures"] for rung in ladder["rungs"]}
    return {rung: figures[rung] for rung in ("paged blocks", "chunked prefill")}, f"{found['device']}, {name}"


def who_waits() -> None:
    """Print in how many steps each request gets no token although it is running."""
    try:
        with Watch(**(ROOM | {"enable_prefix_caching": False, "max_num_batched_tokens": 16})) as watch:
            for name, question in TALKERS.items():
                watch.add(name, question, 12)
            watch.run(5)
            watch.add("long", LONG_TEXT * 3, 4)
            watch.run()
    except (NoProgress, AssertionError) as error:
        print(error)
        return
    for name in watch.outputs:
        steps = [step["step"] for step in watch.trace.steps for s in step["scheduled"] if s["request_id"] == name]
        idle = steps[-1] - steps[0] + 1 - len(steps)
        print(f"{name:5} is running for {steps[-1] - steps[0] + 1} steps, and gets nothing in {idle} of them")
