"""The knowledge base: what the model is taught to say, read from `knowledge/*.toml`.

A concept has four facets (what, why, how, cost), each with an answer and the key terms an answer must
contain. Everything the model says about inference engines is written there by hand; the rest of this
folder only varies how it is asked.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FACETS = ("what", "why", "how", "cost")


@dataclass(frozen=True)
class Concept:
    name: str
    article: str  # "a", "an", "the" or "" for what takes none
    aliases: tuple[str, ...]
    answers: dict[str, list[str]]  # facet -> answers, the usual one first
    keys: dict[str, list[str]]  # facet -> key terms, "a|b" meaning either

    @property
    def brief(self) -> str:
        """The answer in one sentence: the first one of the usual definition."""
        return first_sentence(self.answers["what"][0])


@dataclass(frozen=True)
class Entry:
    """A question of its own, or a kind of small talk."""

    id: str
    ask: tuple[str, ...]
    answers: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Knowledge:
    concepts: tuple[Concept, ...]
    pairs: dict[frozenset[str], Entry]  # two concept names -> the answer that compares them
    questions: tuple[Entry, ...]
    talk: tuple[Entry, ...]
    decline: Entry
    decline_why: str

    def compare(self, first: Concept, second: Concept) -> str:
        """The written comparison, or both definitions where none is written."""
        pair = self.pairs.get(frozenset((first.name, second.name)))
        return pair.answers[0] if pair else f"They are different things. {first.brief} {second.brief}"


def first_sentence(text: str) -> str:
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


def has_keys(text: str, keys: list[str] | tuple[str, ...]) -> bool:
    """Return whether every key term occurs; "a|b" is satisfied by either."""
    lower = text.lower()
    return all(any(option in lower for option in key.split("|")) for key in keys)


def read_toml(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return tomllib.load(file)


@cache
def load_knowledge() -> Knowledge:
    folder = HERE / "knowledge"
    concepts = []
    for path in sorted(folder.glob("0*.toml")):
        for item in read_toml(path)["concept"]:
            answers = {facet: item[facet] for facet in FACETS}
            concepts.append(Concept(item["name"], item["article"], tuple(item["aliases"]), answers, item["keys"]))
    pairs = {
        frozenset(item["of"]): Entry(" / ".join(item["of"]), (), (item["answer"],), tuple(item["keys"]))
        for item in read_toml(folder / "comparisons.toml")["pair"]
    }
    questions = tuple(
        Entry(item["id"], tuple(item["ask"]), (item["answer"],), tuple(item["keys"]))
        for item in read_toml(folder / "questions.toml")["question"]
    )
    talk = read_toml(folder / "talk.toml")
    small_talk = tuple(
        Entry(item["id"], tuple(item["ask"]), tuple(item["answers"]), tuple(item["keys"])) for item in talk["talk"]
    )
    decline = Entry("decline", (), tuple(talk["decline"]["answers"]), tuple(talk["decline"]["keys"]))
    knowledge = Knowledge(tuple(concepts), pairs, questions, small_talk, decline, talk["decline"]["why"])
    check(knowledge)
    return knowledge


def check(knowledge: Knowledge) -> None:
    """Raises ValueError where a name is ambiguous, an answer lacks its keys, or the question gives them away."""
    owners: dict[str, str] = {}
    for concept in knowledge.concepts:
        names = (concept.name, *concept.aliases)
        for name in names:
            owner = owners.setdefault(name.lower(), concept.name)
            if owner != concept.name:
                raise ValueError(f"{name!r} names both {owner!r} and {concept.name!r}")
        for facet in FACETS:
            for answer in concept.answers[facet]:
                if not has_keys(answer, concept.keys[facet]):
                    raise ValueError(f"{concept.name}/{facet}: {concept.keys[facet]} not all in {answer!r}")
            if has_keys(" ".join(names), concept.keys[facet]):
                raise ValueError(f"{concept.name}/{facet}: the question itself holds all of {concept.keys[facet]}")
    known = {concept.name for concept in knowledge.concepts}
    for pair, entry in knowledge.pairs.items():
        if not pair <= known or len(pair) != 2:
            raise ValueError(f"comparison of unknown concepts: {entry.id}")
    for entry in (*knowledge.pairs.values(), *knowledge.questions, *knowledge.talk, knowledge.decline):
        for answer in entry.answers:
            if not has_keys(answer, entry.keys):
                raise ValueError(f"{entry.id}: {entry.keys} not all in {answer!r}")
