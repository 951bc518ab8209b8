"""Short skills: copying, counting, JSON, continuing a list.

Each function returns what the user says and what the model must answer. Copying is what n-gram speculation
is demonstrated with.
"""

from __future__ import annotations

import json
import random
from typing import Any

from dialogues import words
from dialogues.held_out import load_held_out
from dialogues.passages import (
    DAYS,
    FIELDS,
    LETTERS,
    MONTHS,
    any_word,
    fragment,
    identifier,
    passage,
    scrambled,
    written_words,
)


def copy(rng: random.Random, frames: list[str]) -> tuple[str, str]:
    text = passage(rng)
    frame = rng.choice(frames)
    if frame.endswith(" {t}") and rng.random() < 0.15:
        return frame.replace("{t}", f'"{text}"'), text
    return frame.replace("{t}", text), text


def count(rng: random.Random, frames: list[str], down_frames: list[str]) -> tuple[str, str]:
    held = [tuple(pair) for pair in load_held_out()["count"]["ranges"]]
    while True:
        low = rng.randrange(0, 130)
        high = low + rng.randint(2, 24)
        if (low, high) not in held:
            break
    numbers = [str(value) for value in range(low, high + 1)]
    down = rng.random() < 0.15
    text = rng.choice(down_frames if down else frames).format(a=low, b=high)
    if rng.random() < 0.4:
        tail = rng.choice(("please", "for me", "now", "slowly", "aloud", "if you can", "thanks", words.noise(rng)))
        text = f"{text.rstrip('.!?')}{rng.choice((' ', ', '))}{tail}{rng.choice(('.', '', '?', '!'))}"
    return text, ", ".join(reversed(numbers) if down else numbers)


def continue_list(rng: random.Random, frames: list[str]) -> tuple[str, str]:
    """The next five items of a list everybody knows."""
    held = {shown for shown, _ in load_held_out()["list"]["items"]}
    while True:
        kind, shown = rng.choice((0, 0, 1, 1, 2, 2, 3, 4, 5, 6)), rng.randint(3, 5)
        if kind == 0:
            cycle: list[str] = DAYS if rng.random() < 0.5 else MONTHS
            start = rng.randrange(len(cycle))
            items = [cycle[(start + i) % len(cycle)] for i in range(shown + 5)]
        elif kind == 1:
            start = rng.randrange(26 - shown - 5 + 1)
            items = list(LETTERS[start : start + shown + 5])
            items = [item.upper() for item in items] if rng.random() < 0.4 else items
        else:
            step = (1, 2, 2, rng.choice((5, 10)), rng.choice((1, 3, 4)))[kind - 2]
            start = rng.randrange(0, 100)
            if step in (5, 10):
                start -= start % 5
            items = [str(start + step * i) for i in range(shown + 5)]
        text = ", ".join(items[:shown])
        if text not in held:
            return rng.choice(frames).replace("{t}", text + rng.choice(("", "", "", ", ...", ",", "..."))), ", ".join(
                items[shown:]
            )


def field_name(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(FIELDS)
    if kind < 0.7:
        return rng.choice(written_words()).lower()
    return rng.choice((words.noise, fragment, identifier))(rng).replace(" ", "_").replace("-", "_")


def value(rng: random.Random) -> str | int | bool:
    kind = rng.random()
    if kind < 0.35:
        return rng.randrange(10 ** rng.randint(1, 5))
    if kind < 0.46:
        return rng.random() < 0.5
    makers = (
        words.noise,
        words.made_up,
        lambda r: words.proper(r, "name"),
        lambda r: words.proper(r, "city"),
        scrambled,
        words.thing,
        any_word,
        fragment,
    )
    text = rng.choice(makers)(rng)
    if rng.random() < 0.15:
        text = f"{text} {any_word(rng)}"
    return text.title() if rng.random() < 0.25 else text


def spoken(item: Any) -> str:
    """A value as a user writes it in a request."""
    return str(item).lower() if isinstance(item, bool) else f'"{item}"' if isinstance(item, str) else str(item)


def pairs_text(pairs: dict[str, Any], style: int = 0) -> str:
    """The names and values of a JSON object as a request lists them."""
    joints = (" {} {}", " the {} {}", " {} = {}", " {}: {}", " {} is {}", " a {} of {}")
    said = [joints[style].format(name, spoken(item)).strip() for name, item in pairs.items()]
    if style in (2, 3):
        return ", ".join(said)
    return ", ".join(said[:-1]) + " and " + said[-1] if len(said) > 1 else said[0]


def json_object(rng: random.Random, frames: list[str]) -> tuple[str, str]:
    pairs: dict[str, Any] = {}
    for _ in range(rng.choice((1, 2, 2, 3, 3, 4))):
        pairs[field_name(rng)] = value(rng)
    text = pairs_text(pairs, rng.choice((0, 0, 0, 1, 2, 3, 4, 5)))
    if rng.random() < 0.3:
        text = text.replace('"', "")
    return rng.choice(frames).replace("{pairs}", text), json.dumps(pairs)
