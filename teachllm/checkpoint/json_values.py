"""Read values out of a checkpoint's JSON files and refuse, in one line, what is not of its kind.

People write these files by hand, scripts convert them, and a wrong one often still parses: "4096" for 4096, [2] for 2,
null for a number. Each reader states the kind and the range that it expects, and the error names the file and the key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from teachllm.errors import ModelError

_LARGEST_INTEGER = (1 << 31) - 1  # of ids and sizes; products of two of them stay within 64 bits
_LARGEST_NUMBER = 2.0**62


def without_nulls(values: Mapping[str, Any], but: Collection[str] = ()) -> dict[str, Any]:
    """Return an object of a JSON file without the keys whose value is null, in objects inside of it too.

    Args:
        but: keys that stay, since null says something else of them than silence.
    """
    given = {key: value for key, value in values.items() if value is not None or key in but}
    return {key: without_nulls(value, but) if isinstance(value, dict) else value for key, value in given.items()}


def shown(value: Any) -> str:
    """Return a value as an error shows it: of a long one the beginning."""
    whole = repr(value)
    return whole if len(whole) <= 60 else f"{whole[:57]}..."


class JsonObject:
    """An object of a JSON file.

    Args:
        values: what the file holds.
        where: the file's name, and the path to an object inside it: "config.json" or "config.json: rope_scaling".

    Every method takes a key and, as `default`, what it means if it is absent; without a default the key is required.
    null is no value: leave it out of `values` where it stands for an absent key. Lists, objects and ids may be null.

    Raises:
        ModelError: from every method; the value is of another kind or out of range, or a required key is not given.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self.where = values, where

    def __bool__(self) -> bool:
        return bool(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def has(self, key: str) -> bool:
        """Return whether the key is given."""
        return self._values.get(key) is not None

    def integer(self, key: str, *default: int, least: int = 1, most: int = _LARGEST_INTEGER) -> int:
        """Return a whole number between two bounds, or one of them."""
        if not self._is_given(key, default):
            return default[0]
        value = self._values[key]
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(key, f"a whole number from {least} to {most}")
        return value

    def number(
        self, key: str, *default: float, above: float = -_LARGEST_NUMBER, below: float = _LARGEST_NUMBER
    ) -> float:
        """Return a number between two bounds."""
        if not self._is_given(key, default):
            return default[0]
        value = self._values[key]
        if type(value) not in (int, float) or not above < value < below:
            raise self.refusal(key, f"a number between {above:g} and {below:g}")
        return value

    def flag(self, key: str, *default: bool) -> bool:
        """Return true or false."""
        if not self._is_given(key, default):
            return default[0]
        if type(self._values[key]) is not bool:
            raise self.refusal(key, "true or false")
        return bool(self._values[key])

    def text(self, key: str, *default: str) -> str:
        """Return a string that is not empty."""
        if not self._is_given(key, default):
            return default[0]
        if not isinstance(self._values[key], str) or not self._values[key]:
            raise self.refusal(key, "a string")
        return str(self._values[key])

    def entries(self, key: str) -> list[Any]:
        """Return a list; an empty one if it is not given."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, list):
            raise self.refusal(key, "a list")
        return value or []

    def listed(self, key: str) -> JsonObject:
        """Return the entries of a list by their places, "[0]" and so on; an empty object if it is not given."""
        entries = {f"[{index}]": entry for index, entry in enumerate(self.entries(key))}
        return JsonObject(entries, f"{self.where}: {key}")

    def object(self, key: str) -> JsonObject:
        """Return the object under a key; an empty one if it is not given."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(key, "an object")
        return JsonObject(value or {}, f"{self.where}: {key}")

    def as_dict(self) -> dict[str, Any]:
        """Return all of its values by their keys."""
        return dict(self._values)

    def replaced_by(self, other: JsonObject) -> JsonObject:
        """Return the values of both; where both have a key, the other's counts."""
        return JsonObject({**self._values, **other._values}, f"{self.where} with {other.where}")

    def is_object(self, key: str) -> bool:
        """Return whether there is an object under a key."""
        return isinstance(self._values.get(key), dict)

    def texts(self, key: str) -> list[str]:
        """Return a list of strings; an empty one if it is not given."""
        entries = self.entries(key)
        if not all(isinstance(entry, str) for entry in entries):
            raise self.refusal(key, "a list of strings")
        return entries

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of whole numbers; an empty one if it is not given."""
        entries = self.entries(key)
        if any(type(entry) is not int for entry in entries):
            raise self.refusal(key, "a list of whole numbers")
        return tuple(entries)

    def token_ids(self, key: str) -> frozenset[int]:
        """Return the ids of an entry that is one id or a list of them; none if it is not given.

        A negative id, which some files have for "none", is left out: no token has it.
        """
        value = self._values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(each) is not int for each in ids):
            raise self.refusal(key, "a token id or a list of token ids")
        return frozenset(each for each in ids if each >= 0)

    def refusal(self, key: str, must_be: str) -> ModelError:
        """Return the error for a value that is not what it must be."""
        return ModelError(f"{self.where}: {key}={shown(self._values[key])}: must be {must_be}")

    def _is_given(self, key: str, default: tuple[Any, ...]) -> bool:
        if key in self._values:
            return True
        if not default:
            raise ModelError(f"{self.where} lacks {key!r}")
        return False
