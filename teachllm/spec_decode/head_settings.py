"""A head's config.json, read with care: it was written by whoever trained the head, and some write numbers as strings.

Each value is asked for with its type. A wrong one is refused in one line, which names the folder and the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from teachllm.errors import ModelError

D = TypeVar("D")


@dataclass(frozen=True)
class HeadSettings:
    """Keys and values of a config.json, or of an object in it. An absent key and null mean the default.

    Attributes:
        folder: of the checkpoint.
        raw: the keys and values.
        within: the key of the object in the file, with a dot.
    """

    folder: Path
    raw: Mapping[str, Any]
    within: str = ""

    def size(self, key: str, default: D) -> int | D:
        """An integer, 1 at least. All of these raise ModelError."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not _is_int(value) or value < 1:
            raise self._refused(key, "a positive integer")
        return int(value)

    def number(self, key: str, default: D) -> float | D:
        value = self.raw.get(key)
        if value is None:
            return default
        if not _is_int(value) and not isinstance(value, float):
            raise self._refused(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._refused(key, "true or false")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """A list of integers, empty by default."""
        value = self.raw.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(map(_is_int, value)):
            raise self._refused(key, "a list of integers")
        return tuple(value)

    def section(self, key: str) -> HeadSettings:
        """An object in it, empty by default."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._refused(key, "an object")
        return HeadSettings(self.folder, value or {}, f"{self.within}{key}.")

    def _refused(self, key: str, wanted: str) -> ModelError:
        return ModelError(
            f"{self.folder}/config.json: {self.within}{key}={self.raw[key]!r} must be {wanted}: correct it there"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
