"""Count how many tokens were to be drafted next, and why: the `next_draft` of a trace's scheduled requests."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from teachllm.trace.replay import Line

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class DraftLengthCount:
    """Count how often one length was chosen for one reason.

    Attributes:
        length: tokens to draft.
        count: scheduled requests, over all steps, for which it was chosen.
        why: the reason; where its numbers differed between them, from the smallest to the largest.
    """

    length: int
    count: int
    why: str


def draft_lengths(steps: Iterable[Line]) -> list[DraftLengthCount]:
    """Return the most frequent first, without requests that sampled no token: nothing is drafted within a prompt."""
    found: dict[tuple[int, tuple[str, ...]], list[list[str]]] = defaultdict(list)
    for scheduled in (scheduled for step in steps for scheduled in step["scheduled"]):
        if "next_draft" in scheduled and scheduled.get("num_sampled"):
            length, why = scheduled["next_draft"]
            parts = _NUMBER.split(why)  # words and numbers in turn
            found[length, tuple(parts[::2])].append(parts[1::2])
    lengths = [DraftLengthCount(length, len(values), _why(words, values)) for (length, words), values in found.items()]
    return sorted(lengths, key=lambda each: -each.count)


def _why(words: Sequence[str], values: list[list[str]]) -> str:
    """The reason, with the range of each of its numbers."""
    numbers = [sorted(column, key=float) for column in zip(*values, strict=True)]
    ranges = [n[0] if n[0] == n[-1] else f"{n[0]} to {n[-1]}" for n in numbers]
    return "".join(word + number for word, number in zip(words, [*ranges, ""], strict=True))
