"""The evaluation's questions: held-out patterns over every concept, and what a right answer must hold."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dialogues import words
from dialogues.conversations import conversation
from dialogues.held_out import load_held_out, load_test_set
from dialogues.knowledge import FACETS, Concept, has_keys, load_knowledge
from dialogues.skills import pairs_text
from dialogues.tools import tool_definition

Check = Callable[[str], bool]


@dataclass(frozen=True)
class Case:
    group: str
    messages: list[dict[str, Any]]
    check: Check
    wanted: str  # what the check looks for, for the report
    tools: list[dict[str, Any]] | None = None
    exact: tuple[str, ...] = field(default=())  # answers written in the knowledge base


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def by_keys(group: str, messages: list[dict[str, Any]], keys: Any, exact: Any = ()) -> Case:
    return Case(group, messages, lambda text: has_keys(text, keys), f"keys {list(keys)}", exact=tuple(exact))


def by_text(group: str, messages: list[dict[str, Any]], answer: str) -> Case:
    return Case(group, messages, lambda text: text.strip() == answer, repr(answer), exact=(answer,))


def question(frame: str, concept: Concept, other: Concept | None = None) -> str:
    text = frame.replace("{a}", words.with_article(concept.name, concept.article)).replace("{n}", concept.name)
    return text.replace("{m}", other.name) if other else text


def concept_cases(frames: dict[str, list[str]]) -> list[Case]:
    """Every concept and facet once, the frames taken in turn; then every written comparison."""
    knowledge = load_knowledge()
    cases = []
    for facet in FACETS:
        for i, concept in enumerate(knowledge.concepts):
            text = question(frames[facet][i % len(frames[facet])], concept)
            assert not has_keys(text, concept.keys[facet]), f"the question gives its key terms away: {text}"
            cases.append(by_keys(f"answered: {facet}", [user(text)], concept.keys[facet], concept.answers[facet]))
    named = {concept.name: concept for concept in knowledge.concepts}
    for i, (pair, entry) in enumerate(knowledge.pairs.items()):
        first, second = (named[name] for name in sorted(pair))
        text = question(frames["compare"][i % len(frames["compare"])], first, second)
        cases.append(by_keys("answered: compare", [user(text)], entry.keys, entry.answers))
    return cases


def question_cases(held: dict[str, list[str]]) -> list[Case]:
    """The knowledge base's questions of their own, in other words."""
    return [
        by_keys("answered: questions", [user(text)], entry.keys, entry.answers)
        for entry in load_knowledge().questions
        for text in held.get(entry.id, ())
    ]


def decline_cases(asks: list[list[str]]) -> list[Case]:
    decline = load_knowledge().decline
    return [by_keys("declined: off topic", [user(text)], decline.keys, decline.answers) for text, *_ in asks]


def conversation_before(seed: int, characters: int) -> list[dict[str, Any]]:
    """Earlier turns, without tools and ending with an answer."""
    while True:
        messages, tools = conversation(9 * 10**15 + seed, characters)
        if tools is None and messages[-1]["role"] == "assistant":
            return messages
        seed += 1_000


def robust_cases() -> list[Case]:
    """The same kind of questions, typed carelessly, under a system prompt, late in a conversation."""
    held, concepts = load_held_out()["frames"], load_knowledge().concepts
    rng = random.Random(7)
    changes: dict[str, Callable[[str, int], list[dict[str, Any]]]] = {
        "lower case": lambda text, i: [user(text.lower())],
        "no punctuation": lambda text, i: [user(text.rstrip(".?!"))],
        "typing error": lambda text, i: [user(words.misspell(rng, text, 1))],
        "please": lambda text, i: [user(f"{text.rstrip('.?!')}, please")],
        "system prompt": lambda text, i: [
            {
                "role": "system",
                "content": ("You are a helpful assistant.", "Be kind to sailors and never mention boats.")[i % 2],
            },
            user(text),
        ],
        "late turn": lambda text, i: [*conversation_before(i, 3_500), user(text)],
        "position > 2000": lambda text, i: [*conversation_before(i, 11_000), user(text)],
        "position > 3000": lambda text, i: [*conversation_before(i, 14_000), user(text)],
    }
    cases = []
    for name, change in changes.items():
        for i, concept in enumerate(rng.sample(concepts, 40)):
            facet = FACETS[i % 4]
            text = question(held[facet][(i * 7 + 3) % len(held[facet])], concept)
            cases.append(by_keys(f"robust: {name}", change(text, i), concept.keys[facet], concept.answers[facet]))
    declined = load_knowledge().decline
    for i, (text, *_) in enumerate(load_held_out()["off_topic"]["ask"][:40]):
        messages = [*conversation_before(i + 100, 3_500), user(text)]
        cases.append(by_keys("robust: off topic, late turn", messages, declined.keys, declined.answers))
    return cases


def follow_up_cases() -> list[Case]:
    """Two or three turns: an explanation with the model's own words, then a question that refers to it."""
    held, knowledge = load_held_out(), load_knowledge()
    rng = random.Random(11)
    named = {concept.name: concept for concept in knowledge.concepts}
    cases = []
    for facet, asks in held["follow_ups"].items():
        for i, concept in enumerate(rng.sample(knowledge.concepts, 20)):
            other = rng.choice([item for item in knowledge.concepts if item is not concept])
            if facet == "compare":
                concept, other = (named[name] for name in sorted(list(knowledge.pairs)[i * 2]))
            before = [
                user(question(held["frames"]["what"][i], concept)),
                {"role": "assistant", "content": concept.answers["what"][0]},
            ]
            if i % 2:
                before += [user("How does it work?"), {"role": "assistant", "content": concept.answers["how"][0]}]
            messages = [*before, user(asks[i % len(asks)].replace("{m}", other.name))]
            group = f"follow-up: {facet}"
            if facet == "compare":
                entry = knowledge.pairs[frozenset((concept.name, other.name))]
                cases.append(by_keys(group, messages, entry.keys, entry.answers))
            else:
                asked = other if facet == "what" else concept
                cases.append(by_keys(group, messages, asked.keys[facet], asked.answers[facet]))
    return cases


def skill_cases() -> list[Case]:
    held = load_held_out()
    cases = []
    for i, text in enumerate(held["copy"]["texts"]):
        for frame in held["copy"]["frames"][i % 2 :: 2]:
            cases.append(by_text("skill: copy", [user(frame.replace("{t}", text))], text))
    for i, (low, high) in enumerate(held["count"]["ranges"]):
        frame = held["count"]["frames"][i % len(held["count"]["frames"])]
        answer = ", ".join(str(value) for value in range(low, high + 1))
        cases.append(by_text("skill: count", [user(frame.format(a=low, b=high))], answer))
    for i, pairs in enumerate(held["json"]["objects"]):
        for frame in held["json"]["frames"][i % 2 :: 2]:
            text = frame.replace("{pairs}", pairs_text(pairs))
            cases.append(
                Case("skill: json", [user(text)], lambda out, pairs=pairs: same_json(out, pairs), json.dumps(pairs))
            )
    for i, (shown, rest) in enumerate(held["list"]["items"]):
        for frame in held["list"]["frames"][i % 2 :: 2]:
            cases.append(by_text("skill: list", [user(frame.replace("{t}", shown))], rest))
    tools = [(tool_definition(t["name"], t["description"], t["parameters"]), t) for t in held["tool"]]
    for i, (definition, tool) in enumerate(tools):
        wanted = {"name": tool["name"], "arguments": tool["arguments"]}
        for offered in ([definition], [tools[i - 1][0], definition], [definition, tools[i - 2][0], tools[i - 3][0]]):
            check: Check = lambda out, wanted=wanted: same_call(out, wanted)  # noqa: E731
            cases.append(Case("skill: tool call", [user(tool["ask"])], check, json.dumps(wanted), tools=offered))
    named = {entry.id: entry for entry in load_knowledge().talk}
    for kind, asks in held["talk"].items():
        cases += [by_keys("skill: small talk", [user(text)], named[kind].keys, named[kind].answers) for text in asks]
    return cases


def same_json(text: str, wanted: Any) -> bool:
    try:
        return bool(json.loads(text) == wanted)
    except ValueError:
        return False


def same_call(text: str, wanted: Any) -> bool:
    """One call in the Hermes form, and nothing beside it."""
    text = text.strip()
    if not (text.startswith("<tool_call>\n") and text.endswith("\n</tool_call>")):
        return False
    return same_json(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), wanted)


def held_out_cases() -> list[Case]:
    held = load_held_out()
    answered = [*concept_cases(held["frames"]), *question_cases(held["questions"])]
    return [*answered, *decline_cases(held["off_topic"]["ask"]), *follow_up_cases(), *skill_cases(), *robust_cases()]


def test_cases() -> list[Case]:
    test = load_test_set()
    return [*concept_cases(test["frames"]), *decline_cases(test["off_topic"]["ask"])]
