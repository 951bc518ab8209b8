"""Reads JSON that is still being written.

The usual parsers want the whole text. To stream the arguments of a call one has to know, after every character, where
in the JSON it stands: inside a string, `</tool_call>` means nothing, and only the brace that closes the first one ends
an object. Parsing anew whatever has arrived, after every token, takes time that grows with the square of the length,
and guesses what an incomplete text will become.

So this is a recursive-descent parser as one would write it for a whole text, except that every method which may have
to wait for more of it is a generator. It pauses where the text ends for now, and goes on in the same place when there
is more: the state machine that this takes is the one that Python keeps for every generator. Each character is looked
at once, and since nothing else is known of a piece than what is in it, it cannot matter how the text was cut.

The grammar is that of RFC 8259 (https://www.rfc-editor.org/rfc/rfc8259), with one thing allowed that it forbids. Models
write line breaks and tabs into strings as they are; one is passed on as JSON wants it, `\\n`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from string import hexdigits
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]  # pauses until there is more text, in the end returns T
Sink: TypeAlias = Callable[[str, str], None]  # gets a piece of text as it was written, and as JSON wants it

_SPACES = re.compile(r"[ \t\n\r]*")
_IN_STRING = re.compile(r'[^"\\]*')
_IN_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_ESCAPED = {code: json.dumps(chr(code))[1:-1] for code in range(32)}


class NotJson(Exception):
    """The next character, or the end of the text, cannot stand here. The character has not been taken."""


class JsonReader:
    """Reads a text from its beginning to its end, once.

    Args:
        sink: gets every piece of the text as soon as it is taken; may be replaced between two readings.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._text, self._at = "", 0
        self._is_closed = False

    def feed(self, text: str) -> None:
        """Brings more text. What came before has been taken: otherwise the reading would not have paused."""
        self._text, self._at = text, 0

    def close(self) -> None:
        """There will be no more text."""
        self._is_closed = True

    # -- characters ----------------------------------------------------------------------------------------

    def peek(self) -> Reading[str]:
        """The next character; "" at the end of the text."""
        while self._at == len(self._text):
            if self._is_closed:
                return ""
            yield
        return self._text[self._at]

    def take(self, num_chars: int = 1, is_in_string: bool = False) -> str:
        """Takes characters that are there."""
        piece = self._text[self._at : self._at + num_chars]
        self._at += num_chars
        self.sink(piece, piece.translate(_ESCAPED) if is_in_string else piece)
        return piece

    def run(self, pattern: re.Pattern[str], is_in_string: bool = False) -> Reading[str]:
        """Takes the characters that match, `pattern` being a class of them with a star: `[a-z]*`."""
        pieces = []
        while (yield from self.peek()):
            match = pattern.match(self._text, self._at)
            if match is None or not match[0]:
                break
            pieces.append(self.take(len(match[0]), is_in_string))
        return "".join(pieces)

    def literal(self, *texts: str) -> Reading[str]:
        """Takes one of `texts` as far as it is there, and returns how far that was."""
        taken = ""
        while taken not in texts:
            char = yield from self.peek()
            if not char or not any(text.startswith(taken + char) for text in texts):
                break
            taken += self.take()
        return taken

    def one_of(self, chars: str) -> Reading[str]:
        """Takes one of these."""
        char = yield from self.peek()
        if not char or char not in chars:
            raise NotJson
        return self.take()

    # -- tokens: each takes the spaces before it -----------------------------------------------------------

    def token(self) -> Reading[str]:
        """The first character of the next token; takes the spaces alone."""
        yield from self.run(_SPACES)
        return (yield from self.peek())

    def expect(self, char: str) -> Reading[str]:
        yield from self.token()
        return (yield from self.one_of(char))

    def string(self) -> Reading[str]:
        """A string as it was written, quotes included; `said` tells what it says."""
        pieces = [(yield from self.expect('"'))]
        while True:
            pieces.append((yield from self.run(_IN_STRING, is_in_string=True)))
            pieces.append((yield from self.one_of('"\\')))
            if pieces[-1] == '"':
                return "".join(pieces)
            pieces.append((yield from self.one_of('"\\/bfnrtu')))
            if pieces[-1] == "u":
                for _ in range(4):
                    pieces.append((yield from self.one_of(hexdigits)))

    # -- values --------------------------------------------------------------------------------------------

    def value(self) -> Reading[None]:
        """One value of any kind, however deep."""
        brackets: list[str] = []  # that are open
        while True:
            char = yield from self.token()
            is_first = char in ("{", "[")
            if is_first:
                brackets.append(char)
            elif char == '"':
                yield from self.string()
            elif not _SCALAR.fullmatch((yield from self.run(_IN_SCALAR))):
                raise NotJson
            while brackets and not (yield from self._has_value(brackets[-1], is_first)):
                brackets.pop()
                is_first = False
            if not brackets:
                return

    def _has_value(self, bracket: str, is_first: bool) -> Reading[bool]:
        """Does another value follow inside of this bracket? Takes all that stands before it, or the closing bracket."""
        if bracket == "[":
            return (yield from self._has_more("[]", is_first))
        return (yield from self.key(is_first)) is not None

    def key(self, is_first: bool) -> Reading[str | None]:
        """The next key of an object, with the brace or comma before it and the colon after it.

        Returns:
            What the key says. None: the object has ended, and its brace is taken.
        """
        if not (yield from self._has_more("{}", is_first)):
            return None
        key = said((yield from self.string()))
        yield from self.expect(":")
        return key

    def _has_more(self, brackets: str, is_first: bool) -> Reading[bool]:
        """Is there one more member? Takes the opening bracket or the comma before it, or else the closing bracket."""
        if is_first:
            yield from self.expect(brackets[0])
        if (yield from self.token()) == brackets[1]:
            self.take()
            return False
        if not is_first:
            yield from self.expect(",")
        return True


def said(string: str) -> str:
    """Return what a JSON string says. Half a surrogate pair, which could not be sent on, becomes U+FFFD."""
    text: str = json.loads(string, strict=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def json_object(text: str) -> str:
    """`text`, which must be one JSON object, as JSON wants it.

    Raises:
        NotJson: it is something else.
    """
    pieces: list[str] = []

    def read(reader: JsonReader) -> Reading[None]:
        if (yield from reader.token()) != "{":
            raise NotJson
        pieces.clear()  # the spaces before it
        yield from reader.value()
        reader.sink = lambda raw, as_json: None
        if (yield from reader.token()):
            raise NotJson

    reader = JsonReader(lambda raw, as_json: pieces.append(as_json))
    reader.feed(text)
    reader.close()
    next(read(reader), None)  # a closed reader never pauses
    return "".join(pieces)
