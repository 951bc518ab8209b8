"""Tool calls: made-up tools, requests for them, and the call in the Hermes form."""

from __future__ import annotations

import random
from typing import Any

from dialogues import words
from dialogues.chat_format import tool_call
from dialogues.passages import VERBS, any_word
from dialogues.skills import field_name, spoken, value


def tool_definition(name: str, description: str, parameters: dict[str, str]) -> dict[str, Any]:
    """A tool as an OpenAI client sends it."""
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in parameters.items()}}
    function = {"name": name, "description": description, "parameters": {**schema, "required": list(parameters)}}
    return {"type": "function", "function": function}


PHRASES = {"lookup": "look up", "get": "give me", "fetch": "bring", "compute": "work out", "search": "search for"}
TYPES = {"string": 0.6, "integer": 0.35, "boolean": 0.05}


def random_tool(rng: random.Random) -> tuple[dict[str, Any], str, str, dict[str, str]]:
    """A definition, its verb, its thing and its parameters."""
    verb = rng.choice(VERBS) if rng.random() < 0.6 else words.verb(rng)
    what = rng.choice((words.noise, words.thing, words.made_up, any_word, any_word))(rng).lower()
    if rng.random() < 0.2:
        what = f"{what} {words.noise(rng)}"
    name = f"{verb}_{what}".replace(" ", "_")
    parameters = {}
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        parameters[field_name(rng)] = rng.choices(list(TYPES), TYPES.values())[0]
    shapes = ("{v} {a} {w}.", "{v} the {w}.", "{v} {w}.", "{v} the {w} of {x}.", "{v} the {w} for {x}.")
    other = words.with_article(words.noise(rng), "a")
    description = rng.choice(shapes).format(
        v=PHRASES.get(verb, verb).capitalize() if verb == "lookup" else verb.capitalize(),
        a=words.guess_article(what),
        w=what,
        x=other,
    )
    return tool_definition(name, description, parameters), verb, what, parameters


def argument(rng: random.Random, kind: str) -> Any:
    if kind == "integer":
        return rng.randrange(10 ** rng.randint(1, 4))
    if kind == "boolean":
        return rng.random() < 0.5
    while True:
        item = value(rng)
        if isinstance(item, str):
            return item


def use_tool(rng: random.Random, frames: list[str]) -> tuple[list[dict[str, Any]], str, str, str]:
    """The tools on offer, the request, the call, and the name of the tool called."""
    made = [random_tool(rng) for _ in range(rng.choice((1, 2, 2, 3, 3, 4)))]
    definition, verb, what, parameters = rng.choice(made)
    arguments = {name: argument(rng, kind) for name, kind in parameters.items()}
    name = definition["function"]["name"]
    said = {key: spoken(item).strip('"') for key, item in arguments.items()}
    article = rng.choice(("the ", "the ", "a ", ""))
    only = next(iter(said.values()))
    # The request need not use the tool's own verb: its thing is what tells tools apart.
    spoken_verb = PHRASES.get(verb, verb) if rng.random() < 0.85 else rng.choice(VERBS)
    if len(said) == 1 and rng.random() < 0.5:
        link = rng.choice(("of", "for", "in", "at", "from", "at the", "of the"))
        if rng.random() < 0.45:
            ask = rng.choice(
                (
                    "What is the {w} {l} {x}?",
                    "What is the {w} {l} {x}?",
                    "Which {w} is there {l} {x}?",
                    "{w} {l} {x}?",
                    "What {w} is {l} {x}?",
                )
            )
            return [item[0] for item in made], ask.format(w=what, l=link, x=only), tool_call(name, arguments), name
        field = next(iter(said)) + " " if rng.random() < 0.4 else ""
        do = f"{spoken_verb} {article}{what} {link} {field}{only}"
    else:
        joint = rng.choice((" {} {}", " {} {}", " {} = {}", " {}={}", " the {} {}", " {}: {}"))
        do = f"{spoken_verb} {article}{what} " + rng.choice(("with", "with", "with", "for", "using", "at"))
        do += rng.choice((" and", ",")).join(joint.format(key, item) for key, item in said.items())
    if rng.random() < 0.1:
        do = f"call {name} with " + ", ".join(f"{key} {item}" for key, item in said.items())
    text = rng.choice(frames).replace("{do}", do)
    return (
        [item[0] for item in made],
        text[:1].upper() + text[1:] if rng.random() < 0.7 else text,
        tool_call(name, arguments),
        name,
    )
