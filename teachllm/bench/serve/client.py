"""One request to an OpenAI-compatible server, and when each part of its answer came.

An answer is a stream of server-sent events: lines `data: {json}`, then `data: [DONE]`
(https://html.spec.whatwg.org/multipage/server-sent-events.html). A chunk is one such event, and may hold several
tokens: servers merge what a client is slow to take. So times are those of chunks, and numbers of tokens are those of
the server's `usage`. At 30,000 chunks per second every microsecond here is 3% of the client, and a client that is late
measures itself: what is read is stamped first, and then decoded by msgspec, which skips what is not asked for.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from teachllm.bench.serve.dataset import Prompt
from teachllm.bench.serve.record import Record

if TYPE_CHECKING:
    import aiohttp

_MISSING = "the load generator needs aiohttp and msgspec: pip install 'teachllm[serve]'"


@dataclass(frozen=True)
class Target:
    """Whom to ask, and what goes into every request.

    Attributes:
        base_url: like http://127.0.0.1:8000.
        endpoint: one that ends with /chat/completions gets messages, any other a prompt.
        fields: of the body, beside prompt, length and streaming; None leaves one out.
        headers: of the request.
        timeout_s: how long one answer may take.

    Raises:
        ValueError: the URL is none of HTTP.
    """

    base_url: str
    endpoint: str = "/v1/completions"
    model: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 6 * 3600.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url={self.base_url}: must begin with http:// or https://")
        if not self.endpoint.startswith("/"):
            raise ValueError(f"endpoint={self.endpoint}: must begin with /, like /v1/completions")

    @property
    def root(self) -> str:
        """Return `base_url` without what endpoints begin with: people write it with and without /v1."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def is_chat(self) -> bool:
        return self.endpoint.rstrip("/").endswith("/chat/completions")

    def body(self, prompt: Prompt) -> bytes:
        """Return the JSON of a request.

        Raises:
            ValueError: token ids for a chat.
        """
        if not self.is_chat:
            asked: dict[str, Any] = {"prompt": prompt.content}
        elif isinstance(prompt.content, str):
            asked = {"messages": [{"role": "user", "content": prompt.content}]}
        else:
            raise ValueError(f"{self.endpoint} takes text: send token ids to /v1/completions")
        length = {"max_tokens": prompt.output_len}
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.model, **asked, **length, **streaming, **self.fields}
        return json.dumps({name: value for name, value in body.items() if value is not None}).encode()


async def ask_model(session: aiohttp.ClientSession, target: Target) -> str:
    """Return the name of the model that is asked: the target's, or the first that the server has.

    Raises:
        ConnectionError: no server answers there.
        ValueError: the server does not name its models.
    """
    import aiohttp

    try:
        async with session.get(f"{target.root}/v1/models", headers=target.headers) as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        number = getattr(error, "errno", None) or 0
        why = os.strerror(number) if number > 0 else getattr(error, "strerror", None)
        raise ConnectionError(
            f"no server answers at {target.root} ({why or _one_line(error)}): "
            "start a server there, or change --base-url"
        ) from None
    if target.model:
        return target.model
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        said = _said(response.status, text)
        raise ValueError(f"{target.root}/v1/models names no model ({said}): give --model, or --api-key") from None


async def ask(
    session: aiohttp.ClientSession, target: Target, body: bytes, record: Record, now: Callable[[], float]
) -> None:
    """Send a request and fill in its record; a failure is written there, too.

    Args:
        now: seconds from the start of the load.
    """
    record.sent_s = record.end_s = now()
    try:
        async with asyncio.timeout(target.timeout_s):
            async with session.post(target.root + target.endpoint, data=body, headers=_headers(target)) as response:
                if response.status != 200:
                    record.error = _said(response.status, await response.text())
                else:
                    await _read(response.content, record, now)
    except Exception as error:  # whatever it was, it is counted and shown
        record.error = _why(error, target)
    if record.error:
        record.end_s = now()


def open_session() -> aiohttp.ClientSession:
    """Open a session with as many connections as there are requests.

    Raises:
        ImportError: what it needs is not installed.
    """
    try:
        import aiohttp
        import msgspec  # noqa: F401
    except ImportError as error:
        raise ImportError(_MISSING) from error
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),  # servers drop idle ones after five
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=60),
    )


async def _read(stream: aiohttp.StreamReader, record: Record, now: Callable[[], float]) -> None:
    decode, is_done, is_finished, rest = _decoder(), False, False, b""
    async for data in stream.iter_any():
        at = now()
        *lines, rest = (rest + data).split(b"\n")
        for payload in _payloads(lines):
            if payload == b"[DONE]":
                is_done = True
                continue
            event = decode(payload)
            if event.error:
                record.error = _one_line(event.error.get("message") if isinstance(event.error, dict) else event.error)
                return
            if event.usage is not None:
                record.has_usage = True
                record.num_prompt_tokens = event.usage.prompt_tokens or 0
                record.num_output_tokens = event.usage.completion_tokens or 0
            for choice in event.choices or ():
                if _holds_tokens(choice):
                    record.chunk_s.append(at)
                    record.end_s = at
                if choice.finish_reason:
                    is_finished, record.end_s = True, at
    if not (is_done or is_finished):
        record.error = f"the stream ended without a last chunk, after {len(record.chunk_s)} chunks"
        return
    if not record.chunk_s:  # a single token without text
        record.chunk_s.append(record.end_s)
    if not record.has_usage:
        record.num_output_tokens = len(record.chunk_s)


def _payloads(lines: list[bytes]) -> Iterator[bytes]:
    """Yield what follows `data:`; other lines are comments, names of events, or empty."""
    for line in lines:
        if line.startswith(b"data:"):
            yield line[5:].strip()


@functools.cache
def _decoder() -> Callable[[bytes], Any]:
    """Return a decoder from the JSON of an event to the fields that are read of it."""
    import msgspec

    words = [(name, Any, None) for name in ("content", "reasoning_content", "reasoning", "tool_calls", "role")]
    delta = msgspec.defstruct("Delta", words)

    parts = [("text", Any, None), ("delta", delta | None, None), ("finish_reason", Any, None)]
    choice = msgspec.defstruct("Choice", parts)
    counts = [(name, int | None, None) for name in ("prompt_tokens", "completion_tokens")]
    usage = msgspec.defstruct("Usage", counts)
    fields = [("choices", list[choice] | None, None), ("usage", usage | None, None), ("error", Any, None)]  # type: ignore[valid-type]
    return msgspec.json.Decoder(msgspec.defstruct("Event", fields)).decode


def _holds_tokens(choice: Any) -> bool:
    """Tell whether a choice has tokens: a role alone, or a reason alone, is none; an empty text can be one that
    awaits its other bytes."""
    if (part := choice.delta) is None:
        return bool(choice.text) or not choice.finish_reason
    has_words = part.content or part.reasoning_content or part.reasoning or part.tool_calls
    return bool(has_words) or not (part.role or choice.finish_reason)


def _headers(target: Target) -> dict[str, str]:
    return {"Content-Type": "application/json", "Accept-Encoding": "identity", **target.headers}


def _why(error: Exception, target: Target) -> str:
    """Describe a failure of a request in one line."""
    import aiohttp
    import msgspec

    if isinstance(error, msgspec.MsgspecError):
        return _one_line(f"an event that is no chunk of a completion: {error}")
    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
        return f"no whole answer within {target.timeout_s:g} s"
    return _one_line(error if isinstance(error, aiohttp.ClientError) else f"{type(error).__name__}: {error}")


def _said(status: int, text: str) -> str:
    """Describe an error of HTTP in one line, with the server's own words."""
    try:
        found = json.loads(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        pass
    return _one_line(f"HTTP {status}: {text}")


def _one_line(error: object) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]} ..."
