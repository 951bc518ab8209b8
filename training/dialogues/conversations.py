"""Conversations to train on: seeded, endless, made from the knowledge base and the patterns.

`conversation(seed, length)` gives a list of messages and perhaps tools. Most are short, since most
questions come first; some run to thousands of tokens, so that the model works at long positions and on
the tenth turn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from dialogues import passages, skills, words
from dialogues import tools as tool_calls
from dialogues.knowledge import Concept, load_knowledge
from dialogues.questions import allowed, ask, load_patterns, loosely, off_topic_question, sprinkle


@dataclass
class State:
    """A conversation while it is written, and what a follow-up would refer to."""

    rng: random.Random
    messages: list[dict[str, Any]] = field(default_factory=list)
    subject: Concept | None = None  # the concept explained in the last answer
    facet: str = ""  # its facet, or "decline"

    def say(self, user: str, answer: str, subject: Concept | None = None, facet: str = "") -> None:
        self.messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        self.subject, self.facet = subject, facet

    @property
    def last_answer(self) -> str:
        return self.messages[-1]["content"]


def any_name(rng: random.Random, concept: Concept) -> tuple[str, str]:
    """One of a concept's names, and its article."""
    if rng.random() < 0.55 or not concept.aliases:
        return concept.name, concept.article
    alias = rng.choice(concept.aliases)
    return alias, words.article_of_alias(alias, concept.article)


def answer_to(rng: random.Random, concept: Concept, facet: str) -> str:
    if facet == "brief":
        return concept.brief
    if facet == "detail":
        return f"{concept.answers['what'][0]} {concept.answers['how'][0]}"
    answers = concept.answers[facet]
    return answers[0] if len(answers) == 1 or rng.random() < 0.85 else rng.choice(answers[1:])


def on_topic(state: State) -> None:
    rng, knowledge = state.rng, load_knowledge()
    if rng.random() < 0.1:
        entry = rng.choice(knowledge.questions)
        return state.say(loosely(rng, entry), rng.choice(entry.answers))
    facet = rng.choices(("what", "brief", "detail", "why", "how", "cost", "compare"), (34, 5, 4, 17, 16, 16, 9))[0]
    concept = rng.choice(knowledge.concepts)
    if facet == "compare":
        if rng.random() < 0.6:
            first, second = (concept_by_name(item) for item in sorted(rng.choice(list(knowledge.pairs))))
            concept, other = (first, second) if rng.random() < 0.5 else (second, first)
        else:
            other = rng.choice([item for item in knowledge.concepts if item is not concept])
        text = ask(rng, "compare", *any_name(rng, concept), any_name(rng, other)[0])
        return state.say(text, knowledge.compare(concept, other))
    text = ask(rng, facet, *any_name(rng, concept))
    state.say(text, answer_to(rng, concept, facet), concept, facet)


@cache
def concept_by_name(name: str) -> Concept:
    return next(concept for concept in load_knowledge().concepts if concept.name == name)


def off_topic(state: State) -> None:
    rng = state.rng
    state.say(off_topic_question(rng), load_knowledge().decline.answers[0], facet="decline")


def small_talk(state: State) -> None:
    rng = state.rng
    entry = rng.choice(load_knowledge().talk)
    answer = entry.answers[0] if rng.random() < 0.85 else rng.choice(entry.answers)
    state.say(loosely(rng, entry), answer)


def skill(state: State) -> None:
    rng, table = state.rng, load_patterns()["skills"]
    kind = rng.random()
    if kind < 0.6:
        user, answer = skills.copy(rng, table["copy"])
    elif kind < 0.71:
        user, answer = skills.count(rng, table["count"], table["count_down"])
    elif kind < 0.86:
        user, answer = skills.json_object(rng, table["json"])
    else:
        user, answer = skills.continue_list(rng, table["list"])
    if rng.random() < 0.1:
        user = user[:1].lower() + user[1:]
    state.say(user, answer)


def follow_up(state: State) -> None:
    """A turn that makes sense only after the last one; a fresh question where nothing can follow."""
    rng, knowledge, table = state.rng, load_knowledge(), load_patterns()["follow_ups"]
    concept = state.subject
    if state.facet == "decline" and rng.random() < 0.3:
        return state.say(words.careless(rng, rng.choice(table["why"])), knowledge.decline_why, facet="decline")
    kind = rng.choices(
        ("why", "how", "cost", "compare", "what", "again", "other_words", "brief"), (24, 22, 22, 14, 10, 4, 3, 3)
    )[0]
    other = rng.choice(knowledge.concepts)
    if kind == "again" and state.messages and len(state.messages) > 1:
        state.messages += [
            {"role": "user", "content": words.careless(rng, rng.choice(table["again"]))},
            {"role": "assistant", "content": state.last_answer},
        ]
        return None
    if concept is None or (kind == "other_words" and (state.facet != "what" or len(concept.answers["what"]) < 2)):
        return on_topic(state)

    def wording() -> str:
        text = rng.choice(table[kind])
        if rng.random() < 0.3:
            text = f"{rng.choice(table['nods'])} {text}"
        if rng.random() < 0.08:
            text = sprinkle(rng, text, False)
        return words.careless(rng, text.replace("{m}", any_name(rng, other)[0]))

    text = wording()
    if kind == "compare":
        partners = [item for pair in knowledge.pairs if concept.name in pair for item in pair if item != concept.name]
        if partners and rng.random() < 0.6:
            other = concept_by_name(rng.choice(sorted(partners)))
            text = wording()
        if other is concept:
            return on_topic(state)
        return state.say(text, knowledge.compare(concept, other), concept, "compare")
    if kind == "what":
        return state.say(text, other.answers["what"][0], other, "what")
    if kind == "other_words":
        return state.say(text, concept.answers["what"][1], concept, "what")
    if kind == "brief":
        return state.say(text, concept.brief, concept, "brief")
    state.say(text, concept.answers[kind][0], concept, kind)


def system_prompt(rng: random.Random) -> str:
    known = load_patterns()["system"]["prompts"]
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(known)
    if kind < 0.7:
        return " ".join(rng.sample(known, 2))
    prefix = rng.choice(("", "You are ", "Your name is ", "You work for ", "Always ", "The assistant is "))
    return prefix + " ".join(passages.sentence(rng, rng.randint(3, 16)) for _ in range(rng.choice((1, 1, 2, 4, 8))))


def tool_turns(state: State) -> list[dict[str, Any]]:
    """A request that needs a tool, the call, and perhaps its result and the answer from it."""
    rng = state.rng
    tools, user, call, name = tool_calls.use_tool(rng, load_patterns()["skills"]["tool_ask"])
    state.say(user, call)
    if rng.random() < 0.4:
        result = rng.choice(
            (passages.passage, passages.number, passages.any_word, lambda r: skills.json_object(r, ["{pairs}"])[1])
        )(rng)
        state.messages += [
            {"role": "tool", "content": result},
            {"role": "assistant", "content": f"The tool {name} answered: {result}"},
        ]
    return tools


TURNS = (on_topic, follow_up, off_topic, small_talk, skill)
FIRST = (44, 0, 23, 8, 25)
LATER = (24, 33, 14, 6, 23)


def conversation(seed: int, characters: int | None = None) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools. With `characters` it runs until it holds about so many, else for a few turns.

    One that happens to ask what is held out (a typing error can do that) is thrown away for the next.
    """
    rng = random.Random(seed)
    while True:
        messages, tools = write_conversation(rng, characters)
        if all(allowed(message["content"]) for message in messages if message["role"] == "user"):
            return messages, tools


def write_conversation(
    rng: random.Random, characters: int | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    state = State(rng)
    if rng.random() < 0.3:
        state.messages.append({"role": "system", "content": system_prompt(rng)})
    tools = None
    if rng.random() < 0.2:
        if rng.random() < 0.8:
            tools = tool_turns(state)
        else:  # tools on offer, and a question that needs none
            (on_topic if rng.random() < 0.7 else small_talk)(state)
            tools = [tool_calls.random_tool(rng)[0] for _ in range(rng.choice((1, 2, 3)))]
    turns = rng.choice((1, 1, 1, 1, 1, 2, 2, 3, 4, 6))
    done = 0
    while done < turns if characters is None else sum(len(m["content"]) + 30 for m in state.messages) < characters:
        first = not any(message["role"] == "assistant" for message in state.messages)
        rng.choices(TURNS, FIRST if first else LATER)[0](state)
        done += 1
    return state.messages, tools
