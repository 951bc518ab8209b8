"""Texts to copy: sentences without sense, code, records, single words, in random order.

A token that was never copied in training cannot be copied later, so the texts draw on every word that the
vocabulary was made from, whole and in pieces. Being random, they leave nothing to learn but copying.
"""

from __future__ import annotations

import random
import re
from functools import cache

from dialogues import words
from dialogues.held_out import banned_words
from dialogues.knowledge import HERE, load_knowledge

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July"]
MONTHS += ["August", "September", "October", "November", "December"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
GLUE, SIGNS, FIELDS, VERBS = (words.PIECES[kind] for kind in ("glue", "signs", "fields", "verbs"))


@cache
def written_words() -> list[str]:
    """Every word of this folder's texts once, as written: the vocabulary is made from them.

    Copying works only for tokens that were copied in training, so passages must draw on all of them,
    and far from the sentences they belong to.
    """
    found: dict[str, None] = {}
    for path in [*sorted((HERE / "knowledge").glob("*.toml")), HERE / "patterns.toml", HERE / "off_topic_words.txt"]:
        found.update(dict.fromkeys(re.findall(r"[A-Za-z]+", path.read_text())))
    found.update(dict.fromkeys([*DAYS, *MONTHS, *FIELDS, *VERBS, *GLUE]))
    return [word for word in found if word.lower() not in banned_words()]


def fragment(rng: random.Random) -> str:
    """A piece of a word, or pieces of two."""
    word = rng.choice(written_words())
    if rng.random() < 0.4:
        word += rng.choice(written_words())
    begin = rng.randrange(max(1, len(word) - 1))
    return word[begin : begin + rng.randint(1, 9)]


def any_word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.45:
        word = rng.choice(written_words())
    elif kind < 0.60:
        word = rng.choice(GLUE)
    elif kind < 0.75:
        word = fragment(rng)
    else:
        word = words.noise(rng)
    kind = rng.random()
    return word.capitalize() if kind < 0.15 else word.upper() if kind < 0.17 else word


def punctuated(rng: random.Random) -> str:
    """Words and numbers joined by any signs, as in code, addresses and records."""
    makers = (any_word, any_word, words.made_up, number, fragment)
    text = rng.choice(makers)(rng)
    for _ in range(rng.randint(1, 12)):
        sign = rng.choice(SIGNS)
        text += (f" {sign} " if rng.random() < 0.3 else f"{sign} " if rng.random() < 0.2 else sign) + rng.choice(
            makers
        )(rng)
    return re.sub(" +", " ", text)


def number(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.7:
        return str(rng.randrange(10 ** rng.randint(1, 5)))
    if kind < 0.85:
        return f"{rng.randrange(1000)}.{rng.randrange(1000)}"
    return f"{rng.randrange(1, 1000):,}".replace(",", rng.choice((",", "")))


def identifier(rng: random.Random) -> str:
    parts = [
        rng.choice((words.made_up, any_word, any_word))(rng).replace(" ", "_") for _ in range(rng.choice((1, 2, 2, 3)))
    ]
    kind = rng.random()
    if kind < 0.5:
        name = "_".join(parts)
    elif kind < 0.75:
        name = "".join(part.capitalize() for part in parts)
    else:
        name = "-".join(parts)
    return name + (str(rng.randrange(100)) if rng.random() < 0.3 else "")


def scrambled(rng: random.Random) -> str:
    """A short string of any characters."""
    return "".join(rng.choice(LETTERS + LETTERS.upper() + "0123456789-_") for _ in range(rng.randint(2, 8)))


def sentence(rng: random.Random, length: int) -> str:
    """Words in no sensible order, with capitals, commas and a full stop."""
    items = [any_word(rng) for _ in range(length)]
    for at in range(1, length - 1):
        if rng.random() < 0.08:
            items[at] += rng.choice((",", ",", ";", ":", " -"))
        elif rng.random() < 0.06:
            items[at] = number(rng)
        elif rng.random() < 0.02:
            items[at] += rng.choice(("'s", "'t", "n't"))
    text = " ".join(items)
    return text[:1].upper() + text[1:] + rng.choice("....!?")


def code_line(rng: random.Random) -> str:
    name, other, value = identifier(rng), identifier(rng), number(rng)
    shapes = (
        f"{name} = {other} + {value}",
        f"def {name}({other}): return {value}",
        f"{name}({other}, {value})[{rng.randrange(9)}]",
        f"if {name} > {value}: {other}()",
        f"{name}: {value}, {other}: {words.noise(rng)}",
        f"SELECT {name} FROM {other} WHERE {words.made_up(rng)} < {value};",
        f"https://{words.made_up(rng)}.{words.made_up(rng)}/{name}?{other}={value}",
        f"class {name}({other}): {words.made_up(rng)} = {value}",
        f"for {name} in {other}[:{value}]: print({name})",
        f"/{words.made_up(rng)}/{name}/{other}.{rng.choice(('py', 'txt', 'toml', 'md'))}",
        f'{{"{name}": {value}, "{other}": "{words.noise(rng)}"}}',
        f'<{name} {other}="{value}">',
        f"{name} --{other} {value} | {words.made_up(rng)}",
    )
    return rng.choice(shapes)


def passage(rng: random.Random) -> str:
    """Text to copy: sentences, loose words, numbers, identifiers, code, repeated words."""
    kind = rng.random()
    if kind < 0.30:
        return " ".join(sentence(rng, rng.randint(3, 14)) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))))
    if kind < 0.45:
        return " ".join(any_word(rng) for _ in range(rng.randint(1, 24)))
    if kind < 0.60:
        makers = (any_word, any_word, words.made_up, number, identifier, scrambled)
        return " ".join(rng.choice(makers)(rng) for _ in range(rng.randint(1, 16)))
    if kind < 0.66:
        return punctuated(rng)
    if kind < 0.74:
        return rng.choice(("; ", "\n", " ")).join(code_line(rng) for _ in range(rng.choice((1, 1, 2, 3))))
    if kind < 0.80:
        few = [rng.choice((any_word, words.made_up, number))(rng) for _ in range(rng.randint(2, 4))]
        return rng.choice((" ", ", ")).join(rng.choice(few) for _ in range(rng.randint(4, 14)))
    if kind < 0.86:
        return ", ".join(number(rng) for _ in range(rng.randint(2, 12))) + rng.choice(("", "."))
    if kind < 0.93:
        concept = rng.choice(load_knowledge().concepts)
        text = rng.choice(rng.choice(list(concept.answers.values())))
        if rng.random() < 0.7:  # out of order, so that it is read and not remembered
            parts = text.split()
            rng.shuffle(parts)
            text = " ".join(parts[: rng.randint(4, 40)])
        return text
    text = sentence(rng, rng.randint(6, 16))
    return rng.choice(
        (f'"{text}"', text.upper(), text.replace(" ", "-", 3), text.replace(" ", "\n", 2), f"{number(rng)}. {text}")
    )
