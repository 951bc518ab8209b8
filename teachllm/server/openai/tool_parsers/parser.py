"""Sorts an answer into text and tool calls, and delivers both as they come.

Every piece of the answer goes one of three ways:

    say      it is text, and is delivered as such at once
    hold     it may be the beginning of a call: kept until that is decided
    stream   it belongs to the arguments of a call whose name is known: delivered as they are written

What was held is text after all if no call comes of it: only a call's own syntax is ever dropped, and an answer without
a call comes out as it went in. A call is delivered from the moment on when both its name and the first brace of its
arguments are there. If it breaks later, or the answer ends (`max_tokens`), it just ends, its arguments being the
beginning of some JSON, and the rest is read as if it had ended well. Whoever runs a tool has to check its arguments in
any case.
"""

from __future__ import annotations

import contextlib
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

from teachllm.server.openai.tool_parsers.json_reader import JsonReader, NotJson, Reading, json_object, said

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", *_ARGUMENTS)


@dataclass(frozen=True)
class ContentDelta:
    """More of the text."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """More of a call.

    Attributes:
        index: of the call in the answer, from 0.
        id: for the tool's message that answers it. None but in the call's first delta; so is `name`.
        name: the tool's, as the model wrote it: there may be no such tool.
        arguments: more of the JSON text of an object. All of a call's together are what the model wrote.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta: TypeAlias = ContentDelta | ToolCallDelta


class ToolParser(ABC):
    """One completion's. A subclass knows a format."""

    def __init__(self) -> None:
        self._reader = JsonReader(self._say)
        self._deltas: list[Delta] = []
        self._held: list[str] = []
        self._num_calls = 0
        self._blanks: list[str] = []  # spaces that nothing but a call came before
        self._is_blank = True  # nothing but spaces was said since the beginning or the last call
        self._reading = self._answer()

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece of the answer, cut anywhere.

        Returns:
            What is certain now and was not before. Deltas of several calls come in the order of the calls.
        """
        self._reader.feed(text)
        next(self._reading)
        return self._delivered()

    def finish(self) -> list[Delta]:
        """The answer has ended, if need be in the middle of something. Returns what was held back."""
        self._reader.close()
        next(self._reading, None)
        if self._num_calls == 0:
            self._deltas += map(ContentDelta, self._blanks)
        return self._delivered()

    def _delivered(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return _joined(deltas)

    # -- for formats ---------------------------------------------------------------------------------------

    @abstractmethod
    def _answer(self) -> Reading[None]:
        """Reads the whole answer."""

    def _call(self, is_certain: bool) -> Reading[bool]:
        """Reads the object that is a call, as far as it goes, while pieces are held.

        Args:
            is_certain: a marker says that this is a call. Then it may have keys that are not known, and none for
                its arguments. Otherwise it is not a call, but an answer in JSON, as soon as one such key is there.

        Returns:
            Is it one? Then nothing is held, unless it broke after its arguments.
        """
        num_calls = self._num_calls
        with contextlib.suppress(NotJson):
            yield from self._members(is_certain)
            self._held.clear()
        return self._num_calls > num_calls

    def _say(self, raw: str, as_json: str = "") -> None:
        """Delivers text. Spaces that stand alone before, between or after calls are layout, and are not."""
        if self._is_blank and raw.isspace():
            self._blanks.append(raw)
            return
        self._deltas += map(ContentDelta, (*self._blanks, raw))
        self._blanks.clear()
        self._is_blank = False

    def _hold(self, raw: str, as_json: str) -> None:
        self._held.append(raw)

    def _say_held(self) -> None:
        for raw in self._held:
            self._say(raw)
        self._held.clear()

    # -- a call --------------------------------------------------------------------------------------------

    def _members(self, is_certain: bool) -> Reading[None]:
        reader = self._reader
        name: str | None = None
        early: str | None = None  # arguments that came before the name
        has_arguments = False
        is_first = True
        while (key := (yield from reader.key(is_first))) is not None:
            is_first = False
            if key == "name" and name is None:
                name = said((yield from reader.string()))
                if not name:
                    raise NotJson
                if early is not None:
                    self._begin(name, early)
            elif key in _ARGUMENTS and not has_arguments:
                has_arguments = True
                if name is None:
                    early = yield from self._whole_arguments(is_certain)
                elif (yield from reader.token()) == "{":
                    self._begin(name)
                    yield from self._streamed_arguments()
                else:
                    self._begin(name, (yield from self._whole_arguments(is_certain)))
            elif is_certain or key in _KEYS:
                yield from reader.value()
            else:
                raise NotJson
        if name is None or not (has_arguments or is_certain):
            raise NotJson
        if not has_arguments:
            self._begin(name, "{}")

    def _streamed_arguments(self) -> Reading[None]:
        self._reader.sink = self._stream
        try:
            yield from self._reader.value()
        finally:
            self._reader.sink = self._hold

    def _whole_arguments(self, is_certain: bool) -> Reading[str]:
        """Arguments that cannot be streamed: the name is not known yet, or they are a string that holds the JSON."""
        reader = self._reader
        char = yield from reader.token()
        if char == '"':
            return json_object(said((yield from reader.string())))
        num_held = len(self._held)
        yield from reader.value()
        text = "".join(self._held[num_held:])
        return "{}" if is_certain and text == "null" else json_object(text)

    def _begin(self, name: str, arguments: str = "") -> None:
        """Delivers a call; what was held has been its beginning."""
        self._deltas.append(ToolCallDelta(self._num_calls, f"call_{secrets.token_hex(12)}", name, arguments))
        self._num_calls += 1
        self._held.clear()
        self._blanks.clear()
        self._is_blank = True

    def _stream(self, raw: str, as_json: str) -> None:
        self._deltas.append(ToolCallDelta(self._num_calls - 1, None, None, as_json))


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours that say more of the same as one."""
    joined: list[Delta] = []
    for _, group in groupby(deltas, key=lambda delta: getattr(delta, "index", None)):
        parts = list(group)
        calls = [part for part in parts if isinstance(part, ToolCallDelta)]
        if calls:
            joined.append(replace(calls[0], arguments="".join(call.arguments for call in calls)))
        else:
            joined.append(ContentDelta("".join(part.text for part in parts if isinstance(part, ContentDelta))))
    return joined
