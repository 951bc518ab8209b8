"""Requests that cost as much as one may: the largest of every kind, as a client of the soak sends them.

They are those of benchmarks/doors.py. What each is answered depends on the server's settings: it may be served or
refused, but it may not fail, and nothing of it may be left.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from tests.bench.h200_script import load_script
from tests.server.traffic import Ask

REFUSALS = (400, 413)
_STOPS = ("stop", "stop_token_ids")  # who leaves asks for what ends at `max_tokens` alone, so that it is known


def hostile_asks(max_model_len: int, vocab_size: int, longest_token: int, max_request_bytes: int) -> list[Ask]:
    """One of each kind, for a server with these bounds."""
    doors = load_script("doors").doors(max_model_len, vocab_size, longest_token, max_request_bytes)
    return [_ask(door.name, door.path, door.body) for door in doors]


def hostile_ask(rng: Random, asks: list[Ask]) -> Ask:
    """One of them, whole or from a client that leaves at some moment."""
    ask = rng.choice(asks)
    assert isinstance(ask.body, dict)
    if not ask.num_completions or any(name in ask.body for name in _STOPS) or rng.random() < 0.5:
        return ask
    body, kind = {**ask.body, "ignore_eos": True}, f"{ask.kind}, hung up"
    if rng.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return replace(ask, body=body, kind=kind, leaves_at=rng.choice([0, 1, 2, 8]))
    return replace(ask, body=body, kind=kind, leaves_after=rng.choice([0.0, 0.01, 0.1, rng.uniform(0.0, 2.0)]))


def _ask(name: str, path: str, body: dict[str, Any]) -> Ask:
    generates = path in ("/v1/completions", "/v1/chat/completions")
    prompt = body.get("prompt")
    num_prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    body = body | ({"stream_options": {"include_usage": True}} if body.get("stream") else {})
    return Ask(
        f"hostile: {name}",
        path,
        body,
        num_prompts=num_prompts if generates else 0,
        num_completions=num_prompts * body.get("n", 1) if generates else 0,
        num_prompt_tokens=None,
        max_tokens=body.get("max_tokens", 0),
        may_be_refused_with=REFUSALS,
    )
