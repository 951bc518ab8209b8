"""Calls of tools in a completion's text, in OpenAI's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from teachllm.server.openai.tool_parsers import ToolParser


class ToolText:
    """One completion's text, taken apart into what is said and what is called.

    Args:
        parallel: all calls count, not only the first.
    """

    def __init__(self, parser: ToolParser, parallel: bool) -> None:
        self._parser, self._parallel = parser, parallel
        self._has_calls = False

    def feed(self, text: str, is_end: bool) -> list[dict[str, Any]]:
        """The deltas that new text makes; `is_end`: no more will come."""
        from teachllm.server.openai.tool_parsers import ContentDelta

        found = self._parser.feed(text) if text else []
        if is_end:
            found = [*found, *self._parser.finish()]
        deltas: list[dict[str, Any]] = []
        for delta in found:
            if isinstance(delta, ContentDelta):
                deltas.append({"content": delta.text})
            elif delta.index == 0 or self._parallel:
                self._has_calls = True
                call: dict[str, Any] = {"index": delta.index, "function": {"arguments": delta.arguments}}
                if delta.name is not None:
                    call |= {"id": delta.id or f"call_{uuid4().hex}", "type": "function"}
                    call["function"] = {"name": delta.name, "arguments": delta.arguments}
                deltas.append({"tool_calls": [call]})
        return deltas

    def message(self, deltas: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what all deltas come to: the fields of a message."""
        content = "".join(delta.get("content", "") for delta in deltas)
        calls: dict[int, dict[str, Any]] = {}
        for part in (call for delta in deltas for call in delta.get("tool_calls", ())):
            index = part["index"]
            if index not in calls:
                calls[index] = {"id": part["id"], "type": "function", "function": dict(part["function"])}
            else:
                calls[index]["function"]["arguments"] += part["function"]["arguments"]
        if not calls:
            return {"content": content}
        return {"content": content or None, "tool_calls": list(calls.values())}

    def finish_reason(self, reason: str | None) -> str | None:
        """A completion that ended by itself after calling something waits for the results."""
        return "tool_calls" if reason == "stop" and self._has_calls else reason
