"""Regular expressions in a checkpoint's settings, which pick projections by their names."""

from __future__ import annotations

import re

from teachllm.checkpoint.json_values import JsonObject


def matches(pattern: str, name: str, values: JsonObject, key: str, anywhere: bool = False) -> bool:
    """Return whether a projection's name matches a regular expression, from its beginning on.

    Args:
        values, key: where it was found.
        anywhere: it may match at any place of the name.

    Raises:
        ModelError: it is none.
    """
    try:
        return (re.search if anywhere else re.match)(pattern, name) is not None
    except re.error as error:
        raise values.refusal(key, f"under a regular expression, and {pattern!r} is none ({error})") from error
