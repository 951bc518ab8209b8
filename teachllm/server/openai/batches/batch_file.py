"""The two files of a batch: requests, one a line, and their answers. The lines are OpenAI's
(https://platform.openai.com/docs/guides/batch):

    in   {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    out  {"id": "batch_req_...", "custom_id": "a", "response": {"status_code", "request_id", "body"}, "error": null}

`error` is for a line that is no request; `response` is then null. Answers stand in the order in which they came, each
whole, so that an output says by itself what is left to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import msgspec

from teachllm.server.http.errors import error_body

URLS = ("/v1/chat/completions", "/v1/completions")
PASSING = (429, 500, 503)  # the same line may be answered another time
_BEGINNING = b'{"id":"batch_req_'  # of every line that is written here


class BatchLine(msgspec.Struct):
    """A line of input, checked by `make_plan` alone."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"")


class _Streaming(msgspec.Struct):
    stream: Any = None


class _Status(msgspec.Struct):
    status_code: int


class _Answered(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Status | None
    error: dict[str, Any] | None


@dataclass(frozen=True)
class BatchPlan:
    """Describe what an input asks for.

    Attributes:
        offsets: in the input, of the lines that are still to be answered.
        refusals: lines of output for those that are no requests.
        num_before: lines that had been answered before.
    """

    offsets: list[int]
    refusals: list[bytes]
    num_before: int

    @property
    def num_lines(self) -> int:
        return len(self.offsets) + len(self.refusals) + self.num_before


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other batches from writing this file meanwhile; its lock is a hidden file beside it.

    Raises:
        ValueError: another one is writing it.
    """
    real = path.resolve()
    lock = real.with_name(f".{real.name}.lock")
    with contextlib.ExitStack() as stack:
        is_ours = False
        while not is_ours:
            file = stack.enter_context(lock.open("wb"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{path}: another run-batch is writing it: wait for that one, or choose another file"
                ) from None
            # The last owner may have removed it after it was opened here.
            is_ours = lock.exists() and os.path.samestat(os.fstat(file.fileno()), lock.stat())
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def make_plan(source: BinaryIO, answered: Set[str] = frozenset()) -> BatchPlan:
    """Reads an input to its end, and looks at every line.

    Args:
        answered: custom ids to leave out.
    """
    offsets: list[int] = []
    refusals: list[bytes] = []
    seen: set[str] = set()
    num_before = offset = 0
    for number, text in enumerate(source, start=1):
        if text.strip():
            try:
                custom_id = _check(text, number, seen)
            except _RefusedError as refused:
                refusals.append(refused.line)
            else:
                num_before += custom_id in answered
                if custom_id not in answered:
                    offsets.append(offset)
        offset += len(text)
    return BatchPlan(offsets, refusals, num_before)


def take_up(path: Path) -> set[str]:
    """Custom ids that an output answers already. What is to be said again leaves the file: a torn last line, what the
    server could not do at that time, and lines that are refused without a model.

    Raises:
        ValueError: the file holds something else.
    """
    answered: set[str] = set()
    dropped: set[int] = set()
    with path.open("rb") as file:
        for number, text in enumerate(file):
            entry = _entry(text, path, number)
            response = None if entry is None else entry.response
            if entry is None or entry.custom_id is None or response is None or response.status_code in PASSING:
                dropped.add(number)
            else:
                answered.add(entry.custom_id)
    if dropped:
        real = path.resolve()
        kept = real.with_name(f"{real.name}.{uuid4().hex[:8]}.tmp")
        with real.open("rb") as file, kept.open("wb") as copy:
            copy.writelines(text for number, text in enumerate(file) if number not in dropped)
        shutil.copymode(real, kept)
        os.replace(kept, real)
    return answered


def _entry(text: bytes, path: Path, number: int) -> _Answered | None:
    """A line of output; None if it is the beginning of one."""
    if not text.endswith(b"\n") and text.startswith(_BEGINNING[: len(text)]):
        return None
    try:
        if text.startswith(_BEGINNING):
            return msgspec.json.decode(text, type=_Answered)
    except (msgspec.MsgspecError, RecursionError):
        pass
    raise ValueError(f"{path}, line {number + 1}, is no answer of a batch: choose another file, or --overwrite it")


class _RefusedError(Exception):
    """Carries the line of output."""

    def __init__(self, custom_id: Any, message: str, param: str | None = None) -> None:
        super().__init__(message)
        error = msgspec.json.decode(error_body(400, message, param))["error"]
        self.line = output_line(custom_id if isinstance(custom_id, str) else None, None, error)


def _check(text: bytes, number: int, seen: set[str]) -> str:
    """The custom id of a line that is a request.

    Args:
        seen: custom ids of the lines before; this one's is added.
    """
    try:
        line = msgspec.json.decode(text, type=BatchLine)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _RefusedError(None, f"line {number} is no JSON object: {error}") from None
    name = line.custom_id
    if not isinstance(name, str) or not name:
        raise _RefusedError(None, f"line {number} has no custom_id: give each its own, a text", "custom_id")
    if name in seen:
        raise _RefusedError(name, f"line {number} has the custom_id of another before it", "custom_id")
    seen.add(name)
    if line.method != "POST":
        raise _RefusedError(name, f"line {number}: the method has to be POST", "method")
    if line.url not in URLS:
        raise _RefusedError(name, f"line {number}: the url has to be one of {', '.join(URLS)}", "url")
    if not line.body:
        raise _RefusedError(name, f"line {number} has no body", "body")
    if _streams(line.body):
        raise _RefusedError(name, f"line {number}: a batch is not streamed: leave stream out of the body", "stream")
    return name


def _streams(body: msgspec.Raw) -> bool:
    try:
        return msgspec.json.decode(body, type=_Streaming).stream is True
    except (msgspec.MsgspecError, RecursionError):  # the server will say what is wrong
        return False


def output_line(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    """A line of output, its end included. `response` may hold raw JSON."""
    line = {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


def read_lines(source: BinaryIO, offsets: list[int]) -> Iterator[BatchLine]:
    """Those of a plan, one at a time."""
    for offset in offsets:
        source.seek(offset)
        yield msgspec.json.decode(source.readline(), type=BatchLine)
