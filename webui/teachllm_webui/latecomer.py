"""A trace whose beginning is missing: what is left of it, told so that it makes sense on its own.

A viewer that connects late finds lines about requests that arrived before. Nothing can be said of those, so they are
taken out: their scheduled tokens, blocks and ends. What is left is whole for every request that arrives from here on.
The blocks of the others look free until they really are, and in which order blocks are reused is not known: the header
gets `is_partial`, by which a view knows not to expect one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

_NO_OWNER = ("commit", "evict")  # block events that are about a block's content


class Latecomer:
    """Takes one line of a trace after the other, from any line on. What makes no sense stays as it is."""

    def __init__(self) -> None:
        self._known = set[str]()

    def header(self, text: str) -> str:
        try:
            return json.dumps(json.loads(text) | {"is_partial": True})
        except (ValueError, TypeError):
            return text

    def line(self, text: str) -> str:
        """The line without those who have never arrived."""
        try:
            return json.dumps(self._without_strangers(json.loads(text)), separators=(",", ":"))
        except (ValueError, TypeError, LookupError, AttributeError):
            return text

    def _without_strangers(self, line: dict[str, Any]) -> dict[str, Any]:
        kind, known = line["event"], self._known
        if kind == "arrival":
            known.add(line["request_id"])
        elif kind in ("abort", "stop") and line["request_id"] not in known:
            line = {"event": "other", "time": line["time"], "block_events": line["block_events"]}
        elif kind == "step":
            line["scheduled"] = [scheduled for scheduled in line["scheduled"] if scheduled["request_id"] in known]
            line["preempted"] = [name for name in line["preempted"] if name in known]
            for field in ("finished", "waiting"):
                line[field] = {name: value for name, value in line[field].items() if name in known}
        if "block_events" in line:
            line["block_events"] = list(self._block_events(line["block_events"]))
        return line

    def _block_events(self, events: Iterable[list[Any]]) -> Iterable[list[Any]]:
        for event in events:
            if len(event) < 3 or event[2] in self._known:
                yield event
            elif event[0] in _NO_OWNER:
                yield [*event[:2], "", *event[3:]]
