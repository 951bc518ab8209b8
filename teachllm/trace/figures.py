"""Figures of a run, from its trace alone: of a simulation, and of any engine that wrote one.

    TTFT     from a request's arrival to the end of the step that gave its first token, waiting included
    ITL      from each step that gave a request tokens to the next one that did
    waste    of the slots in used blocks the part that no token has been computed for

Neither texts nor token ids are needed. The format of a trace is in docs/trace.md.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from teachllm.trace.replay import num_computed_after

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """Seconds, or 0 where there is nothing to count."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Percentiles linear between neighbours, as NumPy's default."""
        if len(values) < 2:
            value = values[0] if values else 0.0
            return cls(value, value, value)
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        return cls(statistics.fmean(values), cuts[49], cuts[98])


@dataclass(frozen=True)
class Figures:
    """Hold the figures of a whole trace. Completions count as requests; shares are from 0 to 1.

    Attributes:
        duration: seconds from the first arrival, or a fork's beginning, to the end of the last step.
        output_tokens_per_s: over the duration.
        num_preemptions: how often a request lost its blocks.
        prefix_hit_rate: prompt tokens found in the cache when their request was first admitted, of all such prompts'.
        waste: mean over steps of the share of slots in used blocks that are not filled; None without a KV cache.
        wasted_slots: mean over steps of their number; None likewise.
        budget_used: mean share of the token budget that a step gives out.
        blocks_used: mean share of the pool that is in use after a step.
        device_busy: share of the duration that the device worked; None where the trace does not say.
        num_drafts, num_draft_tokens, num_accepted_tokens: how often drafts of a request were verified, how many tokens
            they had, and how many of those held.
    """

    duration: float
    num_steps: int
    num_requests: int
    num_finished: int
    num_output_tokens: int
    output_tokens_per_s: float
    ttft: Spread
    itl: Spread
    num_preemptions: int
    prefix_hit_rate: float
    waste: float | None
    wasted_slots: float | None
    budget_used: float
    blocks_used: float
    device_busy: float | None
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


def figures(lines: Iterable[str | Event]) -> Figures:
    """Sums a trace up.

    Args:
        lines: of JSON, or the events that they hold.

    Raises:
        ValueError: a line is no JSON, or the trace has no header.
    """
    events = [_parse(number, line) for number, line in enumerate(lines, 1)]
    if not events or events[0].get("event") != "header":
        raise ValueError("a trace begins with its header, and this one does not: give all of its lines")
    header, steps = events[0], [event for event in events if event["event"] == "step"]
    config, requests = header["config"], _requests(events)
    forked = next((event for event in events if event["event"] == "fork"), None)
    began = min((request.arrived for request in requests), default=header["time"])
    if forked is not None:
        began = forked["time"]
    duration = max((step["end"] for step in steps), default=began) - began
    num_output = sum(scheduled.get("num_sampled", 0) for step in steps for scheduled in step["scheduled"])
    wasted = _wasted(events, steps, config["block_size"]) if config["enable_kv_cache"] else None
    starts = [(request.first_start, request.num_prompt_tokens) for request in requests]
    admitted = [(start, num_prompt) for start, num_prompt in starts if start is not None]
    budget = config["max_num_batched_tokens"]
    device = [step["roofline"]["seconds"] for step in steps if "roofline" in step]
    drafted = [scheduled for step in steps for scheduled in step["scheduled"] if _num_drafted(scheduled)]
    return Figures(
        duration=duration,
        num_steps=len(steps),
        num_requests=len(requests),
        num_finished=sum(len(step["finished"]) for step in steps) + sum(event["event"] == "stop" for event in events),
        num_output_tokens=num_output,
        output_tokens_per_s=num_output / duration if duration else 0.0,
        ttft=Spread.of([r.token_times[0] - r.arrived for r in requests if r.token_times]),
        itl=Spread.of([later - earlier for r in requests for earlier, later in pairwise(r.token_times)]),
        num_preemptions=sum(len(step["preempted"]) for step in steps),
        prefix_hit_rate=sum(start for start, _ in admitted) / sum(n for _, n in admitted) if admitted else 0.0,
        waste=None if wasted is None else _mean(empty / slots for empty, slots in wasted if slots),
        wasted_slots=None if wasted is None else _mean(empty for empty, _ in wasted),
        budget_used=_mean(sum(scheduled["num_tokens"] for scheduled in step["scheduled"]) / budget for step in steps),
        blocks_used=_mean(step["blocks"]["used"] / header["num_blocks"] for step in steps),
        device_busy=sum(device) / duration if len(device) == len(steps) and duration else None,
        num_drafts=len(drafted),
        num_draft_tokens=sum(map(_num_drafted, drafted)),
        num_accepted_tokens=sum(scheduled.get("num_accepted", 0) for scheduled in drafted),
    )


def _num_drafted(scheduled: Event) -> int:
    """Return the verified drafts that the drafter proposed for a scheduled request; 0 if its result came too late."""
    num_draft: int = scheduled.get("num_draft", 0) if scheduled.get("num_sampled") else 0
    return min(scheduled.get("num_proposed", num_draft), num_draft)


@dataclass
class _Request:
    """A completion: when it arrived, the first token that it computed (those before it were found), its steps."""

    arrived: float
    num_prompt_tokens: int
    first_start: int | None = None
    token_times: list[float] = field(default_factory=list)


def _requests(events: Sequence[Event]) -> list[_Request]:
    """In order of arrival. An id may be used again."""
    found: list[_Request] = []
    by_id: dict[str, _Request] = {}
    for event in events:
        if event["event"] == "arrival":
            found.append(_Request(event["time"], event["num_prompt_tokens"]))
            by_id[event["request_id"]] = found[-1]
        if event["event"] == "fork":
            for known in event["requests"]:
                request = by_id[known["request_id"]]
                request.first_start, request.token_times = known.get("num_cached_tokens"), [*known["token_times"]]
        for scheduled in event.get("scheduled", ()):
            request = by_id[scheduled["request_id"]]
            if request.first_start is None:
                request.first_start = scheduled["start"]
            if scheduled.get("num_sampled", 0):
                request.token_times.append(event["end"])
    return found


def _wasted(events: Sequence[Event], steps: Sequence[Event], block_size: int) -> list[tuple[int, int]]:
    """Per step (slots not filled, slots) in used blocks. Shared blocks are full, so only tails have empty slots."""
    table_lens: Counter[str] = Counter()
    computed: dict[str, int] = {}
    wasted = []
    ahead = 0  # the first step that was not scheduled when this one's line was written
    for event in events:
        for kind, _, *rest in event.get("block_events", ()):
            if kind in ("allocate", "hit"):
                table_lens[rest[0]] += 1
            elif kind == "free":
                table_lens[rest[0]] -= 1
                if not table_lens[rest[0]]:
                    del table_lens[rest[0]]
        if event["event"] == "fork":
            computed |= {known["request_id"]: known["num_computed_tokens"] for known in event["requests"]}
        if event["event"] != "step":
            continue
        while ahead < len(steps) and steps[ahead]["time"] < event["end"]:
            for scheduled in steps[ahead]["scheduled"]:
                computed[scheduled["request_id"]] = num_computed_after(scheduled)
            ahead += 1
        held = ((n * block_size, computed.get(name, 0)) for name, n in table_lens.items())
        empty = sum(max(slots - filled, 0) for slots, filled in held)
        wasted.append((empty, event["blocks"]["used"] * block_size))
    return wasted


def _parse(number: int, line: str | Event) -> Event:
    if not isinstance(line, str):
        return line
    try:
        event = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} of the trace is no JSON: {error}") from error
    if not isinstance(event, dict) or "event" not in event:
        raise ValueError(f"line {number} of the trace is no event: it needs the field 'event'")
    return event


def _mean(values: Iterable[float]) -> float:
    collected = list(values)
    return statistics.fmean(collected) if collected else 0.0
