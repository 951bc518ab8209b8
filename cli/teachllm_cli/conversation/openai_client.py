"""A running server that speaks OpenAI's protocol, as a command sees it: ours, or any other.

An answer is a stream of server-sent events: lines `data: {json}`, then `data: [DONE]`
(https://html.spec.whatwg.org/multipage/server-sent-events.html). Leaving a stream closes its connection: so a server
learns that the client has gone, and frees what the request held.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2

_CONNECT_S, _ASK_S = 10.0, 60.0  # an answer itself may take as long as it takes
# Every server says it in its own words, few with a code.
_TOO_LONG = re.compile(r"context.{0,20}(length|size|window)|max_model_len|too long|longer than", re.IGNORECASE)


class ServerError(RuntimeError):
    """A server returned an error in place of an answer, or nothing."""


class TooLongError(ServerError):
    """Prompt and answer together are more than the model takes."""


@dataclass(frozen=True)
class TokenCount:
    """Tokens of a prompt, and the most that prompt and answer may have together."""

    num_tokens: int
    max_model_len: int


class OpenAIClient:
    """Asks one model of one server.

    Args:
        url: like http://127.0.0.1:8000, with or without /v1.
        api_key: sent as a bearer token.
        model: the name of the model; None takes the first of those that the server lists.
        transport: in place of the network.

    Attributes:
        root: `url` without /v1.

    Raises:
        ValueError: the URL is none.
        ServerError: no server answers there, or it does not name its models.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        import httpx2

        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url {url}: must begin with http:// or https://")
        self.root = url.rstrip("/").removesuffix("/v1")
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        timeout = httpx2.Timeout(_ASK_S, connect=_CONNECT_S)
        try:
            self._http = httpx2.Client(base_url=self.root, headers=headers, timeout=timeout, transport=transport)
        except httpx2.InvalidURL as error:
            raise ValueError(f"--url {url}: {error}") from None
        try:
            self.model = self._first_model() if model is None else model
        except BaseException:
            self.close()
            raise

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Chunks of an answer as they come. Closing this ends the request on the server.

        Args:
            path: like /v1/completions.
            body: beside model and streaming; what is None is left out.

        Raises:
            TooLongError: before the first chunk.
            ServerError: the request is refused, or the answer ends before it is complete.
        """
        import httpx2

        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        content = {name: value for name, value in body.items() if value is not None}
        is_complete = False
        with (
            self._in_one_line(),
            self._http.stream(
                "POST",
                path,
                json={"model": self.model, **content, **streaming},
                timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            ) as response,
        ):
            if response.status_code != 200:
                raise self._refusal(response.status_code, response.read())
            for data in _events(response.iter_bytes()):
                if data == b"[DONE]":
                    return
                chunk = _object(data)
                if chunk.get("error"):
                    raise ServerError(f"the answer broke off: {_message(data)[0]}")
                is_complete = is_complete or any(choice.get("finish_reason") for choice in chunk.get("choices") or ())
                yield chunk
        if not is_complete:
            raise ServerError(f"{self.root} ended the stream before the answer was complete")

    def count_tokens(self, messages: list[dict[str, str]]) -> TokenCount | None:
        """Tokens of a conversation with the template around it; None if the server does not count (OpenAI's does not).

        Raises:
            ServerError: no server answers.
        """
        with self._in_one_line():
            response = self._http.post("/tokenize", json={"model": self.model, "messages": messages})
        found = _object(response.content) if response.status_code == 200 else {}
        num_tokens, length = found.get("count"), found.get("max_model_len")
        return TokenCount(num_tokens, length) if isinstance(num_tokens, int) and isinstance(length, int) else None

    def close(self) -> None:
        self._http.close()

    def _first_model(self) -> str:
        with self._in_one_line():
            response = self._http.get("/v1/models")
        if response.status_code != 200:
            raise self._refusal(response.status_code, response.content)
        try:
            return str(_object(response.content)["data"][0]["id"])
        except (LookupError, TypeError):
            raise ServerError(f"{self.root}/v1/models names no model: give --model") from None

    def _refusal(self, status: int, content: bytes) -> ServerError:
        message, code = _message(content)
        is_length = status in (400, 413, 422) and (code == "context_length_exceeded" or _TOO_LONG.search(message))
        hint = " (--api-key gives the server a key)" if status in (401, 403) else ""
        kind = TooLongError if is_length else ServerError
        return kind(f"{self.root} answers with HTTP {status}: {message}{hint}")

    @contextlib.contextmanager
    def _in_one_line(self) -> Iterator[None]:
        """What goes wrong on the way, said as what it means."""
        import httpx2

        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            why = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
            raise ServerError(
                f"no server answers at {self.root} ({why}): start a server there, or change --url"
            ) from error
        except httpx2.HTTPError as error:
            raise ServerError(f"the connection to {self.root} broke off: {error or type(error).__name__}") from error


def _events(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield what stands behind `data:`; other lines are comments, names of events, or empty."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _object(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerError(f"this is no server of OpenAI's protocol: it says {content[:80].decode(errors='replace')!r}")
    return found


def _message(content: bytes) -> tuple[str, Any]:
    """Return what an error says, and its code: {"error": {"message", "code"}} to OpenAI, less to others."""
    try:
        found = json.loads(content)
    except ValueError:
        return content[:300].decode(errors="replace") or "nothing more", None
    error = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or error), error.get("code")
    return str(error), None
