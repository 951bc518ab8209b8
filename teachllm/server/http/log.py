"""The server's log: one line an event, either `key=value` for eyes or JSON for machines. Never what users wrote."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

FORMATS = ("text", "json")


def set_up(log_format: str, uvicorn_level: str) -> None:
    """Sends our loggers and uvicorn's to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(log_format == "json"))
    for name, level in (("teachllm", "INFO"), ("uvicorn", uvicorn_level.upper())):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(5 if level == "TRACE" else level)


class _Formatter(logging.Formatter):
    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {"time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"), "level": record.levelname}
        fields |= {"event": record.getMessage(), **getattr(record, "fields", {})}
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._as_json:
            return json.dumps(fields | {"traceback": trace} if trace else fields, ensure_ascii=True)
        shown = [fields.pop("time"), fields.pop("level"), str(fields.pop("event"))]
        shown += [f"{name}={_quoted(value)}" for name, value in fields.items()]
        return " ".join(shown) + (f"\n{trace}" if trace else "")


def _quoted(value: Any) -> str:
    """As it stands where that is plain; else as JSON, so that a line stays one line."""
    text = str(value)
    plain = text.isascii() and text.isprintable() and not any(character in text for character in ' "=\\')
    return text if plain and text else json.dumps(text)
