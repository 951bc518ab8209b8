"""Requests of every kind that clients send, good and bad, and what the answer to each has to hold.

One random generator makes them, so that a seed brings the same ones again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import httpx

MAX_MODEL_LEN = 512
MAX_REQUEST_BYTES = 1 << 18
# Little room in every respect: requests wait, prompts are cut into chunks, sequences lose their blocks.
SETTINGS = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "128", "--max-num-seqs", "24"),
    *("--num-gpu-blocks-override", "64", "--scheduling-policy", "priority", "--check-invariants"),
    *("--max-request-bytes", str(MAX_REQUEST_BYTES)),
)
SHARE_OF_BAD, SHARE_OF_HANGUPS, SHARE_OF_HOSTILE = 0.05, 0.30, 0.02
_STORY = "one day a little girl named Lily went to the park and saw big dog . was very happy sun cat said ü"
_JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        kind: what the figures call it.
        body: JSON, or bytes as they are.
        chunked: the body's length is not declared.
        num_prompts, num_completions: in all; 0 where nothing is generated.
        num_prompt_tokens: of all prompts, each counted once; None if the server alone knows.
        max_tokens: of each completion.
        scores: what is sampled is not shown.
        refused_with: the status of the error; None if it is to be answered.
        may_be_refused_with: statuses of errors with which it may end instead.
        leaves_at: hangs up after so many events of its stream.
        leaves_after: hangs up after so many seconds.
    """

    kind: str
    path: str
    body: dict[str, Any] | bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: dict(_JSON))
    chunked: bool = False
    num_prompts: int = 0
    num_completions: int = 0
    num_prompt_tokens: int | None = 0
    max_tokens: int = 0
    scores: bool = False
    refused_with: int | None = None
    may_be_refused_with: tuple[int, ...] = ()
    leaves_at: int | None = None
    leaves_after: float | None = None

    @property
    def is_stream(self) -> bool:
        return isinstance(self.body, dict) and bool(self.body.get("stream"))

    @property
    def leaves(self) -> bool:
        return self.leaves_at is not None or self.leaves_after is not None


@dataclass(frozen=True)
class Pool:
    """Prompts whose length is known.

    Attributes:
        texts: and their token ids.
        chats: messages, and how many tokens their prompt has.
        make_hostile: what some clients send instead; None if there is no such client.
    """

    texts: list[tuple[str, list[int]]]
    chats: list[tuple[list[dict[str, str]], int]]
    make_hostile: Callable[[Random], Ask] | None = None


def make_pool(rng: Random, http: httpx.Client) -> Pool:
    """Draws prompts, short and long, several with the same beginning, and asks the server for their tokens."""
    beginnings = [_words(rng, 40) for _ in range(3)]
    lengths = [1, 2, 3, 5, 5, 5, 10, 10, 20, 20, 40, 80, 240]
    texts = [_words(rng, length) for length in lengths]
    texts += [f"{rng.choice(beginnings)} {_words(rng, length)}" for length in lengths if length <= 40]
    chats = [
        [{"role": "user" if turn % 2 == 0 else "assistant", "content": _words(rng, 8)} for turn in range(num_turns)]
        for num_turns in (1, 1, 1, 3, 5)
    ]

    def tokens(content: dict[str, Any]) -> list[int]:
        response = http.post("/tokenize", json=content)
        response.raise_for_status()
        ids: list[int] = response.json()["tokens"]
        return ids

    return Pool(
        [(text, tokens({"prompt": text})) for text in texts],
        [(messages, len(tokens({"messages": messages}))) for messages in chats],
    )


def make_ask(rng: Random, pool: Pool) -> Ask:
    """The next request of a client."""
    if pool.make_hostile is not None and rng.random() < SHARE_OF_HOSTILE:
        return pool.make_hostile(rng)
    dice = rng.random()
    if dice < SHARE_OF_BAD:
        return rng.choice(_BAD)(rng)
    if dice < SHARE_OF_BAD + SHARE_OF_HANGUPS:
        return _hanging_up(rng, pool)
    if rng.random() < 0.05:
        return _tokenize(rng, pool)
    return _generation(rng, pool, rng.choice([1, 2, 4, 4, 8, 8, 16, 40]))


def _words(rng: Random, count: int) -> str:
    words = _STORY.split()
    return " ".join(rng.choice(words) for _ in range(count))


# -- good ones -------------------------------------------------------------------------------------------------


def _generation(rng: Random, pool: Pool, max_tokens: int) -> Ask:
    n = rng.choice([1, 1, 1, 1, 1, 1, 2, 3])
    body: dict[str, Any] = {"max_tokens": max_tokens, "n": n, "temperature": rng.choice([0.7, 1.0])}
    body |= {} if rng.random() < 0.5 else {"ignore_eos": True}
    body |= {"priority": rng.randint(-2, 2)} if rng.random() < 0.3 else {}
    body |= {"cache_salt": rng.choice("ab")} if rng.random() < 0.2 else {}
    body |= {"stop": rng.choice([".", [" the", " was"], "Lily"])} if rng.random() < 0.2 else {}
    body |= {"return_token_ids": True} if rng.random() < 0.1 else {}
    if n == 1 and rng.random() < 0.3:
        body |= {"temperature": 0.0}
    elif rng.random() < 0.2:
        body |= {"seed": rng.getrandbits(31), "top_p": 0.9, "presence_penalty": 0.5}
    if rng.random() < 0.6:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    make = _chat if rng.random() < 0.3 else _completion
    return make(rng, pool, body)


def _completion(rng: Random, pool: Pool, body: dict[str, Any]) -> Ask:
    is_list, is_ids = rng.random() < 0.15, rng.random() < 0.3
    chosen = [rng.choice(pool.texts) for _ in range(rng.randint(2, 3) if is_list else 1)]
    prompts = [ids if is_ids else text for text, ids in chosen]
    body = {"prompt": prompts if is_list else prompts[0], **body}
    scores = False
    if rng.random() < 0.15:
        body |= {"echo": True}
        if scores := rng.random() < 0.3:
            # Without an end: what is sampled beyond what was asked for then ends by its length, as it is told.
            body |= {"max_tokens": 0, "ignore_eos": True}
            body.pop("stop", None)
    body |= {"logprobs": rng.randint(0, 3)} if rng.random() < 0.2 else {}
    if not body.get("stream") and rng.random() < 0.1:
        body |= {"prompt_logprobs": 1}
    return Ask(
        f"completion{' stream' if body.get('stream') else ''}",
        "/v1/completions",
        body,
        num_prompts=len(chosen),
        num_completions=len(chosen) * body["n"],
        num_prompt_tokens=sum(len(ids) for _, ids in chosen),
        max_tokens=body["max_tokens"] or 1,
        scores=scores,
    )


def _chat(rng: Random, pool: Pool, body: dict[str, Any]) -> Ask:
    messages, num_tokens = rng.choice(pool.chats)
    body = {"messages": messages, **body}
    body |= {"logprobs": True, "top_logprobs": rng.randint(0, 3)} if rng.random() < 0.2 else {}
    return Ask(
        f"chat{' stream' if body.get('stream') else ''}",
        "/v1/chat/completions",
        body,
        num_prompts=1,
        num_completions=body["n"],
        num_prompt_tokens=num_tokens,
        max_tokens=body["max_tokens"],
    )


def _tokenize(rng: Random, pool: Pool) -> Ask:
    if rng.random() < 0.5:
        text, ids = rng.choice(pool.texts)
        return Ask("tokenize", "/tokenize", {"prompt": text}, num_prompt_tokens=len(ids))
    text, ids = rng.choice(pool.texts)
    return Ask("detokenize", "/detokenize", {"tokens": ids}, num_prompt_tokens=len(ids))


def _hanging_up(rng: Random, pool: Pool) -> Ask:
    """Leaves at a random token, or at a random time; as a rule before the end, which is at `max_tokens` alone."""
    leaves_at = rng.choice([0, 1, 2, 3, 4, 8, 16])
    ask = _generation(rng, pool, rng.randint(2 * leaves_at + 8, 48))
    assert isinstance(ask.body, dict)
    body = {**ask.body, "max_tokens": max(ask.body["max_tokens"], 1), "ignore_eos": True}
    body.pop("stop", None)
    ask = replace(ask, body=body, scores=False, kind=f"{ask.kind}, hung up")
    if ask.is_stream and rng.random() < 0.7:
        return replace(ask, leaves_at=leaves_at)
    return replace(ask, leaves_after=rng.choice([0.0, 0.001, 0.01, rng.uniform(0.0, 1.0)]))


# -- bad ones --------------------------------------------------------------------------------------------------


_FOREIGN = {"/v1/completions": "messages", "/v1/chat/completions": "prompt"}  # what the other endpoint takes


def _bad(status: int, what: str, body: dict[str, Any] | bytes, **settings: Any) -> Callable[[Random], Ask]:
    def make(rng: Random) -> Ask:
        path = settings.get("path") or rng.choice(list(_FOREIGN))
        own = {k: v for k, v in body.items() if k != _FOREIGN.get(path)} if isinstance(body, dict) else body
        return Ask(f"bad: {what}", body=own, refused_with=status, **{**settings, "path": path})

    return make


_OF_BOTH = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
_BAD = [
    _bad(400, "broken JSON", b'{"prompt": "a", "max_tok'),
    _bad(400, "NaN", b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}'),
    _bad(400, "no object", b"[1, 2, 3]"),
    _bad(400, "empty", b""),
    _bad(400, "invalid UTF-8", b'{"prompt": "\xff\xfe", "messages": [{"role": "user", "content": "\xc3\x28"}]}'),
    _bad(400, "half a character", b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}'),
    _bad(400, "nested deeply", b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    _bad(400, "wrong type", {"prompt": 17.5, "messages": "a"}),
    _bad(400, "wrong type of a setting", {**_OF_BOTH, "max_tokens": "many"}),
    _bad(400, "wrong range", {**_OF_BOTH, "temperature": -1}),
    _bad(400, "prompt missing", {"max_tokens": 4}),
    _bad(404, "unknown model", {**_OF_BOTH, "model": "gpt-0"}),
    _bad(400, "prompt too long", {"prompt": [5] * (MAX_MODEL_LEN + 1)}, path="/v1/completions"),
    _bad(400, "one of the prompts too long", {"prompt": [[5], [5] * MAX_MODEL_LEN]}, path="/v1/completions"),
    _bad(400, "output too long", {**_OF_BOTH, "max_tokens": MAX_MODEL_LEN}),
    _bad(400, "unknown token", {"prompt": [1 << 20]}, path="/v1/completions"),
    _bad(501, "unbuilt", {**_OF_BOTH, "response_format": {"type": "json_object"}}),
    _bad(404, "wrong route", {**_OF_BOTH}, path="/v1/completion"),
    _bad(405, "wrong method", b"", path="/v1/completions", method="PUT"),
    _bad(400, "no content type", json.dumps(_OF_BOTH).encode(), headers={"content-type": "text/plain"}),
    _bad(413, "huge", b'{"prompt": "' + b"a" * MAX_REQUEST_BYTES + b'"}'),
    _bad(413, "huge, of unknown length", b'{"prompt": "' + b"a" * 3 * MAX_REQUEST_BYTES + b'"}', chunked=True),
]
