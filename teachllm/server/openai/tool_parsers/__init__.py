"""Tool calls out of a model's answer, while it is being written.

A model that may call tools writes its calls into its answer, in the text format that it was trained with; a client of
the OpenAI API wants text and calls apart, and both as they come. `json_reader` reads JSON that is not complete,
`parser` sorts what is read into text and calls, and `formats` knows what the models write.

parser = tool_parser("hermes")
for text in answer:
    deltas = parser.feed(text)
deltas = parser.finish()
"""

from __future__ import annotations

from teachllm.server.openai.tool_parsers.formats import HermesParser, Llama3JsonParser
from teachllm.server.openai.tool_parsers.parser import ContentDelta, Delta, ToolCallDelta, ToolParser

__all__ = ["TOOL_PARSERS", "ContentDelta", "Delta", "ToolCallDelta", "ToolParser", "tool_parser"]

TOOL_PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3_json": Llama3JsonParser}


def tool_parser(name: str) -> ToolParser:
    """A parser for one completion.

    Args:
        name: of the format, a key of `TOOL_PARSERS`.

    Raises:
        ValueError: there is no such format.
    """
    if name not in TOOL_PARSERS:
        raise ValueError(f"tool_call_parser {name!r} is not known; it must be one of: {', '.join(TOOL_PARSERS)}")
    return TOOL_PARSERS[name]()
