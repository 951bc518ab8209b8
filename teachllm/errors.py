"""Errors that a user of the engine meets, whatever raises them."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be run, or a checkpoint that cannot be read, in one line."""


def counted(number: int, noun: str) -> str:
    """Return a number and what is counted, as a message has them: "1 token", "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
