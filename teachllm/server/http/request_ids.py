"""Request ids: one for everything that is said about a request, in the answer, in its headers and in the log.

A client may bring its own in X-Request-Id, so that its log and ours can be read together.
"""

from __future__ import annotations

import re
from uuid import uuid4

from starlette.requests import Request

_OWN = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def request_id(given: bytes | None) -> str:
    """Return what the client calls it, if that is a plain word; else a new one."""
    return given.decode("ascii") if given is not None and _OWN.fullmatch(given) else uuid4().hex


def response_id(kind: str, request: Request) -> str:
    """The id of an answer, for example "cmpl-..."."""
    return f"{kind}-{request.scope.get('teachllm', {}).get('request_id') or uuid4().hex}"
