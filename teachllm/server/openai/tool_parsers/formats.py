"""The text formats in which models write tool calls: one class each, that reads a whole answer."""

from __future__ import annotations

import re

from teachllm.server.openai.tool_parsers.json_reader import Reading
from teachllm.server.openai.tool_parsers.parser import ToolParser

_ANYTHING = re.compile(r"[\s\S]*")
_NO_MARKER = re.compile(r"[^<]*")  # markers begin with "<", and have no other: where one does not match, none has begun
_BEFORE_CLOSE = re.compile(r"[ \t\n\r}]*")


class HermesParser(ToolParser):
    """Hermes 2 Pro, Qwen 2.5, Qwen 3: any number of calls, in tags, anywhere in the text.

    Let me see.
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

    The object, not the tag, says where a call ends. One brace too few or too many is forgiven.
    """

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def _answer(self) -> Reading[None]:
        reader = self._reader
        while (yield from reader.peek()):
            reader.sink = self._say
            yield from reader.run(_NO_MARKER)
            reader.sink = self._hold
            marker = yield from reader.literal(self._OPEN)
            while marker == self._OPEN and (yield from self._call(is_certain=True)):
                yield from reader.run(_BEFORE_CLOSE)
                marker = yield from reader.literal(self._CLOSE, self._OPEN)
                if marker == self._CLOSE or (self._CLOSE.startswith(marker) and not (yield from reader.peek())):
                    self._held.clear()
            self._say_held()


class Llama3JsonParser(ToolParser):
    """Llama 3.1, 3.2, 3.3: an answer is calls, or it is text.

    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}

    The tag is optional: it is a special token, which not every tokenizer writes out. So is what stands between two
    calls, which the prompt may have asked for: a semicolon, a comma, or spaces alone. What follows the calls is text.
    """

    _TAG = "<|python_tag|>"

    def _answer(self) -> Reading[None]:
        reader = self._reader
        reader.sink = self._hold
        while True:
            char = yield from reader.token()
            if self._num_calls and char and char in ";,":
                reader.take()
                char = yield from reader.token()
            if self._num_calls and not char:
                self._held.clear()
            if char == "<" and (yield from reader.literal(self._TAG)) != self._TAG:
                break
            if not (yield from self._call(is_certain=char == "<")):
                break
        self._say_held()
        reader.sink = self._say
        yield from reader.run(_ANYTHING)
