"""A client that sends a request, looks at all of its answer, or hangs up in the middle of it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.server.traffic import Ask
from tests.waiting import HANG_SECONDS

DONE = "[DONE]"


class Violation(Exception):
    """What must hold does not."""


def hold(holds: bool, what: str) -> None:
    """Raises Violation unless it holds."""
    if not holds:
        raise Violation(what)


@dataclass
class Seen:
    """What became of a request, as its client sees it.

    Attributes:
        status: of the answer; None if the client left before.
        has_left: it hung up before the answer was complete.
        reasons: of all completions of a complete answer, why they ended.
    """

    name: str
    ask: Ask
    status: int | None = None
    has_left: bool = False
    usage: dict[str, Any] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)


def connect(url: str) -> aiohttp.ClientSession:
    """A client's connections. Idle ones are given up before the server does so."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    return aiohttp.ClientSession(url, connector=connector, cookie_jar=aiohttp.DummyCookieJar())


async def perform(session: aiohttp.ClientSession, ask: Ask, name: str) -> Seen:
    """Sends a request and checks its answer.

    Args:
        name: the request's id, in the server's log, too.

    Raises:
        Violation: the answer is not what it has to be, or there is none.
    """
    seen = Seen(name, ask)
    try:
        async with asyncio.timeout(HANG_SECONDS):
            try:
                async with asyncio.timeout(ask.leaves_after):
                    await _perform(session, seen)
            except TimeoutError:
                if ask.leaves_after is None:
                    raise
                seen.has_left = True
    except TimeoutError:
        raise Violation(f"{name} ({ask.kind}) hung for {HANG_SECONDS:.0f} seconds") from None
    except (Violation, aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
        raise Violation(f"{name} ({ask.kind}): {type(error).__name__}: {error}; it was {_short(ask.body)}") from error
    return seen


async def _perform(session: aiohttp.ClientSession, seen: Seen) -> None:
    ask = seen.ask
    body = ask.body if isinstance(ask.body, bytes) else json.dumps(ask.body).encode()
    headers = {**ask.headers, "x-request-id": seen.name}
    data: Any = _pieces(body) if ask.chunked else body
    async with session.request(ask.method, ask.path, data=data, headers=headers) as response:
        seen.status = response.status
        if ask.refused_with is not None:
            _check_error(json.loads(await response.read()), response.status, ask.refused_with)
            return
        if response.status in ask.may_be_refused_with:
            check_error(json.loads(await response.read()), response.status)
            return
        hold(response.status == 200, f"status {response.status}")
        if ask.is_stream:
            await _read_stream(response, seen)
        elif ask.num_completions:
            answer = json.loads(await response.read())
            seen.usage = answer["usage"]
            _check_answer(ask, answer["choices"], seen)
        else:
            answer = json.loads(await response.read())
            found = answer["count"] if ask.path == "/tokenize" else len(answer["prompt"]) and ask.num_prompt_tokens
            hold(ask.num_prompt_tokens in (None, found), f"{found} tokens, not {ask.num_prompt_tokens}")


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 1 << 14):
        yield body[start : start + (1 << 14)]


async def _read_stream(response: aiohttp.ClientResponse, seen: Seen) -> None:
    ask = seen.ask
    told: list[dict[str, Any]] = []
    if ask.leaves_at == 0:
        return _hang_up(response, seen)
    async for event in events(response):
        if event == DONE:
            break
        hold(not told or "error" not in event, f"an error in the stream: {event}")
        told.append(event)
        if ask.leaves_at is not None and len(told) >= ask.leaves_at:
            return _hang_up(response, seen)
    else:
        raise Violation(f"the stream ended without {DONE}")
    hold(told[-1]["choices"] == [], "the last chunk has choices")
    seen.usage = told.pop()["usage"]
    _check_answer(ask, _joined(told), seen)


def _hang_up(response: aiohttp.ClientResponse, seen: Seen) -> None:
    seen.has_left = True
    response.close()


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """The events of a stream, the last one being DONE."""
    rest = b""
    async for piece in response.content.iter_any():
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            hold(event.startswith(b"data: "), f"no event: {event[:80]!r}")
            content = event.removeprefix(b"data: ")
            yield DONE if content == DONE.encode() else json.loads(content)
    hold(rest == b"", f"half an event: {rest[:80]!r}")


def _joined(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream as they would have been without one."""
    texts: dict[int, str] = defaultdict(str)
    token_ids: dict[int, list[int]] = defaultdict(list)
    reasons: dict[int, str] = {}
    for chunk in told:
        for choice in chunk["choices"]:
            index = choice["index"]
            hold(index not in reasons, f"choice {index} goes on after its end")
            texts[index] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            token_ids[index] += choice.get("token_ids") or []
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
    return [
        {"index": index, "text": texts[index], "token_ids": token_ids[index], "finish_reason": reasons[index]}
        for index in sorted(reasons)
    ]


def _check_answer(ask: Ask, choices: list[dict[str, Any]], seen: Seen) -> None:
    assert isinstance(ask.body, dict)
    found = [choice["index"] for choice in choices]
    hold(found == list(range(ask.num_completions)), f"choices {found}, not {ask.num_completions}")
    usage = seen.usage
    expected = ask.num_prompt_tokens
    hold(expected in (None, usage["prompt_tokens"]), f"{usage}, not {expected} tokens of prompts")
    limit = 0 if ask.scores else ask.num_completions * ask.max_tokens
    hold(usage["completion_tokens"] <= limit, f"{usage}, more than {limit}")
    for choice in choices:
        reason = choice["finish_reason"]
        hold(reason in ("stop", "length"), f"ended by {reason}")
        seen.reasons[reason] += 1
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        stops = ask.body.get("stop", [])
        is_plain = not ask.body.get("echo")
        for stop in [stops] if isinstance(stops, str) else stops:
            hold(not is_plain or stop not in text, f"the stop string {stop!r} is in {text!r}")
    if ask.body.get("ignore_eos") and not ask.body.keys() & {"stop", "stop_token_ids"}:
        hold(usage["completion_tokens"] == limit, f"{usage}, less than {limit}")
    if ask.body.get("return_token_ids"):
        num_ids = sum(len(choice["token_ids"]) for choice in choices)
        hold(num_ids == usage["completion_tokens"], f"{num_ids} token ids, but {usage}")


def check_error(content: Any, *statuses: int) -> None:
    """It has to be the error object, with one of these codes."""
    hold(list(content) == ["error"], f"no error: {content}")
    error = content["error"]
    hold(error["code"] in statuses and bool(error["message"]), f"the error is {error}, not one of {statuses}")


def _check_error(content: Any, status: int, expected: int) -> None:
    hold(status == expected, f"status {status}, not {expected}: {content}")
    check_error(content, expected)


def _short(body: dict[str, Any] | bytes) -> str:
    text = repr(body)
    return text if len(text) <= 300 else text[:300] + " ..."
