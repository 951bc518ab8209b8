"""How things are asked: the patterns put together, with fillers, unknown words and typing errors.

The same shapes ask about concepts and about everything else, so that only the thing itself tells whether
to answer or to decline.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from dialogues import passages, words
from dialogues.held_out import banned_words, check_patterns, forbidden_patterns, forbidden_questions, normalised
from dialogues.knowledge import HERE, Entry, read_toml


@cache
def load_patterns() -> dict[str, Any]:
    patterns = read_toml(HERE / "patterns.toml")
    check_patterns(patterns, {"frames": read_toml(HERE / "off_topic.toml")["frames"]})
    return patterns


@cache
def off_topic_frames() -> list[str]:
    return read_toml(HERE / "off_topic.toml")["frames"]


def fill_lists(rng: random.Random, text: str) -> str:
    """Puts people, places, fillers in their gaps."""
    table = load_patterns()["words"]
    for kind in ("person", "place", "medium", "said", "when"):
        while f"{{{kind}}}" in text:
            text = text.replace(f"{{{kind}}}", rng.choice(table[kind]), 1)
    while "{noise}" in text:
        text = text.replace("{noise}", words.noise(rng), 1)
    return text


def sprinkle(rng: random.Random, text: str, replace: bool) -> str:
    """Puts an unknown word somewhere, or in place of another: the question stays what it was."""
    parts = text.split(" ")
    at = rng.randrange(len(parts) + 1)
    if replace and len(parts) > 3:
        at = min(at, len(parts) - 1)
        if "\0" not in parts[at] and "\1" not in parts[at]:
            parts[at] = words.noise(rng)
            return " ".join(parts)
    parts.insert(at, words.noise(rng))
    return " ".join(parts)


def unknown_word(rng: random.Random) -> str:
    """Any word, or one that holds a cue by accident, as "glossary" holds "loss": a cue must be a whole word."""
    if rng.random() < 0.7:
        return words.noise(rng)
    cue = rng.choice(load_patterns()["salad"][rng.choice(("why", "how", "cost"))]).split()[-1]
    word = rng.choice(words.ONSETS) + rng.choice((cue, rng.choice(words.VOWELS) + cue)) + rng.choice(words.ENDINGS[4:])
    return word.replace("-", "")


def salad(rng: random.Random, facet: str) -> str:
    """Loose words around a name, with a cue or two: only the cue says what is asked, and no cue means what."""
    table = load_patterns()["salad"]
    unknown = rng.choice((0.0, 0.0, 0.2, 0.4, 0.7))
    parts = [
        unknown_word(rng) if rng.random() < unknown else rng.choice(filler_words()) for _ in range(rng.randint(1, 9))
    ]
    marks = ["\0", "\1"] if facet == "compare" else ["\0"]
    places = sorted(rng.randrange(len(parts) + 1) for _ in marks)
    for mark, place in zip(reversed(marks), reversed(places), strict=True):
        parts.insert(place, mark)
    cues = table.get(facet, [])
    for _ in range(rng.choice((1, 1, 2)) if cues and (facet != "compare" or rng.random() < 0.6) else 0):
        parts.insert(rng.randrange(len(parts) + 1), rng.choice(cues))
    text = " ".join(parts)
    for stop in (", ", ". ", "; ", ": ", "? "):
        if rng.random() < 0.12:
            text = text.replace(" ", stop, 1) if rng.random() < 0.5 else stop.join(text.rsplit(" ", 1))
    return text[:1].upper() + text[1:] + rng.choice(("?", "?", ".", ""))


def compose(rng: random.Random) -> str:
    """A request to explain: many verbs, some unknown, to many people. "How would you ... it" asks what it is."""
    table = load_patterns()["frames"]
    verb = (
        rng.choice(table["verbs"])
        if rng.random() < 0.6
        else words.noise(rng)
        if rng.random() < 0.7
        else rng.choice(filler_words())
    )
    text = rng.choice(table["compose"]).replace("{v}", verb).replace("{to}", rng.choice(table["to"]))
    text = text.replace("{w}", words.noise(rng) if rng.random() < 0.5 else rng.choice(filler_words()))
    return text[:1].upper() + text[1:]


@cache
def filler_words() -> list[str]:
    return load_patterns()["salad"]["fillers"].split()


def ask(rng: random.Random, facet: str, name: str, article: str, other: str = "") -> str:
    """A question about anything, in one of a great many shapes. The names are put in last, unharmed."""
    patterns = load_patterns()
    if facet in ("what", "why", "how", "cost", "compare") and rng.random() < 0.33:
        return words.careless(rng, salad(rng, facet).replace("\0", name).replace("\1", other))
    if facet in patterns["asks"] and rng.random() < 0.3:
        text = f"{rng.choice(patterns['mentions']['frames'])} {rng.choice(patterns['asks'][facet])}"
    elif facet == "what" and rng.random() < 0.25:
        text = compose(rng)
    else:
        text = rng.choice(patterns["frames"][facet])
    text = text.replace("{a}", f"{article} {{n}}".strip() if rng.random() < 0.8 else "{n}")
    text = text.replace("{n}", "\0").replace("{m}", "\1")
    if rng.random() < 0.15:
        opener = rng.choice(patterns["words"]["openers"])
        text = f"{opener} {text[0].lower() + text[1:] if opener[-1] in ',:' else text}"
    if rng.random() < 0.18:
        tail = rng.choice(patterns["words"]["tails"])
        text = f"{text} {tail}" if tail[0].isupper() else f"{text.rstrip('.?!')} {tail}{rng.choice(('', '?', '.'))}"
    text = fill_lists(rng, text)
    if rng.random() < 0.15:
        for _ in range(rng.choice((1, 1, 2, 3))):
            text = sprinkle(rng, text, facet == "what" and rng.random() < 0.5)
    return words.careless(rng, text.replace("\0", name).replace("\1", other))


@cache
def forbidden() -> tuple[set[str], Any]:
    return forbidden_questions(), forbidden_patterns()


def allowed(text: str) -> bool:
    """False for a message that happens to be, or to name, what the evaluation asks."""
    exact, pattern = forbidden()
    plain = normalised(text)
    return plain not in exact and not pattern.fullmatch(plain) and not banned_words() & set(plain.split())


def loosely(rng: random.Random, entry: Entry) -> str:
    """One of an entry's wordings, with an opener or a tail now and then."""
    table = load_patterns()["words"]
    text = rng.choice(entry.ask)
    if rng.random() < 0.15 and len(text) > 12:
        text = fill_lists(rng, f"{rng.choice(table['openers'])} {text}")
    if rng.random() < 0.15 and len(text) > 12:
        text = fill_lists(rng, f"{text} {rng.choice(table['tails'])}")
    if rng.random() < 0.06 and len(text) > 12:
        text = sprinkle(rng, text, False)
    return words.careless(rng, text)


def off_topic_question(rng: random.Random) -> str:
    lists = words.word_lists()
    name, other = words.thing(rng), words.thing(rng)
    kind = rng.random()
    if kind < 0.42:
        facet = rng.choices(("what", "brief", "detail", "why", "how", "cost", "compare"), (40, 4, 4, 14, 14, 14, 10))[0]
        return ask(rng, facet, name, words.guess_article(name), other)
    if kind < 0.45:
        return words.careless(rng, passages.sentence(rng, rng.randint(2, 10)))
    text = rng.choice(off_topic_frames())
    gaps = {
        "{a2}": words.with_article(other, words.guess_article(other)),
        "{a}": words.with_article(name, words.guess_article(name)),
        "{n}": name,
        "{m}": other,
        "{city2}": words.proper(rng, "city"),
        "{city}": words.proper(rng, "city"),
        "{lang}": rng.choice(lists["lang"]),
        "{name}": words.proper(rng, "name"),
        "{adj}": words.adjective(rng),
        "{verb}": words.verb(rng),
        "{num2}": str(rng.randrange(2, 200)),
        "{num}": str(rng.randrange(2, 2100)),
    }
    for gap, filler in gaps.items():
        text = text.replace(gap, filler)
    table = load_patterns()["words"]
    if rng.random() < 0.12:
        text = fill_lists(rng, f"{rng.choice(table['openers'])} {text}")
    if rng.random() < 0.1:
        text = fill_lists(rng, f"{text} {rng.choice(table['tails'])}")
    return words.careless(rng, text)
