"""A request's body: read up to a limit, taken as JSON in the strict sense, and checked against what is accepted.

Not left to the framework: it would take `NaN`, `1e999` and half a surrogate pair for JSON, a nesting too deep for a bug
of the server, and a body without end for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from teachllm.server.http.errors import ApiError, of_validation

M = TypeVar("M", bound=BaseModel)
_MAY_BE_HUGE = re.compile(rb"(?<![0-9])[0-9]{209}|[eE]\+?[0-9]{3}")  # 209 digits and e99 are 1e308
_PATIENCE = 60  # seconds for another piece of a body: who sends none holds the connection for nothing
_MAX_UNREAD_BYTES, _MAX_UNREAD_SECONDS = 32 << 20, 5.0  # for the rest of one that is refused


class BodyRest:
    """What of a body has not been read yet.

    A client that is still sending when its connection is closed sees that, and not the answer that it was given.

    Args:
        receive: of the server. What has the body from then on takes the method of the same name here.
    """

    def __init__(self, receive: Callable[[], Awaitable[Any]], headers: Mapping[bytes, bytes]) -> None:
        self._receive = receive
        self._is_over = b"expect" in headers  # it is sent only after the server has asked for it

    async def receive(self) -> Any:
        message = await self._receive()
        self._is_over = not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Reads to the end, unless that is far."""
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_UNREAD_SECONDS):
                while not self._is_over and num_bytes <= _MAX_UNREAD_BYTES:
                    num_bytes += len((await self.receive()).get("body", b""))


async def read_json(request: Request, max_bytes: int) -> dict[str, object]:
    """The object in the body.

    Raises:
        ApiError: 413 past `max_bytes`; 400 for anything that is not one JSON object.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(400, f"the content type is {kind or 'missing'}: send JSON with Content-Type: application/json")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(_PATIENCE) as patience:
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                patience.reschedule(asyncio.get_running_loop().time() + _PATIENCE)
    except TimeoutError:
        raise ApiError(408, f"no more of the body came for {_PATIENCE} seconds") from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was complete") from None
    try:
        content = from_json(bytes(body), allow_inf_nan=False)  # which takes 1e999 for infinity
        if _MAY_BE_HUGE.search(body):
            msgspec.json.decode(body)
    except msgspec.ValidationError:
        raise ApiError(400, "the body has a number that no float of 64 bits holds: send a smaller one") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body is JSON, but not an object: send {...}")
    return content


def check(model: type[M], content: dict[str, object]) -> M:
    """The content as a request.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise of_validation(error) from None


async def read_request(request: Request, model: type[M], max_bytes: int) -> M:
    """The body as a request. Raises as `read_json` and `check`."""
    return check(model, await read_json(request, max_bytes))


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request is larger than {max_bytes} bytes: shorten it, or raise --max-request-bytes")
