"""Lesson 06, preemption and fairness: a key that lets no request starve, and which one gives way without blocks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from teachllm.core.policy import FirstComeFirstServed, Key
from teachllm.core.request import Request
from teachllm.engine.overrides import EngineOverrides
from teachllm.errors import counted
from teachllm.sampling_params import SamplingParams
from teachllm.trace.replay import Line
from teachllm_lessons.exercise import Exercise, require, run_with
from teachllm_lessons.predict import Prediction
from teachllm_lessons.watch import NoProgress, Watch

PATIENCE = 8  # so many later arrivals may overtake a request, for each step of priority between them
TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 14, "max_model_len": 128, "max_num_seqs": 4}
QUESTIONS = {
    "A": "Explain what a KV cache keeps for every token, and why that saves so much of the work.",
    "B": "Tell me why batching pays on a GPU, and where that ends, in plain words for a beginner.",
    "C": "What does a scheduler do in every step, and why does it look at the waiting ones last?",
}

KeyOf = Callable[[Request], Key]

COMPUTED_AGAIN = Prediction(
    asks="Tokens that C computes on its return",
    answer=33,
    because="A and B took the last two of C's four blocks, since a freed table returns its blocks from the tail. The "
    "first two, 32 tokens, are still there and are found: 65 - 32 are left to compute. C goes on with {does} alone, "
    "without preemption.",
    traps={
        1: "That is with all four blocks found. A and B needed two blocks, and only C's were available.",
        17: "That is with one of the four blocks taken. A and B needed one each.",
        32: "32 tokens were found; C has 65.",
        64: "That is without a cache, and without the newest token, which has not been through the model yet.",
        65: "That is without a cache, or if the *first* blocks of C had been taken: then no later one can match.",
    },
)


def aged(request: Request) -> Key:
    """Make a priority worth a number of arrivals: a request that waits long enough is not overtaken any more."""
    return request.arrival_index + PATIENCE * request.priority, request.arrival_index


class By(FirstComeFirstServed):
    """Order requests by the reader's `key`."""

    def __init__(self, key: KeyOf) -> None:
        self._key = key

    def key(self, request: Request) -> Key:
        return self._key(request)


def request_at(arrival: int, priority: int) -> Request:
    """A request as a policy sees it."""
    made = Request(f"request {arrival}", [1, 2, 3], SamplingParams(), priority=priority)
    made.arrival_index = arrival
    return made


def contract_key(piece: KeyOf) -> int:
    """An order for requests: total, steady, by priority for a while, by arrival in the end."""
    cases = 0
    first = piece(request_at(0, 0))
    require(
        isinstance(first, tuple) and all(isinstance(part, int) for part in first),
        f"key(request) is {first!r}: give a tuple of integers, smaller goes first",
    )
    again = request_at(0, 0)
    again.num_computed_tokens = 3
    require(piece(again) == first, "changes while a request runs: the queue is sorted once, and would be wrong")
    cases += 2

    for gap in range(1, 60):
        require(
            piece(request_at(gap, 0)) > piece(request_at(0, 0)),
            f"puts arrival {gap} before arrival 0, of the same priority: the one that came first goes first",
        )
        cases += 1

    require(
        piece(request_at(1, 0)) < piece(request_at(0, 1)),
        "lets arrival 0 of priority 1 go before arrival 1 of priority 0: the lower number is the more urgent one",
    )
    for levels in (1, 2):
        for gap in range(1, PATIENCE * levels):
            require(
                piece(request_at(gap, 0)) < piece(request_at(0, levels)),
                f"lets arrival 0 of priority {levels} go before arrival {gap} of priority 0: a priority is worth "
                f"{PATIENCE} arrivals, so it would still be overtaken",
            )
            cases += 1
        for gap in (PATIENCE * levels, PATIENCE * levels + 1, 10_000):
            _require_an_order(piece, 0, levels, gap, 0)
            require(
                piece(request_at(gap, 0)) > piece(request_at(0, levels)),
                f"starves: arrival 0 of priority {levels} is still overtaken by arrival {gap} of priority 0, and so by "
                "every request that is ever to come",
            )
            cases += 1

    for gap in range(1, 40):
        for first_level in range(3):
            for second_level in range(3):
                _require_an_order(piece, 0, first_level, gap, second_level)
                cases += 1
    return cases


def _require_an_order(piece: KeyOf, first: int, first_level: int, second: int, second_level: int) -> None:
    found = piece(request_at(first, first_level))
    both = f"arrival {first} of priority {first_level} and arrival {second} of priority {second_level}"
    is_own = found != piece(request_at(second, second_level))
    require(is_own, f"gives {both} the same key {found}: no order between them")


def overtaken(overrides: EngineOverrides, num_urgent: int = 24) -> int:
    """Return how many of the urgent requests that keep coming begin before one that is not urgent and came first."""
    with Watch(overrides=overrides, num_gpu_blocks_override=24, max_model_len=64, max_num_seqs=1) as watch:
        coming = count(1)
        watch.add("patient", "Why?", 2, priority=1)
        for _ in range(3):
            watch.add(f"urgent {next(coming)}", "Now.", 2, priority=0)
        while watch.engine.has_unfinished_requests:
            before = len(watch.engine.unfinished_ids)
            watch.run(1)
            for _ in range(before - len(watch.engine.unfinished_ids)):  # as soon as one is done, the next comes
                if (number := next(coming)) <= num_urgent:
                    watch.add(f"urgent {number}", "Now.", 2, priority=0)
        order = list(dict.fromkeys(name for step in watch.trace.steps for name in scheduled_in(step)))
        return order.index("patient")


def scheduled_in(step: Line) -> list[str]:
    """Return the names of the requests that compute something in a step."""
    return [scheduled["request_id"] for scheduled in step["scheduled"]]


def live_key(piece: KeyOf) -> str:
    run_with(EngineOverrides(policy=By(piece)))
    number = overtaken(EngineOverrides(policy=By(piece)))
    most = PATIENCE + 3
    require(number <= most, f"lets {number} of 24 urgent requests go before a patient one; {most} at most")
    return f"The engine ran with it: the same words, and a patient request was overtaken by {number} of 24 urgent ones."


KEY = Exercise(
    lesson="06",
    name="key",
    contract=contract_key,
    live=live_key,
    reference=aged,
    hints=(
        "By `(priority, arrival_index)` the first number decides alone, however long a request waited. You need one "
        "number in which both have a say.",
        f"If a step of priority is worth {PATIENCE} arrivals, an urgent request that comes {PATIENCE} arrivals later "
        "is as good as one that does not hurry. The sum can be the same for two: something must break the tie.",
        f"`return (request.arrival_index + {PATIENCE} * request.priority, request.arrival_index)`",
    ),
    whose="the lesson's",
)


def three_in_a_tight_pool() -> None:
    """Three requests that fit at first and not in the end."""
    with Watch(enable_prefix_caching=False, **(TIGHT | {"num_gpu_blocks_override": 8})) as watch:
        for name, question in QUESTIONS.items():
            watch.add(name, question, 60)
        try:
            watch.run(steps=400)
        except NoProgress as error:
            print(error)
        ends = {name: step["step"] for step in watch.trace.steps for name in step["finished"]}
        for name, request in watch.state.requests.items():
            when = f"in step {ends[name]}" if name in ends else "never"
            print(f"{name}: preempted {counted(request.num_preemptions, 'time')}, done {when}")


def an_urgent_newcomer() -> None:
    """Two requests outgrow a pool of 4 blocks, and while the one that gave way waits, an urgent one comes."""
    settings: dict[str, Any] = {"num_gpu_blocks_override": 4, "enable_prefix_caching": False, "max_num_seqs": 4}
    with Watch(max_model_len=64, scheduling_policy="priority", check_invariants=False, **settings) as watch:
        watch.add("A", [9] * 32, 6)
        watch.add("B", [9] * 31, 8)
        watch.step()
        watch.add("urgent", [9] * 6, 3, priority=-1)
        for _ in range(4):
            print(watch.step())
