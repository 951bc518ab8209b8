"""What the evaluation asks, and the check that none of it was in the training set."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from knowledge import HERE, load_knowledge, read_toml


@cache
def load_held_out() -> dict[str, Any]:
    return read_toml(HERE / "held_out.toml")


@cache
def load_test_set() -> dict[str, Any]:
    return read_toml(HERE / "test_set.toml")


@cache
def banned_words() -> frozenset[str]:
    """The off-topic nouns of the evaluation, which must occur nowhere in training."""
    return frozenset(noun for _, *nouns in load_held_out()["off_topic"]["ask"] for noun in nouns)


def normalised(text: str) -> str:
    """Lower case, words only: what two questions share when they differ in punctuation alone."""
    return " ".join(re.findall(r"[a-z0-9{}]+", text.lower()))


def frames(table: dict[str, Any]) -> set[str]:
    """All question frames of a file, normalised, with {a} (the name and its article) as {n}."""
    found: set[str] = set()
    for value in table.values():
        items = value.values() if isinstance(value, dict) else [value]
        for group in items:
            if isinstance(group, list):
                found.update(normalised(frame.replace("{a}", "{n}")) for frame in group if isinstance(frame, str))
    return found


def forbidden_questions() -> set[str]:
    """Held-out questions that hold no placeholder, normalised."""
    held = load_held_out()
    questions = {normalised(ask) for asks in held["questions"].values() for ask in asks}
    questions |= {normalised(ask) for asks in held["talk"].values() for ask in asks}
    questions |= {normalised(ask) for ask, *_ in held["off_topic"]["ask"]}
    questions |= {normalised(text) for text in held["copy"]["texts"]}
    return questions


def forbidden_patterns() -> re.Pattern[str]:
    """Matches a normalised message made from a held-out frame, whatever stands in its gaps."""
    held = load_held_out()
    return _matcher([*held["frames"].values(), *held["follow_ups"].values()])


def _matcher(groups: list[list[str]]) -> re.Pattern[str]:
    shapes = []
    for frame in (frame for group in groups for frame in group):
        words = [re.escape(word) for word in re.split(r"\{[nam]\}", frame)]
        shapes.append(r"\s*.+\s*".join(normalised(word.replace("\\", "")) for word in words))
    return re.compile("|".join(f"(?:{shape.strip()})" for shape in shapes))


def check_patterns(*tables: dict[str, Any]) -> None:
    """Raises ValueError where a training frame or wording equals a held-out one.

    Skills are not compared: what is held out there is the text, the range or the values, not the frame.
    """
    training: set[str] = set()
    for table in tables:
        training |= frames(table)
    knowledge = load_knowledge()
    for entry in (*knowledge.questions, *knowledge.talk):
        training |= {normalised(ask) for ask in entry.ask}
    held = load_held_out()
    forbidden = forbidden_questions()
    for group in ("frames", "follow_ups"):
        forbidden |= frames({group: held[group]})
    overlap = training & forbidden
    if overlap:
        raise ValueError(f"training patterns that are held out: {sorted(overlap)}")


def check_messages(messages: Iterable[str]) -> tuple[int, int]:
    """Raises ValueError if a training message is a question of the evaluation, or holds one of its off-topic nouns.

    Returns how many messages were looked at, and how many distinct words they hold.
    """
    test = load_test_set()
    off_topic = test["off_topic"]["ask"]
    forbidden = forbidden_questions() | {normalised(ask) for ask, *_ in off_topic}
    patterns = forbidden_patterns(), _matcher(list(test["frames"].values()))
    banned = banned_words() | {noun for _, *nouns in off_topic for noun in nouns}
    count, words = 0, set()
    for message in messages:
        text = normalised(message)
        count += 1
        words.update(text.split())
        if text in forbidden or any(pattern.fullmatch(text) for pattern in patterns):
            raise ValueError(f"question of the evaluation in the training set: {message!r}")
    if words & banned:
        raise ValueError(f"nouns of the evaluation in the training set: {sorted(words & banned)}")
    return count, len(words)
