"""Words the model must not rely on: off-topic things, made-up words, fillers, typing errors.

A tiny model knows only what it has seen. It learns to decline unknown things by seeing very many of them,
half of them made up, and to ignore unknown words by finding them around things it knows.
"""

from __future__ import annotations

import random
import re
from functools import cache

from dialogues.held_out import banned_words
from dialogues.knowledge import HERE, load_knowledge, read_toml

PIECES = read_toml(HERE / "word_pieces.toml")
ONSETS, VOWELS, CODAS, ENDINGS = (PIECES[kind] for kind in ("onsets", "vowels", "codas", "endings"))


@cache
def word_lists() -> dict[str, list[str]]:
    """The lists of `off_topic_words.txt` by kind, without what the evaluation holds back or a concept is called."""
    taken = set(banned_words())
    for concept in load_knowledge().concepts:
        taken.update(name.lower() for name in (concept.name, *concept.aliases))
    lists: dict[str, list[str]] = {}
    for line in (HERE / "off_topic_words.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            kind, words = line.split(":", 1)
            kept = [word.replace("-", " ") for word in words.split() if word.lower() not in taken]
            lists.setdefault(kind, []).extend(kept)
    return lists


def made_up(rng: random.Random) -> str:
    """A word that does not exist but could."""
    while True:
        syllables = rng.choice((1, 2, 2, 2, 3))
        word = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(syllables))
        word += rng.choice(ENDINGS)
        if 3 <= len(word) <= 14 and word not in banned_words() and word not in concept_words():
            return word


@cache
def concept_words() -> frozenset[str]:
    names = " ".join(" ".join((concept.name, *concept.aliases)) for concept in load_knowledge().concepts)
    return frozenset(re.findall(r"[a-z]+", names.lower()))


def mixed(rng: random.Random) -> str:
    """The first half of one word and the second of another: unknown, but spelled from usual pieces."""
    while True:
        first, second = (rng.choice(word_lists()["thing"]).split()[0] for _ in range(2))
        word = first[: rng.randint(2, 5)] + second[-rng.randint(2, 6) :] + rng.choice(("", "", "s"))
        if word not in banned_words() and word not in concept_words():
            return word


def thing(rng: random.Random) -> str:
    """Something to ask about that has nothing to do with inference engines."""
    lists = word_lists()
    kind = rng.random()
    if kind < 0.36:
        return rng.choice(lists["thing"])
    if kind < 0.53:
        return made_up(rng)
    if kind < 0.62:
        return mixed(rng)
    if kind < 0.72:
        return f"{rng.choice(lists['adj'])} {rng.choice(lists['thing'])}"
    if kind < 0.80:
        return f"{rng.choice(lists['thing'])} {rng.choice(lists['thing'])}"
    if kind < 0.86:
        return f"{made_up(rng)} {made_up(rng)}"
    if kind < 0.90:
        return f"{made_up(rng)} {rng.choice(lists['thing'])}"
    if kind < 0.92:
        return f"{rng.choice(lists['verb'])}ing"
    if kind < 0.94:
        return made_up(rng).upper()[: rng.randint(2, 5)] if rng.random() < 0.5 else made_up(rng).capitalize()
    if kind < 0.97:
        return proper(rng, "city")
    return proper(rng, "name")


def proper(rng: random.Random, kind: str) -> str:
    """A known or made-up name of a person, a place or a language."""
    return rng.choice(word_lists()[kind]) if rng.random() < 0.6 else made_up(rng).capitalize()


def verb(rng: random.Random) -> str:
    return rng.choice(word_lists()["verb"]) if rng.random() < 0.75 else made_up(rng)


def adjective(rng: random.Random) -> str:
    return rng.choice(word_lists()["adj"]) if rng.random() < 0.75 else made_up(rng)


def noise(rng: random.Random) -> str:
    """Any word at all."""
    kind = rng.random()
    if kind < 0.4:
        return made_up(rng)
    return rng.choice(word_lists()[rng.choice(("thing", "thing", "adj", "verb"))])


def with_article(word: str, article: str) -> str:
    return f"{article} {word}".strip()


def guess_article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" else "a"


def article_of_alias(alias: str, article: str) -> str:
    """The article of another name for a thing: none if the thing has none or the name is a plural; "an LLM"."""
    if not article or (alias.endswith("s") and not alias.endswith("ss")):
        return ""
    is_spelt = re.match(r"[A-Z]{2}", alias) is not None  # by letters: el-el-em
    return "an" if alias[0] in ("AEFHILMNORSX" if is_spelt else "AEIOUaeiou8") else "a"


def misspell(rng: random.Random, text: str, errors: int) -> str:
    """Typing errors in words of four letters or more: short ones (TTFT, fp8, top-k) would lose their meaning."""
    spots = [match.span() for match in re.finditer(r"[A-Za-z]{4,}", text) if not match.group().isupper()]
    for _ in range(errors):
        if not spots:
            break
        begin, end = spots.pop(rng.randrange(len(spots)))
        at = rng.randrange(begin, end - 1)
        kind = rng.random()
        if kind < 0.4:
            swap = text[at + 1] + text[at]
        elif kind < 0.65:
            swap = text[at + 1]
        elif kind < 0.85:
            swap = text[at] + text[at] + text[at + 1]
        else:
            swap = rng.choice("abcdefghijklmnopqrstuvwxyz") + text[at + 1]
        text = text[:at] + swap + text[at + 2 :]
        shift = len(swap) - 2
        spots = [(low + shift, high + shift) if low > at else (low, high) for low, high in spots]
    return text


def careless(rng: random.Random, text: str) -> str:
    """A message as people type it: lower case, no full stop, a wrong letter."""
    kind = rng.random()
    if kind < 0.18:
        text = text.lower()
    elif kind < 0.20:
        text = text.upper()
    elif kind < 0.26:
        text = text[:1].lower() + text[1:]
    if rng.random() < 0.2:
        text = text.rstrip(".?!")
    elif rng.random() < 0.04:
        text = text + rng.choice((" ", "??", "!", " ?", "...", "?!"))
    if rng.random() < 0.16:
        text = misspell(rng, text, rng.choice((1, 1, 1, 2)))
    return text
