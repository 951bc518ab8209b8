"""Errors that a user of the engine meets, whatever raises them."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be run, or a checkpoint that cannot be read, in one line."""
