"""Report errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, whatever it was.

Clients are written against this object, so that nothing else may leave the server: not for a route that does not
exist, not for broken JSON, not for a bug of ours.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
_PARAM = re.compile(r"([a-z][a-z_]*)(?:=|: | token id )")
_MAX_MESSAGE = 1000  # characters: a message may quote what was sent


class ApiError(Exception):
    """A request gets an error in place of an answer.

    Args:
        status: of HTTP; also the error's code.
        message: one line that says what, why, and what would help.
        param: the field of the request that it is about.
        headers: further ones of the answer.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, dict(headers or {})


def kind_of(status: int) -> str:
    """Return the error's type."""
    return KINDS.get(status, "InternalServerError" if status >= 500 else "BadRequestError")


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """The error object as JSON."""
    text = " ".join(message.split())
    text = text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + " ..."
    # A message may quote half a character that a client sent.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return msgspec.json.encode({"error": {"message": text, "type": kind_of(status), "param": param, "code": status}})


def error_response(error: ApiError) -> Response:
    body = error_body(error.status, error.message, error.param)
    headers = error.headers
    if error.status == 501:
        headers |= {"x-should-retry": "false"}  # OpenAI's clients would, after any 5xx
    return Response(body, error.status, headers, media_type="application/json")


@contextlib.contextmanager
def refused_as(param: str | None = None) -> Iterator[None]:
    """Turn a ValueError inside into a 400.

    Args:
        param: None takes the name that the refusal begins with, as the engine's do: "min_tokens=50 is more than ...".
    """
    try:
        yield
    except ValueError as error:
        named = _PARAM.match(str(error))
        raise ApiError(400, str(error), param or (named and named[1])) from error


def of_validation(error: ValidationError) -> ApiError:
    """Return what pydantic refused: the first field that is wrong, with all that would have been right for it."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    field = found[0]["loc"][0] if found[0]["loc"] else None
    of_field = [each for each in found if (each["loc"][0] if each["loc"] else None) == field]
    deepest = max(len(each["loc"]) for each in of_field)
    where = ".".join(str(part) for part in of_field[0]["loc"] if _is_name(part)) if deepest > 1 else field
    reasons = list(dict.fromkeys(_reason(each["msg"]) for each in of_field))
    message = " or ".join(reasons[:4])
    return ApiError(400, message if field is None else f"{where}: {message}", None if field is None else str(field))


def _reason(text: str) -> str:
    return text.removeprefix("Value error, ")


def _is_name(part: object) -> bool:
    """A field or an index, not the name that pydantic gives to a branch of a union."""
    return isinstance(part, int) or (isinstance(part, str) and part.isidentifier() and part not in ("str", "int"))


def install(app: Any) -> None:
    """Makes every error of a FastAPI application such an object."""
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        message = {
            404: f"there is no {path}: GET /openapi.json lists what there is",
            405: f"{path} does not take {request.method}",
        }.get(error.status_code, str(error.detail))
        return error_response(ApiError(error.status_code, message, headers=error.headers))

    async def on_query(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        wrong = error.errors()[0]
        name = str(wrong["loc"][-1])
        return error_response(ApiError(400, f"{name}: {wrong['msg']}", name))

    async def on_bug(request: Request, error: Exception) -> Response:
        return error_response(ApiError(500, f"the server failed: {type(error).__name__}; its log says where"))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_query)
    app.add_exception_handler(Exception, on_bug)
