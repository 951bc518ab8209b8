"""What the evaluation asks, and the check that none of it was in the training set.

Two files: `held_out.toml` is what the patterns were developed against, of `test_set.toml` nothing was learned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from dialogues.knowledge import HERE, load_knowledge, read_toml


@cache
def load_held_out() -> dict[str, Any]:
    return read_toml(HERE / "held_out.toml")


@cache
def load_test_set() -> dict[str, Any]:
    return read_toml(HERE / "test_set.toml")


def off_topic_asks() -> list[list[str]]:
    """Each off-topic question of the evaluation, followed by its nouns."""
    return [*load_held_out()["off_topic"]["ask"], *load_test_set()["off_topic"]["ask"]]


def frame_tables() -> list[dict[str, list[str]]]:
    """The evaluation's frames, by what they ask."""
    held = load_held_out()
    return [held["frames"], held["follow_ups"], load_test_set()["frames"]]


@cache
def banned_words() -> frozenset[str]:
    """The off-topic nouns of the evaluation, which must occur nowhere in training."""
    return frozenset(noun for _, *nouns in off_topic_asks() for noun in nouns)


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
    questions |= {normalised(ask) for ask, *_ in off_topic_asks()}
    questions |= {normalised(text) for text in held["copy"]["texts"]}
    return questions


def forbidden_patterns() -> re.Pattern[str]:
    """Matches a normalised message made from a held-out frame, whatever stands in its gaps."""
    shapes = []
    for table in frame_tables():
        for frame in (frame for group in table.values() for frame in group):
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
    forbidden = forbidden_questions()
    for table in frame_tables():
        forbidden |= frames(table)
    overlap = training & forbidden
    if overlap:
        raise ValueError(f"training patterns that are held out: {sorted(overlap)}")


def check_messages(messages: Iterable[str]) -> tuple[int, int]:
    """Raises ValueError if a training message is a held-out question, or holds a held-out noun.

    Returns how many messages were looked at, and how many distinct words they hold.
    """
    forbidden, pattern, banned = forbidden_questions(), forbidden_patterns(), banned_words()
    count, words = 0, set()
    for message in messages:
        text = normalised(message)
        count += 1
        words.update(text.split())
        if text in forbidden or pattern.fullmatch(text):
            raise ValueError(f"held-out question in the training set: {message!r}")
    if words & banned:
        raise ValueError(f"held-out nouns in the training set: {sorted(words & banned)}")
    return count, len(words)
