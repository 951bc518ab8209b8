"""Compute what the ranks of an engine did, from its trace: how long they computed, exchanged, and had nothing to do.

    stage 0   |== step 3 ==~~|...........|== step 4 ==~~|      =  computes        ~  in an exchange, waiting included
    stage 1   |..............== step 3 ==|..............==     .  a bubble

A bubble is the time in which a rank has nothing to compute while some rank is in a step: it has no plan, or waits for
another stage, in a `send` or a `recv`. So each rank's three shares add up to the time in which any rank is in a step.
What lies between, the engine's own time, is no rank's.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]
Span = tuple[float, float]
BETWEEN_STAGES = ("send", "recv")  # the transfer itself included, whose time is not known


@dataclass(frozen=True)
class RankFigures:
    """Hold the figures of one rank in a whole trace. Shares are of `seconds`, and add up to 1.

    Attributes:
        seconds: in which any rank was in a step.
        computes, exchanges, bubble: shares. Where the time of an exchange is not known, as within a CUDA graph, it is
        in
            `computes`, and so is the wait for another stage.
        operations: share of each kind of exchange that was timed, also of those that are a part of the bubble.
        sent: (calls, bytes) a step by operation, in the mean.
    """

    rank: int
    stage: int
    num_steps: int
    seconds: float
    computes: float
    exchanges: float
    bubble: float
    operations: dict[str, float]
    sent: dict[str, tuple[float, float]]


def rank_figures(lines: Iterable[Line]) -> list[RankFigures]:
    """By rank; none where a trace does not tell of ranks."""
    steps = [line["ranks"] for line in lines if line.get("ranks")]
    if not steps:
        return []
    seconds = covered((told["begin"], told["end"]) for ranks in steps for told in ranks)
    num_ranks = min(map(len, steps))
    return [_figures(rank, [ranks[rank] for ranks in steps], seconds) for rank in range(num_ranks)]


def _figures(rank: int, told: list[Line], seconds: float) -> RankFigures:
    in_steps = covered((each["begin"], each["end"]) for each in told)
    took: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for each in told:
        for operation, begin, end in spans_of(each):
            took[operation] += end - begin
        for operation, (count, total) in each["sent"].items():
            calls[operation] += count
            num_bytes[operation] += total
    waiting = sum(took.get(operation, 0.0) for operation in BETWEEN_STAGES)
    at_work, exchanging = in_steps - waiting, sum(took.values()) - waiting
    whole = seconds or 1.0
    return RankFigures(
        rank=rank,
        stage=told[0]["stage"],
        num_steps=len(told),
        seconds=seconds,
        computes=(at_work - exchanging) / whole,
        exchanges=exchanging / whole,
        bubble=(seconds - at_work) / whole,
        operations={operation: took[operation] / whole for operation in took},
        sent={each: (calls[each] / len(told), num_bytes[each] / len(told)) for each in calls},
    )


def spans_of(told: Line) -> Iterator[tuple[str, float, float]]:
    """(operation, begin, end) of a rank's exchanges in a step, on the trace's clock; none where they were not timed."""
    for operation, after, seconds in told.get("exchanges", ()):
        yield operation, told["begin"] + after, told["begin"] + after + seconds


def covered(spans: Iterable[Span]) -> float:
    """Return how long any of them lasts."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total
